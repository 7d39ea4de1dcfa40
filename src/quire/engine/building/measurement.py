"""Measures the memory and host time of steps on a GPU by running some."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from quire.engine.building.runner import build_runner
from quire.engine.memory.byte_sizes import format_bytes
from quire.engine.memory.eviction import eviction_bytes

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.building.runner import LoadedModels
    from quire.engine.memory.plan import MemoryPlan
    from quire.kernels.devices.device import CudaMemory

logger = logging.getLogger(__name__)

PROFILE_BLOCKS = 16
"""KV blocks of each cache group in the run that measures; all requests share them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """The results of measured steps."""

    plan: MemoryPlan
    max_captured_tokens: int  # of steps with chunks of prompts, see `profile_run`


def explaining_shortage(memory: CudaMemory | None) -> AbstractContextManager[None]:
    """Raise `ConfigError` if a GPU runs out of memory that was planned for.

    Args:
        memory: of the GPU; None: there is none.
    """
    if memory is None:
        return contextlib.nullcontext()
    from quire.kernels.devices.device import refusing_shortage

    return refusing_shortage(
        lambda error: (
            "the GPU ran out of memory while the model was loaded or its KV cache allocated; "
            f"{format_bytes(memory.num_available)} can be taken for both by now. End what else computes on "
            f"this GPU, or lower EngineConfig.hbm_utilization. {error}"
        )
    )


def measure(
    config: EngineConfig,
    plan: MemoryPlan,
    models: LoadedModels,
    memory: CudaMemory,
    plan_again: Callable[..., MemoryPlan],
) -> Measurement:
    """Plan by the memory that the largest steps take, and that is left after them.

    The steps are computed on a KV cache of a few blocks, and on states without checkpoints; nothing of
    that stays allocated but the models' own buffers.

    Args:
        config: of the engine.
        plan: by estimates.
        models: with their weights, no KV cache beside them.
        memory: watched since before they were loaded.
        plan_again: plans with other `available_bytes` and `measured_bytes`.

    Raises:
        ConfigError: the steps do not fit, or with them what `plan_again` says does not.
    """
    peak, max_captured_tokens = _profile_steps(config, plan, models, memory)
    gc.collect()
    # The largest of these steps do not score.
    of_eviction = eviction_bytes(config.scheduler, models.target.config, plan.max_model_len, on_gpu=True)
    measured_bytes = max(0, peak - plan.weight_bytes) + of_eviction
    measured = plan_again(available_bytes=memory.num_available, measured_bytes=measured_bytes)
    logger.info(
        "activations take %s, measured (%s computed); the KV cache gets %s (%d computed)",
        format_bytes(measured_bytes),
        format_bytes(plan.activation_bytes),
        measured.blocks_text,
        plan.num_blocks,
    )
    return Measurement(measured, max_captured_tokens)


def _profile_steps(
    config: EngineConfig, plan: MemoryPlan, models: LoadedModels, memory: CudaMemory
) -> tuple[int, int]:
    """Compute the largest steps.

    Returns:
        The bytes of weights and activations meanwhile, and what `profile_run` returns.
    """
    from quire.execution.profile_run import StepLimits, profile_run
    from quire.kernels.devices.device import refusing_shortage

    scheduler, speculation = config.scheduler, config.speculation
    limits = StepLimits(
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        plan.max_model_len,
        speculation.draft_length(scheduler.max_num_seqs),
        speculation.draft_length(1),
        speculation.max_drafts(scheduler.max_num_seqs),
        is_causal=models.target.config.is_causal,
    )
    small = plan.with_blocks([PROFILE_BLOCKS] * len(plan.kv_caches))
    if plan.states is not None:
        small = dataclasses.replace(small, states=dataclasses.replace(plan.states, num_checkpoints=0))
    memory.begin_peak()
    with refusing_shortage(
        lambda _: (
            f"a step of SchedulerConfig.max_num_batched_tokens {scheduler.max_num_batched_tokens} and "
            f"SchedulerConfig.max_num_seqs {scheduler.max_num_seqs} ran out of memory: of "
            f"{format_bytes(memory.num_available)} available, weights take "
            f"{format_bytes(plan.weight_bytes)}; lower either of the two, or use a smaller model, a narrower "
            "EngineConfig.dtype, or EngineConfig.quantization"
        )
    ):
        runner = build_runner(config, models, small, connector=None)
        max_captured_tokens = profile_run(runner, models.target.config.vocab_size, limits)
    if runner.captures:
        logger.info("capturing steps with prompts is worthwhile up to %d tokens", max_captured_tokens)
    return memory.peak - small.kv_bytes - small.state_bytes + runner.max_array_bytes, max_captured_tokens
