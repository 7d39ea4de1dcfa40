"""KV outside the engine's own cache: its second tier, other engines, and news of its prefix cache."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le

from quire.config.fields import check_limits, config, knob
from quire.errors import ConfigError
from quire.limits import PositiveInt


@config
class KVTierConfig:
    """Second tier for the KV of prompts."""

    kv_tier: Literal["", "memory", "disk", "mooncake"] = knob(
        default="",
        help="Second tier for the KV of prompts, loaded when that is faster than recomputing: memory "
        "(host memory), disk, which outlives the engine, or mooncake, a store that many engines share. "
        "Empty: none.",
    )
    kv_tier_path: str = knob(
        default="auto",
        help="Directory of the disk tier; several engines may share it. auto: quire/kv in the user's cache "
        "directory.",
    )
    kv_tier_size: Annotated[float, Ge(0), Le(10**6)] = knob(
        default=4.0,
        unit="GB",
        help="Maximum size of the tier in GB (10^9 bytes), on disk for all models together; the least "
        "recently used blocks are removed first. With mooncake, host memory that this engine lends to the "
        "store; 0: none.",
    )
    kv_tier_memory_size: Annotated[float, Ge(0), Le(10**6)] = knob(
        default=0.0,
        unit="GB",
        help="Host memory in GB (10^9 bytes) in front of a disk tier, for the most recently used blocks. "
        "0: none.",
    )
    kv_tier_min_uses: PositiveInt = knob(
        default=2,
        unit="requests",
        help="Number of requests that a prefix must occur in before the tier stores it. 1: each prompt is "
        "stored at once.",
    )
    kv_tier_store: str = knob(
        default="",
        help="Address of the Mooncake store's master, as HOST:PORT. Its clients read each other's memory at "
        "kv_transfer_host.",
    )
    kv_tier_store_metadata: str = knob(
        default="P2PHANDSHAKE",
        help="Metadata server of the Mooncake store, such as http://HOST:8080/metadata. P2PHANDSHAKE: none.",
    )
    kv_tier_store_protocol: Literal["tcp", "rdma"] = knob(
        default="tcp",
        help="How the Mooncake store moves blocks between machines.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
        self._check_store()
        if self.kv_tier_memory_size and self.kv_tier != "disk":
            raise ConfigError(
                f"KVTierConfig.kv_tier_memory_size is {self.kv_tier_memory_size} GB in front of a disk tier, "
                f"but kv_tier is {self.kv_tier!r}; set kv_tier to 'disk', or leave kv_tier_memory_size at 0"
            )

    def _check_store(self) -> None:
        host, _, port = self.kv_tier_store.rpartition(":")
        is_address = host and port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535
        if self.kv_tier == "mooncake" and not is_address:
            raise ConfigError(
                f"KVTierConfig.kv_tier_store is {self.kv_tier_store!r}; kv_tier mooncake needs the "
                "address of mooncake_master there, such as 10.0.0.1:50051"
            )
        if self.kv_tier_store and self.kv_tier != "mooncake":
            raise ConfigError(
                f"KVTierConfig.kv_tier_store is {self.kv_tier_store!r}, but kv_tier is {self.kv_tier!r}; set "
                "kv_tier to 'mooncake', or leave kv_tier_store empty"
            )


@config
class KVTransferConfig:
    """KV that engines read from each other; `EngineConfig.role` says which of them compute prompts."""

    kv_transfer_host: str = knob(
        default="127.0.0.1",
        help="IPv4 address of this machine at which other engines read its KV.",
    )
    kv_transfer_port: Annotated[int, Ge(0), Le(65535)] = knob(
        default=0,
        help="TCP port to serve KV on. 0: any free port with role prefill, otherwise off.",
    )
    kv_transfer_token: str = knob(
        default="",
        help="Secret shared by all engines that read each other's KV. Empty: none; use only on a private "
        "network.",
    )
    kv_peers: str = knob(
        default="",
        help="Engines whose prefix caches are searched for the part of a prompt that is not cached here, as "
        "HOST:PORT with commas between; the port is their kv_transfer_port. Empty: none.",
    )
    kv_transports: str = knob(
        default="shared_memory,tcp",
        help="Transports for KV between engines, in order of preference: shared_memory, tcp, nixl. The "
        "first that works on both sides is used.",
    )

    def __post_init__(self) -> None:
        check_limits(self)


@config
class KVEventsConfig:
    """Changes of the prefix cache, published to subscribers."""

    kv_events_endpoint: str = knob(
        default="",
        help="ZeroMQ address at which to publish changes of the prefix cache. It is bound if it has *, ::, "
        "ipc:// or inproc://, such as tcp://*:5557, and otherwise connected to. Empty: not published.",
    )
    kv_events_topic: str = knob(
        default="",
        help="Topic of the published changes. Empty: kv@HOST:PORT@MODEL, of the server and the served model.",
    )
    kv_events_data_parallel_rank: Annotated[int, Ge(0), Le(65535)] | None = knob(
        default=None,
        help="Number of this engine among replicas behind one name: added to the ports, and published with "
        "each batch. None: there is no number.",
    )
    kv_events_replay_endpoint: str = knob(
        default="",
        help="ZeroMQ address to bind, from which subscribers can fetch KV events that they missed. Empty: "
        "none.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if self.kv_events_replay_endpoint and not self.kv_events_endpoint:
            raise ConfigError(
                f"KVEventsConfig.kv_events_replay_endpoint is {self.kv_events_replay_endpoint!r}, but "
                "nothing is published; set KVEventsConfig.kv_events_endpoint too"
            )

    def topic_of(self, pod: str, model: str) -> str:
        """Return the topic of an engine: the configured one, or that of `pod` and `model`."""
        return self.kv_events_topic or f"kv@{pod}@{model}"
