"""Status codes, and the exception with a status code."""

from __future__ import annotations

from enum import IntEnum

from typing_extensions import override

from quire.errors import QuireError


class LLMStatusCode(IntEnum):
    """The result of an operation; docs/datadist.md explains each. Compare members."""

    LLM_SUCCESS = 0
    LLM_WAIT_PROCESS_TIMEOUT = 1
    LLM_KV_CACHE_NOT_EXIST = 2
    LLM_REPEAT_REQUEST = 3
    LLM_REQUEST_ALREADY_COMPLETED = 4
    LLM_PARAM_INVALID = 5
    LLM_ENGINE_FINALIZED = 6
    LLM_NOT_YET_LINK = 7
    LLM_ALREADY_LINK = 8
    LLM_LINK_FAILED = 9
    LLM_UNLINK_FAILED = 10
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = 11
    LLM_CLUSTER_NUM_EXCEED_LIMIT = 12
    LLM_PROCESSING_LINK = 13
    LLM_DEVICE_OUT_OF_MEMORY = 14
    LLM_PREFIX_ALREADY_EXIST = 15
    LLM_PREFIX_NOT_EXIST = 16
    LLM_SEQ_LEN_OVER_LIMIT = 17
    LLM_NO_FREE_BLOCK = 18
    LLM_BLOCKS_OUT_OF_MEMORY = 19
    LLM_EXIST_LINK = 24
    LLM_FEATURE_NOT_ENABLED = 25
    LLM_TIMEOUT = 26
    LLM_LINK_BUSY = 27
    LLM_OUT_OF_MEMORY = 28
    LLM_FAILED = 255

    @override
    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    @override
    def __format__(self, format_spec: str) -> str:
        return format(str(self), format_spec)


class LLMException(QuireError, RuntimeError):  # noqa: N818 - the interface's name
    """An operation failed because of role, state, another argument or the peer.

    Args:
        args: what, value, limit and the knob to turn.
        status_code: machine-readable status.
    """

    def __init__(self, *args: object, status_code: LLMStatusCode = LLMStatusCode.LLM_FAILED) -> None:
        super().__init__(*args)
        self._status_code = status_code

    @property
    def status_code(self) -> LLMStatusCode:
        """Machine-readable status."""
        return self._status_code


def failure(status_code: LLMStatusCode, message: str) -> LLMException:
    """Return an exception to raise."""
    return LLMException(message, status_code=status_code)


def invalid(message: str) -> LLMException:
    """Return an exception with LLM_PARAM_INVALID to raise."""
    return failure(LLMStatusCode.LLM_PARAM_INVALID, message)
