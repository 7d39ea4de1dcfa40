"""Errors that Quire raises, from the most general to the most particular.

Every message says what was wrong, the value, the limit, and the knob to turn. Errors that belong to one
request end that request only; see `InvalidRequestError.param` for the field at fault.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QuireError(Exception):
    """Base of every error that Quire raises on purpose."""


class ConfigError(QuireError, ValueError):
    """A configuration field has an unknown name or an unusable value."""


class ModelError(QuireError):
    """A model cannot be found, read or understood."""


class ModelNotFoundError(ModelError):
    """No model under this name: neither built in, nor a local directory, nor reachable on the hub."""


class UnknownArchitectureError(ModelError):
    """The checkpoint's architecture is not one that Quire knows; the message has the nearest names."""


class InvalidRequestError(QuireError, ValueError):
    """A request that can never be served as written.

    Args:
        message: what, value, limit and the knob to turn.
        param: the request field at fault, or None if no single field is.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """A prompt, or what may follow it, that does not fit the model's maximum length."""


class DuplicateRequestError(InvalidRequestError):
    """A request id that is still in use."""


class QueueFullError(QuireError):
    """The waiting queue is at its bound; try again later.

    Args:
        message: which bound, its value and the knob to turn.
        retry_after: suggested wait in seconds.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestTimeoutError(QuireError):
    """A request timed out before it started or ended; tokens generated so far stay valid."""


class KVFileError(QuireError):
    """KV cannot be saved to a file or restored from it; the message says why."""


class EngineDeadError(QuireError):
    """The engine has ended; requests in flight are answered with this."""


class EngineAsleepError(EngineDeadError):
    """The engine has been ended for the time being, and takes no requests until it is woken."""


class CrashLoopError(EngineDeadError):
    """The engine keeps crashing and is not restarted."""


class RequestQuarantinedError(QuireError):
    """A request is not tried again, because engines have died while they computed it."""


class ExchangeError(QuireError):
    """A rank of a tensor-parallel engine does not take part in an exchange with the others."""


_MAX_COMPARED = 200
"""Characters of a name up to which others are compared with it; with millions, that takes long."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the tail of an error about an unknown name: the nearest known one, or the whole list."""
    choices = sorted(known)
    is_comparable = len(name) <= _MAX_COMPARED
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5) if is_comparable else []
    return f"did you mean {close[0]!r}?" if close else f"known names: {', '.join(choices)}"


def known_prompts(names: Iterable[str]) -> str:
    """Return the tail of an error about an unknown prompt of a model: those that it has."""
    return f"the prompts {', '.join(sorted(names))}"[:1000] if (names := list(names)) else "no prompts"
