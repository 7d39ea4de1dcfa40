"""Every knob of Quire: a field with its default, limits, unit and meaning.

Validation, command-line flags and documentation all come from these fields (see `quire.limits` and
`quire.cli.options`), so a knob that is not here does not exist. An unknown name is an error that suggests the
nearest known one.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar, dataclass_transform

from annotated_types import Ge, Gt, Le, Lt

from quire.errors import ConfigError, nearest_name
from quire.limits import BuiltIn, NonNegativeFloat, NonNegativeInt, PositiveInt, violation

T = TypeVar("T")

BUILT_IN_MODEL = "mini"


def knob(
    *,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    unit: str = "",
    help: str,
) -> Any:
    """Declare a field; its annotation carries its limits (see `quire.limits`).

    Args:
        default: value if it is not given.
        default_factory: makes the value if it is not given, instead of `default`.
        unit: what its number counts, or what its list holds, such as "tokens".
        help: what it means, what 0 or empty means; used by the command line and the documentation.
    """
    metadata = {"help": help, "unit": unit}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def stands_for(cls: type, name: str, *, default: Any, help: str = "") -> Any:
    """Declare a field that stands for the field `name` of `cls`, whose limits and unit it has.

    Args:
        cls: the other class.
        name: of its field.
        default: value if it is not given.
        help: what it means if that differs.
    """
    [field] = [field for field in dataclasses.fields(cls) if field.name == name]
    metadata = {**field.metadata, "stands_for": (cls, name)}
    if help:
        metadata["help"] = help
    return dataclasses.field(default=default, metadata=metadata)


def refuse_unknown_names(cls: type, names: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if `names` holds a key that is not a field of the dataclass `cls`."""
    known = [field.name for field in dataclasses.fields(cls)]
    for name in names:
        if name not in known:
            raise ConfigError(f"{cls.__name__} has no field {name!r}; {nearest_name(name, known)}")


def _with_checked_names(cls: type[T]) -> type[T]:
    generated_init: Callable[..., None] = cls.__init__
    known = frozenset(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]

    @functools.wraps(generated_init)
    def checked_init(self: Any, /, **values: Any) -> None:
        if not known.issuperset(values):
            refuse_unknown_names(cls, values)
        generated_init(self, **values)

    cls.__init__ = checked_init  # type: ignore[assignment]
    return cls


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, knob))
def config(cls: type[T]) -> type[T]:
    """Make a class a frozen, keyword-only, slotted dataclass whose error about an unknown name helps."""
    return _with_checked_names(dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls))


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field, knob, stands_for))
def settable_config(cls: type[T]) -> type[T]:
    """Like `config`, but fields can be set after construction, as in OpenVINO GenAI."""
    return _with_checked_names(dataclasses.dataclass(kw_only=True, slots=True)(cls))


def check_limits(owner: Any) -> None:
    """Raise `ConfigError` for the first field of `owner` whose value is outside the field's limits."""
    if (found := violation(owner)) is not None:
        name, refusal = found
        raise ConfigError(f"{type(owner).__name__}.{name} {refusal}")


def refuse_partial_blocks(owner: Any, names: Iterable[str], block_size: int) -> None:
    """Raise `ConfigError` for the first of these fields that is no multiple of `block_size` tokens."""
    for name in names:
        if (size := getattr(owner, name)) % block_size:
            raise ConfigError(
                f"{type(owner).__name__}.{name} is {size}; it must be a multiple of the block size, "
                f"SchedulerConfig.block_size {block_size}"
            )


class AggregationMode(enum.StrEnum):
    """How the attention weights that a token gets in each step make up its score."""

    SUM = "sum"  # added up
    NORM_SUM = "norm_sum"  # added up and divided by the token's lifetime
    ADAPTIVE_RKV = "adaptive_rkv"  # the mean of the last steps; diverse blocks stay beside attended ones


class KVCrushAnchorPointMode(enum.StrEnum):
    """Which bits KVCrush measures the distance of a block's bits from."""

    RANDOM = "random"
    ZEROS = "zeros"
    ONES = "ones"
    MEAN = "mean"  # what most blocks have at that place
    ALTERNATING = "alternating"  # 0, 1, 0, 1, ...


