"""What happens when an engine process dies or hangs."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt

from quire.config.fields import check_limits, config, knob
from quire.limits import NonNegativeFloat, PositiveInt


@config
class SupervisionConfig:
    """Supervision of an engine that runs in its own process."""

    recovery: Literal["on", "off"] = knob(
        default="on",
        help="on: an engine process that dies is replaced, and live requests continue where they were. off: "
        "live requests end with an error, and later ones are refused.",
    )
    watchdog_timeout: NonNegativeFloat = knob(
        default=60.0,
        unit="seconds",
        help="Maximum time between two finished steps of an engine that has requests. One that takes longer "
        "logs its stacks, is killed, and is treated as if it had died; /health answers 503. 0: no limit.",
    )
    max_request_crashes: PositiveInt = knob(
        default=2,
        unit="crashes",
        help="Maximum number of consecutive engine crashes before a request has any output; then it ends "
        "with an error, as the possible cause.",
    )
    max_engine_crashes: PositiveInt = knob(
        default=6,
        unit="crashes",
        help="Maximum number of engine crashes within crash_window without any output in between; after "
        "that, no engine is restarted and a server exits with an error.",
    )
    crash_window: Annotated[float, Gt(0)] = knob(
        default=300.0, unit="seconds", help="Time within which max_engine_crashes counts."
    )

    standby_engine: bool = knob(
        default=False,
        help="Keep a standby process, with all modules imported, that becomes the next engine. It takes "
        "160 MB of memory and saves most of the restart time of a small model.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
