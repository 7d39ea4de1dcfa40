"""Every knob of Quire: a field with its default, unit and meaning.

Command-line flags and documentation are generated from these fields (see `quire.cli.options`), so a knob
that is not here does not exist. An unknown name is an error that names the nearest known one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar, dataclass_transform

from quire.errors import ConfigError, nearest_name

T = TypeVar("T")

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_CACHE_DTYPES = (*DTYPES, "int8")
QUANTIZATIONS = ("none", "int8", "int4")
GROUP_SIZES = (32, 64, 128)
KERNEL_SETS = ("auto", "native", "reference")
SPECULATIVE_METHODS = ("none", "ngram", "draft-model")
BUILT_IN_MODEL = "mini"
MAX_PORT = 65535
MAX_THREADS = 1024


def knob(*, default: Any, help: str) -> Any:
    """Declare a field with its meaning; the text becomes the command-line help and the documentation."""
    return dataclasses.field(default=default, metadata={"help": help})


def refuse_unknown_names(cls: type, names: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if `names` holds a key that is not a field of the dataclass `cls`."""
    known = [field.name for field in dataclasses.fields(cls)]
    for name in names:
        if name not in known:
            raise ConfigError(f"{cls.__name__} has no field {name!r}; {nearest_name(name, known)}")


def _with_checked_names(cls: type[T]) -> type[T]:
    generated_init: Callable[..., None] = cls.__init__

    @functools.wraps(generated_init)
    def checked_init(self: Any, /, **values: Any) -> None:
        refuse_unknown_names(cls, values)
        generated_init(self, **values)

    cls.__init__ = checked_init  # type: ignore[assignment]
    return cls


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, knob))
def config(cls: type[T]) -> type[T]:
    """Make a class a frozen, keyword-only, slotted dataclass that refuses unknown names helpfully."""
    return _with_checked_names(dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls))


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field, knob))
def settable_config(cls: type[T]) -> type[T]:
    """Like `config`, but its fields may be set after construction (OpenVINO GenAI's way)."""
    return _with_checked_names(dataclasses.dataclass(kw_only=True, slots=True)(cls))


_TYPES: dict[Any, tuple[str, tuple[type, ...]]] = {  # by annotation, which is text in this module
    "str": ("text", (str,)),
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("True or False", (bool,)),
}


def _require_types(owner: Any) -> None:
    """Raise `ConfigError` for the first plain field of `owner` whose value is not of the field's type."""
    for field in dataclasses.fields(owner):
        words, types = _TYPES.get(field.type, ("", (object,)))
        value = getattr(owner, field.name)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ConfigError(f"{type(owner).__name__}.{field.name} is {value!r}; it must be {words}")


def require_at_least(owner: object, minimum: float, *names: str) -> None:
    """Raise `ConfigError` for the first of `names` whose value on `owner` is below `minimum`."""
    for name in names:
        value = getattr(owner, name)
        if not value >= minimum:  # also refuses NaN
            raise ConfigError(f"{type(owner).__name__}.{name} is {value}; it must be at least {minimum}")
        if value == math.inf:
            raise ConfigError(f"{type(owner).__name__}.{name} is {value}; it must be finite")


def require_one_of(owner: object, name: str, choices: tuple[str, ...]) -> None:
    """Raise `ConfigError` if the field `name` of `owner` is not one of `choices`."""
    value = getattr(owner, name)
    if value not in choices:
        raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}; {nearest_name(str(value), choices)}")


POLICIES: dict[str, tuple[str, ...]] = {  # by field; the classes are in quire.scheduling and quire.kv
    "policy": ("fcfs", "priority", "fair", "longest-prefix"),
    "admission": ("reserve", "past-future"),
    "victim": ("last", "fewest-computed"),
    "prefix_retention": ("lru", "lfu", "priority"),
}


