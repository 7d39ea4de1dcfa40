"""Checks that a memory plan fits, with advice if it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.engine.memory.byte_sizes import GB, format_bytes
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.memory.plan import MemoryPlan


def check_fits(config: EngineConfig, plan: MemoryPlan) -> None:
    """Raise `ConfigError` if weights, a KV block or a sequence of the configured length do not fit."""
    knob = _size_knob(config)
    free = plan.available_bytes - plan.weight_bytes
    of_rank = "" if plan.num_ranks == 1 else f" for each of the {plan.num_ranks} ranks"
    if free < 0:
        raise ConfigError(
            f"the weights take {format_bytes(plan.weight_bytes)} as {plan.weight_type}, but only "
            f"{format_bytes(plan.available_bytes)} of memory is available{of_rank}; "
            "use a smaller model, a narrower EngineConfig.dtype, or EngineConfig.quantization"
        )
    if plan.states is not None and plan.state_bytes > free:
        raise ConfigError(
            f"the states of recurrent layers take {format_bytes(plan.state_bytes)}, "
            f"{format_bytes(plan.states.layout.bytes_per_state)} for each of the {plan.states.num_states}"
            f"{' and copies for drafts' if plan.states.draft_bytes else ''}, "
            f"but the weights leave {format_bytes(free)}; lower SchedulerConfig.max_num_seqs"
            f"{' or num_linear_attention_blocks' if config.scheduler.num_linear_attention_blocks else ''}"
        )
    free -= plan.state_bytes
    takers = "the weights" if plan.states is None else "weights and states"
    if plan.is_measured:
        takers = f"{takers} and activations"
        free = max(0, free - plan.activation_bytes - plan.staged_bytes)
    if plan.kv_bytes > free:
        raise ConfigError(
            f"{knob} asks for a KV cache of {format_bytes(plan.kv_bytes)}, but {takers} leave "
            f"{format_bytes(free)}{of_rank}; the largest that fits is "
            f"{plan.group_sizes.largest(free)} blocks ({free * plan.num_ranks / GB:.2f} GB)"
        )
    if not plan.num_blocks:
        raise ConfigError(
            f"no KV block of {format_bytes(plan.group_sizes.num_bytes(1))} fits: of "
            f"{format_bytes(plan.available_bytes)} available{of_rank}, weights take "
            f"{format_bytes(plan.weight_bytes)} and activations {format_bytes(plan.activation_bytes)}; "
            f"raise {knob}, or lower SchedulerConfig.max_num_batched_tokens or SchedulerConfig.max_num_seqs"
        )
    if plan.states is not None and not plan.states.num_checkpoints:
        for field, value in config.moves_kv_by.items():
            raise ConfigError(
                f"{field} is {value!r}, but no states of recurrent layers are kept that could be moved with "
                "the KV; turn SchedulerConfig.enable_prefix_caching and dynamic_split_fuse on, and make "
                "num_linear_attention_blocks larger than max_num_seqs, or leave it to the engine"
            )
    if config.max_model_len > plan.max_model_len:
        raise ConfigError(
            f"EngineConfig.max_model_len is {config.max_model_len}, but the KV cache holds no sequence of "
            f"more than {plan.max_model_len} tokens ({plan.num_blocks} blocks of {plan.block_size}); "
            f"lower it to that or raise {knob}"
        )


def cache_knob(config: EngineConfig, plan: MemoryPlan) -> str:
    """Return the field that keeps sequences shorter than the model's maximum; empty if the cache does not."""
    is_shortened = not config.max_model_len and plan.max_model_len < plan.model_max_len
    return _size_knob(config) if is_shortened else ""


def _size_knob(config: EngineConfig) -> str:
    """Return the name of the field that determined the size of the cache."""
    if config.scheduler.num_kv_blocks:
        return "SchedulerConfig.num_kv_blocks"
    if config.scheduler.cache_size:
        return "SchedulerConfig.cache_size"
    return "EngineConfig.hbm_utilization" if config.device == "cuda" else "EngineConfig.memory_fraction"