@config
class KVCrushConfig:
    """Blocks that stay although their score is low, chosen to be unlike each other (Jha et al. 2025)."""

    budget: NonNegativeInt = knob(
        default=0,
        unit="blocks",
        help="Number of blocks that stay of those that would be evicted, in addition to max_cache_size. "
        "0: none.",
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


@config
class AdaptiveRKVConfig:
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


@config
class CacheEvictionConfig:
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
        help="Rotate the keys behind an evicted block to the positions that they then have, so that "
        "positions stay contiguous. Needs one plain rotary embedding over whole heads, and no int8 KV cache.",
    )
    snapkv_window_size: NonNegativeInt = knob(
        default=8,
        unit="tokens",
        help="Number of tokens at the end of a prompt whose attention scores the others. 0: all.",
    )
    kvcrush_config: KVCrushConfig | None = knob(
        default=None, help="Which blocks KVCrush retains. None: it is off."
    )
    adaptive_rkv_config: AdaptiveRKVConfig | None = knob(
        default=None, help="How adaptive_rkv chooses. None: the defaults."
    )

    def __post_init__(self) -> None:
        check_limits(self)
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


class SparseAttentionMode(enum.StrEnum):
    """How the tokens of a prompt leave out keys."""

    TRISHAPE = "trishape"  # all tokens of a chunk see the first and the most recent keys
    XATTENTION = "xattention"  # each head selects the key blocks that matter to a block of queries


@config
class SparseAttentionConfig:
    """Which keys the tokens of a prompt leave out: see `SchedulerConfig.use_sparse_attention`.

    The names beginning with `num_retained` belong to the mode trishape, those with `xattention` to the other.
    """

    mode: SparseAttentionMode = knob(
        default=SparseAttentionMode.TRISHAPE,
        help="What the tokens of a chunk of a prompt see: trishape (the first and the most recent keys, and "
        "the chunk), or xattention (the key blocks that each head estimates to matter).",
    )
    num_last_dense_tokens_in_prefill: NonNegativeInt = knob(
        default=100, unit="tokens", help="Number of tokens at the end of a prompt that see all keys."
    )
    num_retained_start_tokens_in_cache: NonNegativeInt = knob(
        default=128,
        unit="tokens",
        help="Number of tokens at the start of a prompt that all others see; a multiple of the block size.",
    )
    num_retained_recent_tokens_in_cache: NonNegativeInt = knob(
        default=1920,
        unit="tokens",
        help="Number of tokens before a chunk that the chunk sees; a multiple of the block size.",
    )
    xattention_threshold: Annotated[float, Ge(0), Le(1)] = knob(
        default=0.8,
        unit="fraction",
        help="Fraction of the estimated attention of a block of queries that the selected keys make up. "
        "0: all keys are seen.",
    )
    xattention_block_size: Literal[64, 128, 256] = knob(
        default=64, unit="tokens", help="Number of tokens per block of queries and of keys."
    )
    xattention_stride: Literal[4, 8, 16, 32] = knob(
        default=8,
        unit="tokens",
        help="Number of queries and of keys that the estimate takes together: the larger, the cheaper and "
        "the less exact.",
    )

    def __post_init__(self) -> None:
        check_limits(self)

    def refuse_block_size(self, block_size: int) -> None:
        """Raise `ConfigError` if what trishape retains is no multiple of `block_size` tokens."""
        if self.mode == SparseAttentionMode.TRISHAPE:
            names = ("num_retained_start_tokens_in_cache", "num_retained_recent_tokens_in_cache")
            refuse_partial_blocks(self, names, block_size)