@settable_config
class SchedulerConfig:
    """Who runs in a step, and how much KV cache there is.

    Fields may be set as attributes after a no-argument construction, as in OpenVINO GenAI, or given as
    keyword arguments. The engine validates and copies the configuration when it is built; later changes
    to the original have no effect.
    """

    max_num_batched_tokens: int = knob(
        default=512, help="Most tokens computed in one step, over all sequences."
    )
    max_num_seqs: int = knob(default=256, help="Most sequences that run in one step.")
    block_size: int = knob(default=16, help="Tokens per KV block.")
    num_kv_blocks: int = knob(
        default=0, help="KV blocks in the cache; wins over cache_size. 0: derive from cache_size."
    )
    cache_size: float = knob(
        default=0.0,
        help="KV cache size in GB (10^9 bytes). 0, with num_kv_blocks 0: sized from the free memory.",
    )
    enable_prefix_caching: bool = knob(
        default=True, help="Keep computed blocks for later requests with the same prefix."
    )
    dynamic_split_fuse: bool = knob(
        default=True,
        help="Split prompts over steps and mix them with decoding. Off: a step computes either whole prompts "
        "or next tokens, and a prompt that does not fit into one step is refused.",
    )
    policy: str | Any = knob(
        default="fcfs",
        help="Order of service: fcfs, priority (lower value first, ties by arrival), fair (share among "
        "tenants), longest-prefix (most cached prompt first), or the dotted name of a QueueOrder.",
    )
    priority_ageing: float = knob(
        default=60.0,
        help="Seconds of waiting that make up for one level of priority, so that nobody waits for ever. "
        "0: never.",
    )
    admission: str | Any = knob(
        default="reserve",
        help="When a request may start: reserve (its prompt fits, see reserve_full_prompt and watermark), "
        "past-future (the predicted peak of all running requests fits), or the dotted name of an "
        "AdmissionPolicy.",
    )
    victim: str | Any = knob(
        default="last",
        help="Whom to preempt: last (in the order of service), fewest-computed (cheapest to compute again), "
        "or the dotted name of a VictimPolicy.",
    )
    prefix_retention: str | Any = knob(
        default="lru",
        help="Which cached block is rewritten first: lru (least recently used), lfu (least often found), "
        "priority (of the least important request), or the dotted name of a RetentionPolicy.",
    )
    long_prefill_token_threshold: int = knob(
        default=0,
        help="Most prompt tokens of one request in one step, so that long prompts share. 0: no such limit.",
    )
    max_num_queued_reqs: int = knob(
        default=4096, help="Most requests that wait; more are refused with a retry hint."
    )
    max_num_queued_tokens: int = knob(
        default=4_194_304, help="Most prompt tokens that wait, over all waiting requests."
    )
    watermark: float = knob(
        default=0.01,
        help="Share of the KV blocks kept free when a new request is admitted, against preemption storms.",
    )
    reserve_full_prompt: bool = knob(
        default=True,
        help="Admit a request only if its whole prompt fits in the free KV blocks, not just its first chunk.",
    )
    request_timeout: float = knob(
        default=0.0,
        help="Seconds from arrival after which a request ends with an error, unless it says otherwise. "
        "0: none.",
    )
    queue_timeout: float = knob(
        default=0.0,
        help="Seconds that a request may wait before it first runs, unless it says otherwise. 0: no limit.",
    )
    overlap_steps: bool = knob(
        default=False,
        help="Plan the next step while one runs. Pays where the model runs on a device of its own.",
    )
    kv_load_failure: str = knob(
        default="recompute",
        help="What a failed load of KV from elsewhere means for its request: recompute, or fail.",
    )
    kv_transfer_timeout: float = knob(
        default=30.0,
        help="Seconds that KV blocks are held for a transfer without news of it; a heartbeat renews them.",
    )

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_unknown_names(SchedulerConfig, {name: value})
        object.__setattr__(self, name, value)

    def validate(self) -> Self:
        """Return self if every value is usable.

        Raises:
            ConfigError: names the first field that is not, its value and its limit.
        """
        _require_types(self)
        require_at_least(self, 1, "max_num_batched_tokens", "max_num_seqs", "block_size")
        require_at_least(self, 1, "max_num_queued_reqs", "max_num_queued_tokens")
        require_at_least(self, 0, "num_kv_blocks", "cache_size", "long_prefill_token_threshold", "watermark")
        require_at_least(self, 0, "priority_ageing", "request_timeout", "queue_timeout")
        require_at_least(self, 0.001, "kv_transfer_timeout")
        require_one_of(self, "kv_load_failure", ("recompute", "fail"))
        for name, choices in POLICIES.items():
            choice = getattr(self, name)
            if isinstance(choice, str) and "." not in choice:
                require_one_of(self, name, choices)
        if self.watermark >= 1:
            raise ConfigError(f"SchedulerConfig.watermark is {self.watermark}; it must be below 1")
        return self


