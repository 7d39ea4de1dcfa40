"""One engine."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen

from quire.config.chat_template import ChatTemplateConfig
from quire.config.fields import check_limits, config, knob
from quire.config.kv import KVEventsConfig, KVTierConfig, KVTransferConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.speculation import SpeculationConfig
from quire.config.supervision import SupervisionConfig
from quire.errors import ConfigError
from quire.limits import BuiltIn, NonNegativeFloat, NonNegativeInt

BUILT_IN_MODEL = "mini"
BUILT_IN_MODELS = (BUILT_IN_MODEL, "mini-embed")

EngineRole = Literal["both", "prefill", "decode"]


@config
class EngineConfig:
    """One engine: its model, data types, memory and scheduler.

    Raises:
        ConfigError: there is no field of that name, a value is outside its limits, or values contradict each
            other.
    """

    model: str = knob(
        default=BUILT_IN_MODEL,
        help="The model: the built-in 'mini' or 'mini-embed', a local directory, a GGUF file, or a name on "
        "the Hugging Face hub.",
    )
    revision: str = knob(
        default="",
        help="Branch, tag or commit of a model on the Hugging Face hub. Empty: its main branch.",
    )
    tokenizer: str = knob(
        default="",
        help="Where the tokenizer and its chat template come from: a directory, a GGUF file, or a name on "
        "the Hugging Face hub. Empty: the model.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = knob(
        default="auto", help="Data type of weights and activations. auto: as stored."
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "int8", "int4", "fp8"] = knob(
        default="auto",
        help="Data type of the KV cache. auto: same as dtype; int8: with one scale per token and head, about "
        "half the size of bfloat16; int4 (only on a CPU, experimental): rotated first, a quarter, and less "
        "accurate; fp8 (only on a GPU): float8_e4m3fn without scales, half the size, less "
        "accurate than int8, and cheaper to write and to read.",
    )
    quantization: Literal["none", "int8", "int4", "fp8"] = knob(
        default="none",
        help="Quantize the weights while loading. int8: one scale per output channel, activations quantized "
        "per token; int4: one scale per group of inputs, activations as int4_activations says; fp8 (only on "
        "a GPU): one scale per output channel, activations quantized per token. A checkpoint that is already "
        "quantized stays as it is, but one in fp8 only on a GPU.",
    )
    quantization_group_size: Literal[32, 64, 128] = knob(
        default=128,
        unit="weights",
        help="Number of weights that share a scale with int4. Smaller groups are more accurate and need more "
        "memory.",
    )
    int4_activations: Literal["int8", "bfloat16"] = knob(
        default="int8",
        help="How activations are multiplied with int4 weights, and with stored ones of 8 bits in groups. "
        "int8: quantized per token, as with int8 weights, which is several times as fast; bfloat16: not "
        "quantized, which is slightly more accurate.",
    )
    weight_cache: str = knob(
        default="auto",
        help="Directory that caches weights in their in-memory layout, so that later starts do not quantize "
        "or unpack them again. auto: quire/weights in the user's cache directory, for models of at least "
        "10^9 parameters whose weights are quantized or take long to unpack. Empty: no cache.",
    )
    weight_cache_size: NonNegativeFloat = knob(
        default=50.0,
        unit="GB",
        help="Maximum size of weight_cache in GB (10^9 bytes); the least recently used weights are removed "
        "first.",
    )
    classifier_from_token: Annotated[tuple[str, ...], MaxLen(2)] = knob(
        default=(),
        unit="tokens",
        help="Make a reranker of a model that generates: a text's score is the logit of this token as the "
        "next one; of two, such as 'no' and 'yes' for Qwen3-Reranker, the second's less the first's. Empty: "
        "as the model's files say.",
    )
    prompt_name: str = knob(
        default="",
        help="Name of the prompt that comes before each text which becomes an embedding or a score, such as "
        "query: one of those in the model's config_sentence_transformers.json. Empty: its "
        "default_prompt_name.",
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
        "is not given. On a GPU, hbm_utilization takes its place.",
    )
    hbm_utilization: Annotated[float, Gt(0), Lt(1)] = knob(
        default=0.9,
        unit="fraction",
        help="Fraction of a GPU's free memory that weights, activations and the KV cache may take together, "
        "if the size of the cache is not given.",
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
        "the KV cache. Must divide the number of query heads, and that of heads of recurrent layers. On "
        "GPUs, each needs one of its own.",
    )
    tensor_parallel_timeout: Annotated[float, Ge(2.0)] = knob(
        default=60.0,
        unit="seconds",
        help="How long a rank may be silent, or keep others waiting within a step, before the engine ends "
        "with an error.",
    )
    device: Literal["auto", "cpu", "cuda"] = knob(
        default="auto",
        help="Device that runs the model and holds weights and KV: cpu, cuda (an NVIDIA GPU), or auto "
        "(cuda if torch sees a GPU and Triton is installed).",
    )
    kernels: Literal["auto", "native", "triton", "reference"] = knob(
        default="auto",
        help="Kernel implementation: native (C++ for this CPU), triton (for GPUs; on a CPU only in Triton's "
        "interpreter, which is very slow), reference (plain torch, slow), or auto (triton on a GPU, else "
        "native if installed).",
    )
    cuda_graphs: bool = knob(
        default=True,
        help="On a GPU, capture decode steps, and prefill steps too small to hide the host's launch time, "
        "as CUDA graphs and replay them. Each size of step is captured when it comes up for the second "
        "time.",
    )
    scheduler_cls: Annotated[str | Any, BuiltIn()] = knob(
        default="quire.scheduling.Scheduler",
        help="Dotted name of the SchedulerInterface class to use; in Python also the class itself.",
    )
    kv_connector: Annotated[str, BuiltIn("")] = knob(
        default="",
        help="Dotted name of a KVConnector class, which finds, loads and stores KV elsewhere; in place of "
        "kv_tier. Empty: none.",
    )
    role: EngineRole = knob(
        default="both",
        help="Part of the engine where prompts and answers are computed by different ones, behind `quire "
        "route`. prefill: computes prompts and lends their KV; decode: reads it from the engine that has it; "
        "both: does everything itself.",
    )
    record_path: str = knob(
        default="",
        help="File to record the scheduler's work in, for `quire replay`; overwritten. Empty: no recording.",
    )
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = dataclasses.field(default_factory=SpeculationConfig)
    supervision: SupervisionConfig = dataclasses.field(default_factory=SupervisionConfig)
    chat_templating: ChatTemplateConfig = dataclasses.field(default_factory=ChatTemplateConfig)
    kv_tiering: KVTierConfig = dataclasses.field(default_factory=KVTierConfig)
    kv_transfer: KVTransferConfig = dataclasses.field(default_factory=KVTransferConfig)
    kv_events: KVEventsConfig = dataclasses.field(default_factory=KVEventsConfig)

    def __post_init__(self) -> None:
        if isinstance(self.scheduler_cls, type):  # a name can be sent to the engine process
            name = f"{self.scheduler_cls.__module__}.{self.scheduler_cls.__qualname__}"
            object.__setattr__(self, "scheduler_cls", name)
        check_limits(self)
        self._refuse_beside_connector()
        object.__setattr__(self, "scheduler", self.scheduler.copied().validate())
        if self.scheduler.use_cache_eviction:
            self._refuse_beside_eviction()

    @property
    def moves_kv_by(self) -> dict[str, str | int]:
        """The fields that ask for a KV connector, each of another kind, with their values."""
        fields: dict[str, str | int] = {
            "KVTierConfig.kv_tier": self.kv_tiering.kv_tier,
            "EngineConfig.kv_connector": self.kv_connector,
        }
        return {name: value for name, value in fields.items() if value} | self._shares_kv_by()

    @property
    def shares_kv(self) -> bool:
        """Whether this engine reads the KV of others, or lets them read its own."""
        return bool(self._shares_kv_by())

    def _shares_kv_by(self) -> dict[str, str | int]:
        """Return the first field that asks for KV to be shared with other engines, with its value."""
        if self.role != "both":
            return {"EngineConfig.role": self.role}
        if self.kv_transfer.kv_peers:
            return {"KVTransferConfig.kv_peers": self.kv_transfer.kv_peers}
        if self.kv_transfer.kv_transfer_port:
            return {"KVTransferConfig.kv_transfer_port": self.kv_transfer.kv_transfer_port}
        return {}

    def _refuse_beside_connector(self) -> None:
        """Raise `ConfigError` for what does not go together with a KV connector."""
        given = [f"{name} is {value!r}" for name, value in self.moves_kv_by.items()]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)}; an engine moves KV in one way only: leave the others at their "
                "default"
            )
        if given and self.tensor_parallel_size > 1 and not self.shares_kv:
            raise ConfigError(
                f"EngineConfig.tensor_parallel_size is {self.tensor_parallel_size} and {given[0]}, which "
                "moves the KV of one process only; set one of them to its default"
            )

    def _refuse_beside_eviction(self) -> None:
        """Raise `ConfigError` for what does not go together with evicting KV."""
        use, method = "SchedulerConfig.use_cache_eviction is on", self.speculation.speculative_method
        if method != "none":
            raise ConfigError(
                f"SpeculationConfig.speculative_method is {method!r}, but {use}: blocks evicted after a "
                "draft cannot be restored when the draft is rejected; turn one of them off"
            )
        for name, value in self.moves_kv_by.items():
            raise ConfigError(
                f"{name} is {value!r}, but {use}: other stores identify a block "
                "by its prefix, and eviction changes the tokens that a sequence's blocks hold; turn one "
                "of them off"
            )
        if self.tensor_parallel_size > 1:
            raise ConfigError(
                f"EngineConfig.tensor_parallel_size is {self.tensor_parallel_size}, but {use}: scores sum "
                "over all heads of a layer, and each rank has only some of them; turn one of them off"
            )
        is_narrow = self.kv_cache_dtype in ("int8", "int4", "fp8")
        if is_narrow and self.scheduler.cache_eviction_config.apply_rotation:
            raise ConfigError(
                f"EngineConfig.kv_cache_dtype is {self.kv_cache_dtype!r}, but "
                "CacheEvictionConfig.apply_rotation is on: each rotation would round the keys again; use "
                "another type, or turn the rotation off"
            )
