"""One tenant of the HTTP server: an entry of the key file."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt, Le, MaxLen

from quire.config.fields import check_limits, config, knob
from quire.errors import ConfigError
from quire.limits import NonNegativeFloat, NonNegativeInt


@config
class TenantConfig:
    """A tenant: who sends its keys. `keys` stands beside these fields in the key file."""

    name: Annotated[str, MaxLen(64)] = knob(
        default="", help="Name of its table in the key file, where this field is left out."
    )
    weight: Annotated[float, Gt(0), Le(1000)] = knob(
        default=1.0,
        help="Share of the engine with the fair policy, relative to other tenants' weights.",
    )
    admin: bool = knob(
        default=False,
        help="Whether it may list and abort all tenants' requests, see their metrics, clear the prefix "
        "cache and, with engine_control, pause the engine.",
    )
    kv_transfer: bool = knob(
        default=False,
        help="Whether it may send kv_transfer_params, which have the engine connect to addresses in them: "
        "for routers.",
    )
    cache_group: Annotated[str, MaxLen(64)] = knob(
        default="",
        help="Tenants of the same group share cached prefixes, and can find out what the others have sent. "
        "Empty: cached prefixes are its own.",
    )

    requests_per_minute: NonNegativeInt = knob(
        default=0,
        unit="sequences",
        help="Maximum number of requests per minute, and at once; each prompt of a call counts n times. "
        "0: no limit.",
    )
    tokens_per_minute: NonNegativeInt = knob(
        default=0,
        unit="tokens",
        help="Maximum number of tokens per minute, and at once: prompt tokens, cached ones included, and "
        "max_tokens of each sequence; tokens not generated are refunded. 0: no limit.",
    )
    max_running_seqs: NonNegativeInt = knob(
        default=0,
        unit="sequences",
        help="Maximum number of sequences in the engine at once; others wait in the order in which they "
        "came. 0: no limit.",
    )
    max_queued_seqs: NonNegativeInt = knob(
        default=0,
        unit="sequences",
        help="Maximum number of sequences that wait because of max_running_seqs. 0: no limit.",
    )
    max_pending_grammars: NonNegativeInt = knob(
        default=0,
        unit="calls",
        help="Maximum number of calls with structured output that have not begun to generate, because "
        "their grammar is being compiled or they wait. 0: no limit.",
    )

    max_pin_time: NonNegativeFloat = knob(
        default=0.0,
        unit="seconds",
        help="Maximum time to pin its prompts' blocks; a longer pin_prefix is shortened to this. 0: no "
        "limit but the engine's.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if self.max_queued_seqs and not self.max_running_seqs:
            raise ConfigError(
                f"TenantConfig.max_queued_seqs is {self.max_queued_seqs}, but without max_running_seqs "
                "nothing waits; set that too"
            )