@settable_config
class SchedulerConfig:
    """Which requests run in a step, and how large the KV cache is.

    Fields can be set as attributes after construction without arguments, as in OpenVINO GenAI, or given as
    keyword arguments. The engine validates and copies the configuration when it is built; later changes to
    the original have no effect.
    """

    max_num_batched_tokens: PositiveInt = knob(
        default=512, unit="tokens", help="Maximum number of tokens computed per step, over all sequences."
    )
    max_num_seqs: PositiveInt = knob(
        default=256, unit="sequences", help="Maximum number of sequences per step."
    )
    block_size: PositiveInt = knob(default=16, unit="tokens", help="Number of tokens per KV block.")
    num_kv_blocks: NonNegativeInt = knob(
        default=0,
        unit="blocks",
        help="Number of KV blocks in the cache; overrides cache_size. 0: derived from cache_size.",
    )
    cache_size: NonNegativeFloat = knob(
        default=0.0,
        unit="GB",
        help="Size of the KV cache in GB (10^9 bytes). 0, with num_kv_blocks 0: sized from the free memory.",
    )
    enable_prefix_caching: bool = knob(
        default=True, help="Keep computed blocks for later requests with the same prefix."
    )
    dynamic_split_fuse: bool = knob(
        default=True,
        help="Split long prompts over several steps and batch the chunks with decoding. Off: a step computes "
        "either whole prompts or next tokens, and a prompt that does not fit into one step is refused.",
    )
    policy: Annotated[str | Any, BuiltIn("fcfs", "priority", "fair", "longest-prefix")] = knob(
        default="fcfs",
        help="Order in which requests are served: fcfs (first come, first served), priority (lower value "
        "first, ties by arrival), fair (equal shares for all tenants), longest-prefix (longest cached prefix "
        "first), or the dotted name of a QueueOrder class.",
    )
    priority_ageing: NonNegativeFloat = knob(
        default=60.0,
        unit="seconds",
        help="Waiting time that raises a request by one priority level, so that no request starves. "
        "0: no ageing.",
    )
    admission: Annotated[str | Any, BuiltIn("reserve", "past-future")] = knob(
        default="reserve",
        help="When a waiting request may start: reserve (its prompt fits, see watermark and "
        "reserve_full_prompt), past-future (the predicted peak memory of all running requests fits), or the "
        "dotted name of an AdmissionPolicy class.",
    )
    victim: Annotated[str | Any, BuiltIn("last", "fewest-computed")] = knob(
        default="last",
        help="Which running request to preempt when KV blocks run out: last (in the order of service), "
        "fewest-computed (cheapest to recompute), or the dotted name of a VictimPolicy class.",
    )
    prefix_retention: Annotated[str | Any, BuiltIn("lru", "lfu", "priority")] = knob(
        default="lru",
        help="Which cached block to evict first: lru (least recently used), lfu (least frequently used), "
        "priority (of the least important request), or the dotted name of a RetentionPolicy class.",
    )
    long_prefill_token_threshold: NonNegativeInt = knob(
        default=0,
        unit="tokens",
        help="Maximum number of prompt tokens of one request per step, so that long prompts do not block "
        "others. 0: no limit.",
    )
    max_num_queued_reqs: PositiveInt = knob(
        default=4096,
        unit="requests",
        help="Maximum number of waiting requests; further ones are refused with a hint when to retry.",
    )
    max_num_queued_tokens: PositiveInt = knob(
        default=4_194_304,
        unit="tokens",
        help="Maximum number of prompt tokens over all waiting requests.",
    )
    watermark: Annotated[float, Ge(0), Lt(1)] = knob(
        default=0.01,
        unit="fraction",
        help="Fraction of the KV blocks kept free when a request is admitted, to avoid frequent preemption.",
    )
    reserve_full_prompt: bool = knob(
        default=True,
        help="Admit a request only if its whole prompt fits in the free KV blocks, not just its first chunk.",
    )
    request_timeout: NonNegativeFloat = knob(
        default=0.0,
        unit="seconds",
        help="Time from arrival after which a request times out, unless the request sets its own. "
        "0: no timeout.",
    )
    queue_timeout: NonNegativeFloat = knob(
        default=0.0,
        unit="seconds",
        help="Maximum time that a request waits before it first runs, unless the request sets its own. "
        "0: no limit.",
    )
    overlap_steps: bool = knob(
        default=False,
        help="Schedule the next step while the current one runs. Worthwhile if the model runs on its own "
        "device.",
    )
    kv_load_failure: Literal["recompute", "fail"] = knob(
        default="recompute",
        help="What to do with a request whose KV could not be loaded from a connector: recompute the KV, or "
        "fail the request.",
    )
    kv_transfer_timeout: Annotated[float, Ge(0.001)] = knob(
        default=30.0,
        unit="seconds",
        help="How long KV blocks are held for a transfer without progress; a heartbeat renews the hold.",
    )
    use_cache_eviction: bool = knob(
        default=False,
        help="Evict the KV blocks of a sequence that attention uses least, so that none keeps much more than "
        "max_cache_size tokens after its prompt. Changes the output; see docs/cache-eviction.md.",
    )
    cache_eviction_config: CacheEvictionConfig = knob(
        default_factory=CacheEvictionConfig, help="Which blocks are evicted, with use_cache_eviction."
    )
    use_sparse_attention: bool = knob(
        default=False,
        help="Let the tokens of long prompts leave out keys, so that prefill is faster. Changes the output; "
        "see docs/sparse-prefill.md.",
    )
    sparse_attention_config: SparseAttentionConfig = knob(
        default_factory=SparseAttentionConfig, help="Which keys are left out, with use_sparse_attention."
    )

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_unknown_names(SchedulerConfig, {name: value})
        object.__setattr__(self, name, value)

    def validate(self) -> Self:
        """Return self if every value is within its limits.

        Raises:
            ConfigError: names the first field that is not, its value and its limits.
        """
        check_limits(self)
        if self.use_cache_eviction:
            self.cache_eviction_config.refuse_block_size(self.block_size)
        if self.use_sparse_attention:
            self.sparse_attention_config.refuse_block_size(self.block_size)
        return self


