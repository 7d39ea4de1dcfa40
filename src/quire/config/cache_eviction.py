"""Which KV blocks a sequence keeps."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Gt, Le

from quire.config.fields import (
    Choice,
    SettableConfig,
    check_limits,
    knob,
    refuse_partial_blocks,
    settable_config,
)
from quire.errors import ConfigError
from quire.limits import NonNegativeInt, PositiveInt


class AggregationMode(Choice):
    """How the attention weights that a token gets in each step make up its score."""

    SUM = "sum"  # added up
    NORM_SUM = "norm_sum"  # added up and divided by the token's lifetime
    ADAPTIVE_RKV = "adaptive_rkv"  # the mean of the last steps; diverse blocks stay beside attended ones


class ScorePooling(Choice):
    """Max-pooling window of seven tokens over attention weights, so that neighbours stay together."""

    FORWARD = "forward"  # itself and the six after it, as in OpenVINO GenAI
    CENTERED = "centered"  # itself, the three before and the three after it, as in SnapKV (Li et al. 2024)


class KVCrushAnchorPointMode(Choice):
    """Which bits KVCrush measures the distance of a block's bits from."""

    RANDOM = "random"
    ZEROS = "zeros"
    ONES = "ones"
    MEAN = "mean"  # what most blocks have at that place
    ALTERNATING = "alternating"  # 0, 1, 0, 1, ...


@settable_config(kw_only=False)
class KVCrushConfig(SettableConfig):
    """Blocks that stay although their score is low, chosen to be unlike each other (Jha et al. 2025)."""

    budget: NonNegativeInt = knob(
        default=0,
        unit="blocks",
        help="Number of otherwise evicted blocks to keep, in addition to max_cache_size. 0: none.",
    )
    anchor_point_mode: KVCrushAnchorPointMode = knob(
        default=KVCrushAnchorPointMode.RANDOM,
        help="Bits that a block's bits are compared with: random, zeros, ones, mean (what most blocks have), "
        "or alternating.",
    )
    rng_seed: NonNegativeInt = knob(
        default=0, help="Seed of the random bits of each sequence, for the anchor random."
    )

    def __post_init__(self) -> None:
        check_limits(self)


@settable_config(kw_only=False)
class AdaptiveRKVConfig(SettableConfig):
    """How the aggregation mode adaptive_rkv chooses blocks."""

    attention_mass: Annotated[float, Gt(0), Le(1)] = knob(
        default=0.9,
        unit="fraction",
        help="Fraction of the attention that the blocks with the highest scores keep; the remaining places "
        "go to the most diverse blocks.",
    )
    window_size: PositiveInt = knob(
        default=8, unit="steps", help="Number of the last steps whose mean is a token's score."
    )

    def __post_init__(self) -> None:
        check_limits(self)


_PARTS = {"kvcrush_config": KVCrushConfig, "adaptive_rkv_config": AdaptiveRKVConfig}


@settable_config(kw_only=False)
class CacheEvictionConfig(SettableConfig):
    """Which KV blocks a sequence keeps when it exceeds a length: see `SchedulerConfig.use_cache_eviction`.

    A sequence keeps its first `start_size` and its last `recent_size` tokens; of the blocks between, those
    that attention gives least weight to are evicted. All sizes are multiples of the block size.

    Raises:
        ConfigError: a value is outside its limits, or `max_cache_size` leaves nothing to choose from.
    """

    start_size: PositiveInt = knob(
        default=32, unit="tokens", help="Number of tokens at the start of a sequence that are never evicted."
    )
    recent_size: PositiveInt = knob(
        default=128, unit="tokens", help="Number of the latest tokens that are not evicted."
    )
    max_cache_size: PositiveInt = knob(
        default=672,
        unit="tokens",
        help="Number of tokens that a sequence keeps once its prompt is computed; up to a block less one "
        "token more until a block is full, and the KVCrush budget.",
    )
    aggregation_mode: AggregationMode = knob(
        default=AggregationMode.NORM_SUM,
        help="Score of a token: sum (of its attention weights over the steps), norm_sum (divided by its "
        "lifetime), or adaptive_rkv (mean over the last steps, and diversity).",
    )
    apply_rotation: bool = knob(
        default=False,
        help="Rotate the keys after an evicted block to their new positions, so that positions stay "
        "contiguous. Needs one plain rotary embedding over whole heads, and no KV cache in int8 or fp8.",
    )
    snapkv_window_size: NonNegativeInt = knob(
        default=8,
        unit="tokens",
        help="Number of tokens at the end of a prompt whose attention scores the others. 0: all.",
    )
    kvcrush_config: KVCrushConfig = knob(
        default_factory=KVCrushConfig, help="Which blocks KVCrush retains. None: the defaults."
    )
    adaptive_rkv_config: AdaptiveRKVConfig = knob(
        default_factory=AdaptiveRKVConfig, help="How adaptive_rkv chooses. None: the defaults."
    )
    score_pooling: ScorePooling = knob(
        default=ScorePooling.FORWARD,
        help="Max-pooling window over attention weights: forward (a token and the six after it), or "
        "centered (it and three on each side).",
    )

    def __post_init__(self) -> None:
        self.validate()

    def __setattr__(self, name: str, value: Any) -> None:
        if value is None and name in _PARTS:
            value = _PARTS[name]()
        SettableConfig.__setattr__(self, name, value)  # the class has slots: no super()

    def validate(self) -> None:
        """Raise `ConfigError` for a value outside its limits, its own or of a configuration that it holds."""
        check_limits(self)
        check_limits(self.kvcrush_config)
        check_limits(self.adaptive_rkv_config)
        if self.get_evictable_size() <= 0:
            raise ConfigError(
                f"CacheEvictionConfig.max_cache_size is {self.max_cache_size}; it must be above start_size + "
                f"recent_size, {self.start_size} + {self.recent_size}"
            )

    def get_start_size(self) -> int:
        """Return the number of tokens at the start that are never evicted."""
        return self.start_size

    def get_recent_size(self) -> int:
        """Return the number of the latest tokens that are not evicted."""
        return self.recent_size

    def get_max_cache_size(self) -> int:
        """Return the number of tokens that a sequence keeps."""
        return self.max_cache_size

    def get_evictable_size(self) -> int:
        """Return the number of tokens that are kept between the start and the recent ones."""
        return self.max_cache_size - self.start_size - self.recent_size

    def refuse_block_size(self, block_size: int) -> None:
        """Raise `ConfigError` if a size is no multiple of `block_size` tokens."""
        refuse_partial_blocks(self, ("start_size", "recent_size", "max_cache_size"), block_size)
