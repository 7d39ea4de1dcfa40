"""The engine's unfinished requests: none is lost on any failure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from quire.scheduling.interface import SchedulerInterface
from quire.scheduling.outputs import EngineCoreOutput
from quire.status import FinishReason

logger = logging.getLogger(__name__)

LOST = (
    "the engine lost this request after an internal error, which its log has, and has ended it; send it again"
)


class OwnedRequests(dict[str, Sequence[str]]):
    """The requests that are still to have their terminal output: by id, the ids that their outputs have.

    As long as the scheduler has as many, nothing is looked at. Otherwise the outputs say who has ended; a
    request that the scheduler does not know after two steps, and that had no terminal output, is lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self._missing: set[str] = set()  # unknown to the scheduler after the last step
        self._has_logged = False  # that the scheduler's answers cannot be used

    def settle(
        self, outputs: list[EngineCoreOutput], scheduler: SchedulerInterface
    ) -> list[EngineCoreOutput]:
        """Take note of the outputs of a step; return the terminal outputs of requests that are lost."""
        if self._is_complete(scheduler):
            return []
        for output in outputs:
            if output.finish_reason is not None:
                self.pop(output.request_id, None)
        if self._is_complete(scheduler):
            return []
        missing = {request_id for request_id in self if not self._has(request_id, scheduler)}
        lost, self._missing = missing & self._missing, missing - self._missing
        if lost:
            logger.error("the scheduler has lost %d requests; they end with an error: %s", len(lost), lost)
        return self.end(sorted(lost), FinishReason.ERROR, LOST)

    def end_all(self, reason: FinishReason) -> list[EngineCoreOutput]:
        """Return the terminal outputs of all requests; none is left."""
        return self.end(sorted(self), reason, None)

    def _is_complete(self, scheduler: SchedulerInterface) -> bool:
        """Whether the scheduler has as many requests, each of which is then one of these."""
        try:
            is_complete = len(self) == scheduler.get_num_unfinished_requests()
        except Exception:
            self._log_fault()
            return False
        if is_complete and self._missing:
            self._missing = set()
        return is_complete

    def _has(self, request_id: str, scheduler: SchedulerInterface) -> bool:
        """Whether the scheduler has a request; one that cannot say has it."""
        try:
            return bool(scheduler.has_request(request_id))
        except Exception:
            self._log_fault()
            return True

    def _log_fault(self) -> None:
        if not self._has_logged:
            self._has_logged = True
            logger.exception("the scheduler could not list its requests; logged once")

    def end(
        self, request_ids: Iterable[str], reason: FinishReason, error: str | None
    ) -> list[EngineCoreOutput]:
        """Return the terminal outputs of those of these requests that had none, and let go of them."""
        return [
            EngineCoreOutput(sequence_id, [], finish_reason=reason, error=error)
            for request_id in tuple(request_ids)
            for sequence_id in self.pop(request_id, ())
        ]