@config
class SpeculationConfig:
    """Speculative decoding: drafts of the next tokens, several of which the model verifies at once.

    The output is unchanged. The more requests run, the fewer tokens are drafted for each, because a large
    batch gains nothing from more positions: see `draft_length`.
    """

    speculative_method: Literal["none", "ngram", "draft-model"] = knob(
        default="none",
        help="Where drafts come from: none, ngram (earlier occurrences of the last tokens), or draft-model "
        "(a smaller model, see draft_model).",
    )
    num_speculative_tokens: PositiveInt = knob(
        default=4, unit="tokens", help="Maximum number of draft tokens per request and step."
    )
    max_num_draft_tokens: PositiveInt = knob(
        default=32,
        unit="tokens",
        help="Maximum number of draft tokens per step, shared evenly among the running requests.",
    )
    ngram_min: PositiveInt = knob(default=2, unit="tokens", help="Shortest n-gram to match.")
    ngram_max: PositiveInt = knob(default=4, unit="tokens", help="Longest n-gram to match.")
    draft_model: str = knob(
        default="",
        help="Model that drafts, given as for model; it must have the same vocabulary. Empty: none.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if self.ngram_max < self.ngram_min:
            raise ConfigError(
                f"SpeculationConfig.ngram_max is {self.ngram_max}; it must be at least ngram_min, "
                f"{self.ngram_min}"
            )
        if self.speculative_method == "draft-model" and not self.draft_model:
            raise ConfigError(
                "SpeculationConfig.draft_model is empty; speculative_method draft-model needs the name of one"
            )
        if self.draft_model and self.speculative_method != "draft-model":
            raise ConfigError(
                f"SpeculationConfig.draft_model is {self.draft_model!r}, but speculative_method is "
                f"{self.speculative_method!r}; set it to draft-model to use it"
            )

    def draft_length(self, num_running: int) -> int:
        """Return how many tokens to draft for each of `num_running` requests."""
        if self.speculative_method == "none":
            return 0
        return min(self.num_speculative_tokens, self.max_num_draft_tokens // max(1, num_running))

    def max_drafts(self, max_num_seqs: int) -> int:
        """Return the maximum number of draft tokens in a step of up to `max_num_seqs` requests."""
        if self.speculative_method == "none":
            return 0
        return min(self.num_speculative_tokens * max_num_seqs, self.max_num_draft_tokens)


@config
class EngineConfig:
    """One engine: its model, data types, memory and scheduler."""

    model: str = knob(
        default=BUILT_IN_MODEL,
        help="The model: the built-in 'mini', a local directory, a GGUF file, or a name on the Hugging Face "
        "hub.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = knob(
        default="auto", help="Data type of weights and activations. auto: as stored."
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "int8"] = knob(
        default="auto",
        help="Data type of the KV cache. auto: same as dtype; int8: with one scale per token and head, about "
        "half the size of bfloat16.",
    )
    quantization: Literal["none", "int8", "int4"] = knob(
        default="none",
        help="Quantize the weights while loading. int8: one scale per output channel, activations quantized "
        "per token; int4: one scale per group of inputs, activations not quantized. A checkpoint that is "
        "already quantized stays as it is.",
    )
    quantization_group_size: Literal[32, 64, 128] = knob(
        default=128,
        unit="weights",
        help="Number of weights that share a scale with int4. Smaller groups are more accurate and need more "
        "memory.",
    )
    weight_cache: str = knob(
        default="auto",
        help="Directory that caches weights in their in-memory layout, so that later starts do not quantize "
        "or unpack them again. auto: quire/weights in the user's cache directory, for quantized models of at "
        "least 10^9 parameters, where it pays off. Empty: no cache.",
    )
    weight_cache_size: NonNegativeFloat = knob(
        default=50.0,
        unit="GB",
        help="Maximum size of weight_cache in GB (10^9 bytes); the least recently used weights are removed "
        "first.",
    )
    max_model_len: NonNegativeInt = knob(
        default=0,
        unit="tokens",
        help="Maximum length of a sequence, prompt and output together. 0: the model's own.",
    )
    memory_fraction: Annotated[float, Gt(0), Lt(1)] = knob(
        default=0.5,
        unit="fraction",
        help="Fraction of the memory free after loading the weights that the KV cache may use, if its size "
        "is not given.",
    )
    num_threads: Annotated[int, Ge(0), Le(1024)] = knob(
        default=0,
        unit="threads",
        help="Number of CPU threads for the model, all ranks together. 0: one per physical core.",
    )
    tensor_parallel_size: Annotated[int, Ge(1), Le(64)] = knob(
        default=1,
        unit="ranks",
        help="Number of processes that compute the model together, each with its shard of the weights and of "
        "the KV cache. Must divide the number of query heads.",
    )
    tensor_parallel_timeout: Annotated[float, Ge(2.0)] = knob(
        default=60.0,
        unit="seconds",
        help="How long a rank may be silent, or keep others waiting within a step, before the engine ends "
        "with an error.",
    )
    kernels: Literal["auto", "native", "reference"] = knob(
        default="auto",
        help="Kernel implementation: native (C++ for this CPU), reference (plain torch, slow), or auto "
        "(native if installed).",
    )
    scheduler_cls: Annotated[str | Any, BuiltIn()] = knob(
        default="quire.scheduling.Scheduler",
        help="Dotted name of the SchedulerInterface class to use; in Python also the class itself.",
    )
    kv_tier: Literal["", "memory", "disk"] = knob(
        default="",
        help="Where the KV of prompts is kept besides the cache, to be loaded where that is faster than "
        "computing it: memory (host memory), or disk, where it outlives the engine. Empty: nowhere.",
    )
    kv_tier_path: str = knob(
        default="auto",
        help="Directory of the disk tier; several engines may share it. auto: quire/kv in the user's cache "
        "directory.",
    )
    kv_tier_size: Annotated[float, Gt(0)] = knob(
        default=4.0,
        unit="GB",
        help="Maximum size of the tier in GB (10^9 bytes), on disk for all models together; the least "
        "recently used blocks are removed first.",
    )
    kv_tier_min_uses: PositiveInt = knob(
        default=2,
        unit="requests",
        help="Number of requests that a prefix must occur in before the tier stores it. 1: each prompt is "
        "stored at once.",
    )
    kv_connector: Annotated[str, BuiltIn("")] = knob(
        default="",
        help="Dotted name of a KVConnector class, which finds, loads and stores KV elsewhere; in place of "
        "kv_tier. Empty: none.",
    )
    record_path: str = knob(
        default="",
        help="File to record the scheduler's work in, for `quire replay`; overwritten. Empty: no recording.",
    )
    kv_events_endpoint: str = knob(
        default="",
        help="ZeroMQ address at which to publish changes of the prefix cache, such as tcp://127.0.0.1:5557. "
        "Empty: not published.",
    )
    kv_events_replay_endpoint: str = knob(
        default="",
        help="ZeroMQ address from which subscribers can fetch KV events that they missed. Empty: none.",
    )
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = dataclasses.field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        if isinstance(self.scheduler_cls, type):  # a name can be sent to the engine process
            name = f"{self.scheduler_cls.__module__}.{self.scheduler_cls.__qualname__}"
            object.__setattr__(self, "scheduler_cls", name)
        check_limits(self)
        if self.kv_events_replay_endpoint and not self.kv_events_endpoint:
            raise ConfigError(
                f"EngineConfig.kv_events_replay_endpoint is {self.kv_events_replay_endpoint!r}, but nothing "
                "is published; set EngineConfig.kv_events_endpoint too"
            )
        if self.kv_tier and self.kv_connector:
            raise ConfigError(
                f"EngineConfig.kv_tier is {self.kv_tier!r} and kv_connector is {self.kv_connector!r}; an "
                "engine has one or the other: leave one of them empty"
            )
        if self.tensor_parallel_size > 1 and (self.kv_tier or self.kv_connector):
            name = "kv_tier" if self.kv_tier else "kv_connector"
            raise ConfigError(
                f"EngineConfig.tensor_parallel_size is {self.tensor_parallel_size} and {name} is "
                f"{getattr(self, name)!r}, which moves the KV of one process only; set one of them to its "
                "default"
            )
        object.__setattr__(self, "scheduler", dataclasses.replace(self.scheduler).validate())
        if self.scheduler.use_cache_eviction:
            self._refuse_beside_eviction()

    def _refuse_beside_eviction(self) -> None:
        """Raise `ConfigError` for what does not go together with evicting KV."""
        use, method = "SchedulerConfig.use_cache_eviction is on", self.speculation.speculative_method
        if method != "none":
            raise ConfigError(
                f"SpeculationConfig.speculative_method is {method!r}, but {use}: what is evicted after a "
                "draft cannot come back when the draft is rejected; turn one of them off"
            )
        for name in ("kv_connector", "kv_tier"):
            if where := getattr(self, name):
                raise ConfigError(
                    f"EngineConfig.{name} is {where!r}, but {use}: elsewhere a block is known by the tokens "
                    "before it, and after an eviction the blocks of a sequence hold others; turn one of them "
                    "off"
                )
        if self.tensor_parallel_size > 1:
            raise ConfigError(
                f"EngineConfig.tensor_parallel_size is {self.tensor_parallel_size}, but {use}: scores add up "
                "the heads of a layer, of which each rank has only a part; turn one of them off"
            )
        if self.kv_cache_dtype == "int8" and self.scheduler.cache_eviction_config.apply_rotation:
            raise ConfigError(
                "EngineConfig.kv_cache_dtype is 'int8', but CacheEvictionConfig.apply_rotation is on: each "
                "rotation would round the keys again; use another type, or turn the rotation off"
            )


@config
class ServerConfig:
    """The HTTP server."""

    host: str = knob(default="127.0.0.1", help="Address to listen on.")
    port: Annotated[int, Ge(0), Le(65535)] = knob(
        default=8000, help="TCP port to listen on. 0: any free port."
    )
    served_model_name: str = knob(
        default="", help="Name of the model in requests and responses. Empty: the model's own name."
    )
    api_key: str = knob(default="", help="Bearer token that clients must send. Empty: none.")
    max_body_bytes: PositiveInt = knob(
        default=4_194_304,
        unit="bytes",
        help="Maximum size of a request body; a larger one is refused with status 413.",
    )
    drain_timeout: NonNegativeFloat = knob(
        default=30.0,
        unit="seconds",
        help="Time that running requests have to finish after SIGTERM or Ctrl-C before they are aborted.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
