"""How many engines an application on Ray Serve has."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from quire.config.fields import check_limits, config, knob
from quire.errors import ConfigError
from quire.limits import NonNegativeFloat, NonNegativeInt, PositiveInt


@config
class RayConfig:
    """Engines on Ray Serve (`quire.ray`)."""

    num_replicas: PositiveInt = knob(
        default=1,
        unit="engines",
        help="Number of engines. With max_replicas, the minimum; with prefill_replicas, unused.",
    )
    max_replicas: NonNegativeInt = knob(
        default=0,
        unit="engines",
        help="Maximum number of engines that autoscaling starts. 0: num_replicas, always.",
    )
    prefill_replicas: NonNegativeInt = knob(
        default=0,
        unit="engines",
        help="Number of engines that compute prompts only. 0: each engine does everything.",
    )
    decode_replicas: NonNegativeInt = knob(
        default=0, unit="engines", help="Number of engines that continue prompts of prefill engines."
    )
    ingress_replicas: NonNegativeInt = knob(
        default=1,
        unit="replicas",
        help="Number of ingress replicas, which choose an engine for each request. 0: none; Ray Serve's "
        "proxies choose, by the number of requests alone.",
    )
    ingress_port: Annotated[int, Ge(0), Le(65535)] = knob(
        default=0,
        help="TCP port where ingress replicas also listen themselves, each at its machine's address: Ray "
        "Serve's proxies add milliseconds to a token under load. 0: none.",
    )
    replica_cpus: NonNegativeFloat = knob(
        default=0.0,
        unit="CPUs",
        help="CPUs that Ray reserves for an engine. 0: num_threads, at least one for each rank.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if bool(self.prefill_replicas) != bool(self.decode_replicas):
            raise ConfigError(
                f"RayConfig.prefill_replicas is {self.prefill_replicas} and decode_replicas is "
                f"{self.decode_replicas}; prompts that one computes need the other, so give both or neither"
            )
        if self.prefill_replicas and (self.max_replicas or self.num_replicas > 1):
            raise ConfigError(
                "RayConfig.num_replicas and max_replicas count engines that do everything; leave them out "
                "with prefill_replicas and decode_replicas"
            )
        if self.prefill_replicas and not self.ingress_replicas:
            raise ConfigError(
                "RayConfig.ingress_replicas is 0, but prefill_replicas and decode_replicas need an ingress "
                "that hands prompts over; set it to 1 or more"
            )
        if self.ingress_port and not self.ingress_replicas:
            raise ConfigError(
                f"RayConfig.ingress_port is {self.ingress_port}, but ingress_replicas is 0, so that none "
                "listens there; set one of them to its default"
            )
        if self.max_replicas and self.max_replicas < self.num_replicas:
            raise ConfigError(
                f"RayConfig.max_replicas is {self.max_replicas}, below num_replicas {self.num_replicas}; "
                "raise it, or set it to 0 for no autoscaling"
            )