@config
class SpeculationConfig:
    """Drafts: guesses of the next tokens that the model verifies several at a time. No token changes by it.

    The more requests run, the shorter are the drafts of each, because a step that is wide already gains
    nothing from more places to compute: see `draft_length`.
    """

    speculative_method: str = knob(
        default="none",
        help="Where drafts come from: none, ngram (earlier occurrences of a request's last tokens), or "
        "draft-model (a smaller model, see draft_model).",
    )
    num_speculative_tokens: int = knob(default=4, help="Most drafts of one request in one step.")
    max_num_draft_tokens: int = knob(
        default=32, help="Most drafts of all requests in one step; shared evenly among the running ones."
    )
    ngram_min: int = knob(default=2, help="Fewest last tokens that must occur earlier for ngram to draft.")
    ngram_max: int = knob(default=4, help="Most last tokens that ngram looks for.")
    draft_model: str = knob(
        default="", help="The model that drafts, named as model is; it must have the same vocabulary."
    )

    def __post_init__(self) -> None:
        _require_types(self)
        require_one_of(self, "speculative_method", SPECULATIVE_METHODS)
        require_at_least(self, 1, "num_speculative_tokens", "max_num_draft_tokens", "ngram_min")
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
        """Return the most drafts that a step of up to `max_num_seqs` requests has."""
        if self.speculative_method == "none":
            return 0
        return min(self.num_speculative_tokens * max_num_seqs, self.max_num_draft_tokens)


