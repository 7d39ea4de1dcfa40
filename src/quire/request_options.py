"""Request options other than sampling parameters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Annotated

from annotated_types import Ge, Gt, Le, MaxLen

from quire.config import config, knob
from quire.errors import InvalidRequestError
from quire.limits import violation

LOWEST_PRIORITY = 2**31 - 1

ShortText = Annotated[str, MaxLen(256)]
TenantWeight = Annotated[float, Gt(0), Le(1000)]
Seconds = Annotated[float, Ge(0), Le(10**9)]
KVTransferValue = ShortText | bool | Annotated[int, Ge(-(2**63)), Le(2**63 - 1)] | None
KVTransferParams = Annotated[Mapping[ShortText, KVTransferValue], MaxLen(16)]


@config
class RequestOptions:
    """Scheduling options of one request.

    Raises:
        InvalidRequestError: a value is outside its limits, or no Unicode text.
        ConfigError: there is no field of that name.
    """

    priority: Annotated[int, Ge(-(2**31)), Le(LOWEST_PRIORITY)] = knob(
        default=0, help="Lower values are served first with the priority policy."
    )
    cache_salt: ShortText = knob(
        default="",
        help="Prefix-cache blocks, and drafts from earlier outputs, are shared only between requests with "
        "the same salt.",
    )
    tenant: ShortText = knob(default="", help="Whose share the request counts towards with the fair policy.")
    tenant_weight: TenantWeight = knob(
        default=1.0, help="Share of the request's tenant with the fair policy, relative to others'."
    )
    timeout: Seconds | None = knob(
        default=None,
        unit="seconds",
        help="Time from the request's arrival at the engine after which it times out. None: "
        "request_timeout; 0: no timeout.",
    )
    queue_timeout: Seconds | None = knob(
        default=None,
        unit="seconds",
        help="Maximum time that the request waits before it first runs. None: queue_timeout; 0: no limit.",
    )
    pin_prefix: Seconds = knob(
        default=0.0,
        unit="seconds",
        help="How long the full blocks of the prompt are kept in the prefix cache, unless running requests "
        "need the memory.",
    )
    kv_transfer_params: KVTransferParams | None = knob(
        default=None,
        unit="names to strings, whole numbers, booleans or null; strings and names of up to 256 characters",
        help="What the KV connector must know to find the prompt's KV elsewhere, or to keep it for others.",
    )

    def __post_init__(self) -> None:
        if (found := violation(self)) is not None:
            name, refusal = found
            raise InvalidRequestError(f"{name} {refusal}", param=name)
        for name in ("cache_salt", "tenant"):
            require_text(getattr(self, name), name)
        for text in itertools.chain.from_iterable((self.kv_transfer_params or {}).items()):
            if isinstance(text, str):
                require_text(text, "kv_transfer_params")


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
