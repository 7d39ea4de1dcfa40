"""How a request is treated, apart from how its tokens are chosen."""

from __future__ import annotations

from quire.config import config, knob
from quire.errors import InvalidRequestError

MAX_PRIORITY = 2**31
MAX_SECONDS = 1e9


@config
class RequestOptions:
    """What a caller may say of one request to the scheduler."""

    priority: int = knob(default=0, help="Lower is served first under the priority policy.")
    cache_salt: str = knob(default="", help="Shares prefix-cache blocks only with requests of the same salt.")
    tenant: str = knob(default="", help="Whose share of the machine it uses, under the fair policy.")
    timeout: float | None = knob(
        default=None,
        help="Seconds from its arrival at the engine after which it ends with an error. None: "
        "request_timeout; 0: never.",
    )
    queue_timeout: float | None = knob(
        default=None, help="Seconds for which it may wait before it first runs. None: queue_timeout; 0: any."
    )
    pin_prefix: float = knob(
        default=0.0,
        help="Seconds for which the full blocks of its prompt are kept in the prefix cache, as long as "
        "running requests can do without them.",
    )

    def __post_init__(self) -> None:
        if type(self.priority) is not int or not -MAX_PRIORITY <= self.priority < MAX_PRIORITY:
            raise InvalidRequestError(
                f"priority is {self.priority!r}; it must be an integer from -2^31 to 2^31 - 1",
                param="priority",
            )
        for name in ("cache_salt", "tenant"):
            require_text(getattr(self, name), name)
        for name in ("timeout", "queue_timeout", "pin_prefix"):
            value = getattr(self, name)
            if value is None and name != "pin_prefix":
                continue
            if not isinstance(value, (int, float)) or not 0 <= value <= MAX_SECONDS:  # also refuses NaN
                raise InvalidRequestError(
                    f"{name} is {value!r}; it must be from 0 to {MAX_SECONDS:.0f} seconds", param=name
                )


def require_text(text: object, param: str, *, allow_empty: bool = True) -> None:
    """Raise `InvalidRequestError` for what is not a string, or not Unicode text (lone surrogates)."""
    if not isinstance(text, str) or not (text or allow_empty):
        raise InvalidRequestError(f"{param} must be a non-empty string, not {text!r}", param=param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} holds a lone surrogate (U+{ord(text[error.start]):04X}) at position {error.start}; it "
            "must be valid Unicode",
            param=param,
        ) from error
