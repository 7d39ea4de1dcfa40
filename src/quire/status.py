"""Status and finish reason of a request."""

from __future__ import annotations

import enum


class RequestStatus(enum.IntEnum):
    """The status of a request; from FINISHED_STOPPED on it is terminal."""

    WAITING = 0
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH_CAPPED = 6
    FINISHED_ABORTED = 7
    FINISHED_IGNORED = 8
    FINISHED_ERROR = 9

    @property
    def is_terminal(self) -> bool:
        """Whether a request has ended."""
        return self >= RequestStatus.FINISHED_STOPPED


class FinishReason(enum.StrEnum):
    """Why a request ended, in OpenAI's words where they exist."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    @classmethod
    def of(cls, status: RequestStatus) -> FinishReason:
        """Return the reason for a terminal status; `KeyError` for any other."""
        return _FINISH_REASONS[status]


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}
