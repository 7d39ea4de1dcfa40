"""One tenant of the HTTP server: an entry of the key file."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt, Le, MaxLen

from quire.config.fields import check_limits, config, knob


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
    admin: bool = knob(default=False, help="Whether it sees the requests of all tenants.")
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

    def __post_init__(self) -> None:
        check_limits(self)
