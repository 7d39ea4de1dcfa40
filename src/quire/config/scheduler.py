"""Which requests run, and how large the KV cache is."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Le, Lt

from quire.config.cache_eviction import CacheEvictionConfig
from quire.config.fields import SettableConfig, check_limits, knob, settable_config
from quire.config.sparse_attention import SparseAttentionConfig
from quire.limits import BuiltIn, NonNegativeFloat, NonNegativeInt, PositiveInt

Share = Annotated[float, Ge(0), Le(1)]

_CPU_STEP_TOKENS, _GPU_STEP_TOKENS, _LARGE_GPU_STEP_TOKENS = 512, 2_048, 8_192
_LARGE_GPU_BYTES = 64 * 10**9


@settable_config()
class SchedulerConfig(SettableConfig):
    """Which requests run in a step, and how large the KV cache is.

    Fields can be set as attributes after construction without arguments, as in OpenVINO GenAI, or given as
    keyword arguments. The engine validates and copies the configuration when it is built; later changes to
    the original have no effect.

    Raises:
        ConfigError: there is no field of that name. Values outside their limits are refused by `validate` and
            by `EngineConfig`.
    """

    max_num_batched_tokens: NonNegativeInt = knob(
        default=0,
        unit="tokens",
        help="Maximum number of tokens computed per step, over all sequences. 0: 512 on a CPU, 8192 on a GPU "
        "with at least 64 GB of memory, 2048 on others; of a model that is not causal twice as many, or the "
        "longest prompt.",
    )
    max_num_seqs: PositiveInt = knob(
        default=256, unit="sequences", help="Maximum number of sequences per step."
    )
    block_size: PositiveInt = knob(default=16, unit="tokens", help="Number of tokens per KV block.")
    num_kv_blocks: NonNegativeInt = knob(
        default=0,
        unit="blocks",
        help="Number of KV blocks in the cache; overrides cache_size. 0: derived from cache_size. Layers "
        "with a sliding window have more blocks, of their own: see docs/cli.md.",
    )
    cache_size: NonNegativeFloat = knob(
        default=0.0,
        unit="GB",
        help="Size of the KV cache in GB (10^9 bytes). 0, with num_kv_blocks 0: sized from the free memory.",
    )
    num_linear_attention_blocks: NonNegativeInt = knob(
        default=0,
        unit="states",
        help="Number of states of recurrent layers (linear attention, state-space layers, short "
        "convolutions): one for each of max_num_seqs, the others are kept for the prefix cache. 0: four for "
        "each sequence are kept, if they fit into a quarter of the free memory.",
    )
    cache_interval_multiplier: PositiveInt | None = knob(
        default=None,
        unit="blocks",
        help="Number of KV blocks of a prompt after which the state of recurrent layers is kept for the "
        "prefix cache, beside the one at its end. None: the number of KV blocks whose size is that of a "
        "state, from 8 to 256.",
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
    max_pin_time: NonNegativeFloat = knob(
        default=3600.0,
        unit="seconds",
        help="Longest time for which a prompt's blocks are pinned; a longer pin_prefix counts as this. "
        "0: no pins.",
    )
    max_pinned_share: Share = knob(
        default=0.5,
        unit="fraction",
        help="Share of the KV blocks that pins may hold; a pin beyond that is not made.",
    )
    max_pinned_share_per_tenant: Share = knob(
        default=0.5,
        unit="fraction",
        help="Share of the KV blocks that the pins of one tenant may hold; a pin beyond that is not made.",
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
    max_grammar_cache_bytes: NonNegativeInt = knob(
        default=64 * 2**20,
        unit="bytes",
        help="Maximum size of the compiled grammars that are kept for later requests; the least recently "
        "used are removed first. The size of a grammar is the memory that compiling it adds. 0: no cache.",
    )
    max_grammar_time_per_token: NonNegativeFloat = knob(
        default=0.002,
        unit="seconds",
        help="Computing time that the grammar of a structured request may take on average for each mask and "
        "for each token that it follows; a request whose grammar takes more ends with an error. 0: no limit.",
    )
    closed_json_objects: bool = knob(
        default=True,
        help="Treat a missing additionalProperties in a JSON schema as false. Off: as true, as JSON "
        "Schema says.",
    )
    overlap_steps: bool = knob(
        default=False,
        help="Schedule the next step while the current one runs. Worthwhile if the model runs on its own "
        "device; always done on a GPU.",
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
        help="Evict the KV blocks with the least attention, so that a sequence keeps about max_cache_size "
        "tokens after its prompt. Changes the output; see docs/cache-eviction.md.",
    )
    cache_eviction_config: CacheEvictionConfig = knob(
        default_factory=CacheEvictionConfig, help="Which blocks are evicted, with use_cache_eviction."
    )
    use_sparse_attention: bool = knob(
        default=False,
        help="Use sparse attention for long prompts, so that prefill is faster. Changes the output; see "
        "docs/sparse-prefill.md.",
    )
    sparse_attention_config: SparseAttentionConfig = knob(
        default_factory=SparseAttentionConfig, help="Settings of use_sparse_attention."
    )

    def validate(self) -> Self:
        """Return self if every value is within its limits.

        Raises:
            ConfigError: names the first field that is not, its value and its limits.
        """
        check_limits(self)
        self.cache_eviction_config.validate()
        self.sparse_attention_config.validate()
        if self.use_cache_eviction:
            self.cache_eviction_config.refuse_block_size(self.block_size)
        if self.use_sparse_attention:
            self.sparse_attention_config.refuse_block_size(self.block_size)
        return self

    def with_step_tokens(self, gpu_bytes: int = 0) -> Self:
        """Return it with the tokens per step that 0 stands for on a GPU of so many bytes; 0: on a CPU."""
        by_default = _CPU_STEP_TOKENS
        if gpu_bytes:
            by_default = _GPU_STEP_TOKENS if gpu_bytes < _LARGE_GPU_BYTES else _LARGE_GPU_STEP_TOKENS
        return dataclasses.replace(self, max_num_batched_tokens=self.max_num_batched_tokens or by_default)
