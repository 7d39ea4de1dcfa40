"""One engine: model, KV cache, runner and scheduler, advanced one step at a time."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quire.config import EngineConfig, SchedulerConfig
from quire.engine.memory_plan import plan_memory
from quire.engine.messages import EngineCoreRequest, EngineInfo
from quire.errors import ConfigError, InvalidRequestError
from quire.models.config import ModelConfig
from quire.request import FinishReason, Request, RequestStatus
from quire.scheduling.interface import SchedulerInterface
from quire.scheduling.outputs import EngineCoreOutput, SchedulerStats
from quire.step import NO_TOKEN, ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from quire.engine.memory_plan import MemoryPlan
    from quire.execution.model_runner import ModelRunner

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[int, int], None]
"""Called while weights load with (bytes done, bytes in all)."""


class EngineCore:
    """The step loop's body: plan, compute, apply.

    Args:
        config: of the engine.
        model_path: directory of the model that `config.model` names.
        on_progress: called while weights load.

    Raises:
        QuireError: the model cannot be read, or does not fit.
    """

    def __init__(
        self, config: EngineConfig, model_path: Path, *, on_progress: ProgressCallback | None = None
    ) -> None:
        started = time.monotonic()
        model_config = ModelConfig.from_directory(model_path)
        plan = plan_memory(config, model_config)
        # Some rotary embeddings depend on the longest sequence that will be served.
        model_config = dataclasses.replace(model_config, max_model_len=plan.max_model_len)
        self._scheduler_config = config.scheduler
        self.scheduler = _build_scheduler(config, plan)
        self.runner = _build_runner(config, model_path, model_config, plan, on_progress)
        self.info = EngineInfo(
            model=config.model,
            max_model_len=plan.max_model_len,
            vocab_size=model_config.vocab_size,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            kv_cache_bytes=plan.kv_bytes,
            dtype=plan.dtype,
            load_seconds=time.monotonic() - started,
        )

    def add(self, request: EngineCoreRequest) -> None:
        """Queue all sequences of `request`, or none.

        Raises:
            InvalidRequestError, DuplicateRequestError, QueueFullError: the scheduler refuses one of them.
        """
        _refuse_if_never_queued(request, self._scheduler_config)
        admitted: list[str] = []
        try:
            for index in range(len(request.sequences)):
                sequence = _sequence(request, index)
                self.scheduler.add_request(sequence)
                admitted.append(sequence.request_id)
        except Exception:
            self.scheduler.finish_requests(admitted, RequestStatus.FINISHED_ABORTED)
            raise

    def finish(
        self, sequence_ids: Sequence[str] | None, status: RequestStatus, error: str | None = None
    ) -> list[EngineCoreOutput]:
        """End sequences (None: all) and return the terminal output of each that was still alive."""
        reason = FinishReason.of(status)
        ended = self.scheduler.finish_requests(sequence_ids, status)
        return [
            EngineCoreOutput(request.request_id, [], finish_reason=reason, error=error) for request in ended
        ]

    def step(self) -> tuple[list[EngineCoreOutput], bool]:
        """Advance every scheduled request; return the outputs, and whether anything was done.

        A failure ends the requests of the step, or all of them if it happened before the step was planned;
        the engine goes on.
        """
        scheduled: SchedulerOutput | None = None
        try:
            scheduled = self.scheduler.schedule()
            outputs = self._compute(scheduled)
        except Exception as error:
            logger.exception("a step failed; its requests end with an error")
            victims = None if scheduled is None else scheduled.request_ids
            return self.finish(victims, RequestStatus.FINISHED_ERROR, _describe(error)), True
        return outputs, bool(outputs or scheduled.request_ids or scheduled.finished_req_ids)

    def has_requests(self) -> bool:
        """Whether a step has anything to do."""
        return self.scheduler.has_requests()

    def has_unfinished_requests(self) -> bool:
        """Whether any sequence waits or runs."""
        return self.scheduler.has_unfinished_requests()

    def stats(self) -> SchedulerStats:
        """Return the scheduler's state and counters."""
        return self.scheduler.make_stats()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False, and nothing happens, while any block is in use."""
        return self.scheduler.reset_prefix_cache()

    def shutdown(self) -> list[EngineCoreOutput]:
        """Abort what is left and let go of everything; return the terminal outputs."""
        outputs = self.finish(None, RequestStatus.FINISHED_ABORTED)
        self.scheduler.shutdown()
        return outputs

    def _compute(self, scheduled: SchedulerOutput) -> list[EngineCoreOutput]:
        try:
            computed = self.runner.execute(scheduled)
        except Exception as error:
            logger.exception("computing a step failed; its %d requests end", len(scheduled.request_ids))
            computed = _all_failed(scheduled, _describe(error))
        by_client = self.scheduler.update_from_output(scheduled, computed)
        return [output for outputs in by_client.values() for output in outputs.outputs]


def _refuse_if_never_queued(request: EngineCoreRequest, config: SchedulerConfig) -> None:
    """Raise `InvalidRequestError` if even an empty queue has no room for all sequences of `request`."""
    n, prompt_length = len(request.sequences), len(request.prompt_token_ids)
    if n > config.max_num_queued_reqs:
        raise InvalidRequestError(
            f"n is {n}, but at most max_num_queued_reqs {config.max_num_queued_reqs} sequences can wait; "
            "lower n to that, or raise max_num_queued_reqs",
            param="n",
        )
    if n > 1 and n * prompt_length > config.max_num_queued_tokens:  # one sequence always has room
        raise InvalidRequestError(
            f"n is {n} and the prompt has {prompt_length} tokens, together {n * prompt_length}, but at most "
            f"max_num_queued_tokens {config.max_num_queued_tokens} can wait; lower n to at most "
            f"{max(1, config.max_num_queued_tokens // prompt_length)}, or raise max_num_queued_tokens",
            param="n",
        )


def _sequence(request: EngineCoreRequest, index: int) -> Request:
    sequence_id, seed = request.sequences[index]
    params = request.sampling_params
    params = dataclasses.replace(
        params, n=1, seed=seed, prompt_logprobs=params.prompt_logprobs if index == 0 else None
    )
    return Request(
        sequence_id,
        request.prompt_token_ids,
        params,
        eos_token_ids=request.eos_token_ids,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def _describe(error: Exception) -> str:
    return f"the step that computed this request failed: {type(error).__name__}: {error}"


def _all_failed(scheduled: SchedulerOutput, error: str) -> ModelRunnerOutput:
    """Return the output of a step that computed nothing: every request of it is at fault."""
    request_ids = list(scheduled.request_ids)
    return ModelRunnerOutput(
        request_ids=request_ids,
        sampled_token_ids=np.full((len(request_ids), 1), NO_TOKEN, dtype=np.int32),
        errors=dict.fromkeys(request_ids, error),
    )


def _build_scheduler(config: EngineConfig, plan: MemoryPlan) -> SchedulerInterface:
    module_name, _, class_name = config.scheduler_cls.rpartition(".")
    try:
        scheduler_cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"EngineConfig.scheduler_cls is {config.scheduler_cls!r}, which cannot be imported: {error}"
        ) from error
    if not (isinstance(scheduler_cls, type) and issubclass(scheduler_cls, SchedulerInterface)):
        raise ConfigError(
            f"EngineConfig.scheduler_cls is {config.scheduler_cls!r}, which is not a subclass of "
            "quire.scheduling.SchedulerInterface"
        )
    return scheduler_cls(config.scheduler, num_blocks=plan.num_blocks, max_model_len=plan.max_model_len)


def _build_runner(
    config: EngineConfig,
    model_path: Path,
    model_config: ModelConfig,
    plan: MemoryPlan,
    on_progress: ProgressCallback | None,
) -> ModelRunner:
    """Load the weights and allocate the KV cache; everything that needs torch is imported here."""
    # Threads that spin long at the end of each parallel region take the cores from the front and from
    # neighbours; threads that sleep at once wake too late. libgomp reads this once, when torch loads it.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    import torch

    from quire.execution.model_runner import ModelRunner
    from quire.kv.tensors import KVCacheTensors
    from quire.models.loading import load_decoder

    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    model = load_decoder(model_path, model_config, plan.dtype, on_progress=on_progress)
    kv_cache = KVCacheTensors(
        num_blocks=plan.num_blocks,
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        block_size=plan.block_size,
        head_dim=model_config.head_dim,
        dtype=getattr(torch, plan.dtype),
    )
    return ModelRunner(
        model,
        kv_cache,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
    )