@config
class EngineConfig:
    """One engine: the model, its numbers, and its scheduler."""

    model: str = knob(
        default=BUILT_IN_MODEL,
        help="The model: the built-in 'mini', a local directory, a GGUF file, or a name on the Hugging Face "
        "hub.",
    )
    dtype: str = knob(
        default="auto",
        help="Type of weights and activations: auto (as stored), bfloat16, float16 or float32.",
    )
    kv_cache_dtype: str = knob(
        default="auto",
        help="Type of the KV cache: auto (as dtype), bfloat16, float16, float32, or int8 (with a scale for "
        "each head of a token; about half the size of bfloat16).",
    )
    quantization: str = knob(
        default="none",
        help="Weights in fewer bits, made while loading: int8 (a scale for each output; activations are "
        "quantized too, a scale for each token), int4 (a scale for each group of inputs; activations are "
        "not), or none. A checkpoint that is quantized already stays as it is.",
    )
    quantization_group_size: int = knob(
        default=128,
        help="Inputs that share a scale in int4: 32, 64 or 128. Smaller is more exact and larger.",
    )
    weight_cache: str = knob(
        default="auto",
        help="Directory that keeps weights as they are in memory, so that a later start does not quantize or "
        "unpack them again. auto: quire/weights in the user's cache directory, for quantized models of at "
        "least 10^9 parameters, where it pays. Empty: none.",
    )
    weight_cache_size: float = knob(
        default=50.0,
        help="Most GB (10^9 bytes) in weight_cache; what was not used for longest is removed first.",
    )
    max_model_len: int = knob(
        default=0,
        help="Longest sequence, prompt and output together, in tokens. 0: what the model was made for.",
    )
    memory_fraction: float = knob(
        default=0.5,
        help="Share of the memory free after loading the weights that the KV cache may take by itself.",
    )
    num_threads: int = knob(
        default=0, help="CPU threads for the model's arithmetic. 0: one for each physical core."
    )
    kernels: str = knob(
        default="auto",
        help="What computes: native (C++ for this CPU), reference (plain torch, slow), or auto (native if "
        "Quire was installed with it).",
    )
    scheduler_cls: str | Any = knob(
        default="quire.scheduling.Scheduler",
        help="The SchedulerInterface class to use, by its dotted name; in Python also the class itself.",
    )
    kv_connector: str = knob(
        default="",
        help="Where KV is kept besides the cache: memory (prompts' KV in host memory, for when the cache has "
        "dropped it), or the dotted name of a KVConnector. Empty: nowhere.",
    )
    record_path: str = knob(
        default="",
        help="File to record the scheduler's work in, for `quire replay`; overwritten. Empty: none.",
    )
    kv_events_endpoint: str = knob(
        default="",
        help="ZeroMQ address at which to publish what the prefix cache holds, as tcp://127.0.0.1:5557. "
        "Empty: none.",
    )
    kv_events_replay_endpoint: str = knob(
        default="",
        help="ZeroMQ address that gives subscribers the KV events they have missed. Empty: none.",
    )
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = dataclasses.field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        if isinstance(self.scheduler_cls, type):  # a name can be sent to the engine process
            name = f"{self.scheduler_cls.__module__}.{self.scheduler_cls.__qualname__}"
            object.__setattr__(self, "scheduler_cls", name)
        _require_types(self)
        require_one_of(self, "dtype", DTYPES)
        require_one_of(self, "kv_cache_dtype", KV_CACHE_DTYPES)
        require_one_of(self, "quantization", QUANTIZATIONS)
        require_one_of(self, "kernels", KERNEL_SETS)
        if self.quantization_group_size not in GROUP_SIZES:
            raise ConfigError(
                f"EngineConfig.quantization_group_size is {self.quantization_group_size}; it must be one of "
                f"{', '.join(map(str, GROUP_SIZES))}"
            )
        require_at_least(self, 0, "max_model_len", "num_threads", "weight_cache_size")
        if self.num_threads > MAX_THREADS:
            raise ConfigError(
                f"EngineConfig.num_threads is {self.num_threads}; it must be at most {MAX_THREADS}, and more "
                "than the machine has cores gain nothing: 0 takes one for each"
            )
        if not 0 < self.memory_fraction < 1:
            raise ConfigError(
                f"EngineConfig.memory_fraction is {self.memory_fraction}; it must be above 0 and below 1"
            )
        if not isinstance(self.scheduler, SchedulerConfig):
            raise ConfigError(
                f"EngineConfig.scheduler must be a SchedulerConfig, not {type(self.scheduler).__name__}"
            )
        if not isinstance(self.speculation, SpeculationConfig):
            raise ConfigError(
                f"EngineConfig.speculation must be a SpeculationConfig, not {type(self.speculation).__name__}"
            )
        if self.kv_events_replay_endpoint and not self.kv_events_endpoint:
            raise ConfigError(
                f"EngineConfig.kv_events_replay_endpoint is {self.kv_events_replay_endpoint!r}, but nothing "
                "is published; set EngineConfig.kv_events_endpoint too"
            )
        object.__setattr__(self, "scheduler", dataclasses.replace(self.scheduler).validate())


@config
class ServerConfig:
    """The HTTP front."""

    host: str = knob(default="127.0.0.1", help="Address to listen on.")
    port: int = knob(default=8000, help="TCP port to listen on. 0: any free one.")
    served_model_name: str = knob(
        default="", help="Name that clients use for the model. Empty: the model's own name."
    )
    api_key: str = knob(default="", help="Bearer token that clients must send. Empty: none.")
    max_body_bytes: int = knob(
        default=4_194_304, help="Largest request body in bytes; a larger one is answered 413."
    )
    drain_timeout: float = knob(
        default=30.0,
        help="Seconds that running requests get to finish after SIGTERM or Ctrl-C, before they are aborted.",
    )

    def __post_init__(self) -> None:
        _require_types(self)
        require_at_least(self, 0, "port", "drain_timeout")
        if self.port > MAX_PORT:
            raise ConfigError(f"ServerConfig.port is {self.port}; it must be at most {MAX_PORT}")
        require_at_least(self, 1, "max_body_bytes")
