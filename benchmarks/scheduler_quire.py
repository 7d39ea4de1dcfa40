"""Quire's side of the scheduler comparison: times its `Scheduler` and prints JSON.

    python benchmarks/scheduler_quire.py [--running 64 256 1024 4096] [--only decode churn]

`scheduler_workload.py` defines the measurements; `scheduler.py` runs both sides and compares them.
"""

from __future__ import annotations

import functools

import numpy as np
from scheduler_workload import (
    BLOCK_SIZE,
    BLOCKS_PER_REQUEST,
    MAX_MODEL_LEN,
    PROMPT_TOKENS,
    TOKEN_BUDGET,
    Shape,
    measure_and_print,
)

import quire
from quire.config import SchedulerConfig
from quire.engine.messages import StepOutputs, encode
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduling import EngineCoreOutputs, ModelRunnerOutput, Scheduler, SchedulerOutput
from quire.step import NO_TOKEN

TOKEN_ID = 7


@functools.cache
def sampling(max_tokens: int) -> SamplingParams:
    """Return the parameters of a request, as the front end would send them; created once for all."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=0)


class QuireContender:
    """See `Contender`."""

    def __init__(self, running: int, *, caching: bool = True, chunk: int = 0) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=TOKEN_BUDGET,
            max_num_seqs=running,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=caching,
            long_prefill_token_threshold=chunk,
        )
        self._scheduler = Scheduler(
            config.validate(), num_blocks=running * BLOCKS_PER_REQUEST, max_model_len=MAX_MODEL_LEN
        )

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """See `Contender.add`."""
        self._scheduler.add_request(Request(request_id, prompt, sampling(max_tokens)))

    def schedule(self) -> SchedulerOutput:
        """See `Contender.schedule`."""
        return self._scheduler.schedule()

    def compute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """See `Contender.compute`."""
        caught_up = plan.num_computed_tokens + plan.num_tokens >= PROMPT_TOKENS
        sampled = np.where(caught_up, TOKEN_ID, NO_TOKEN).astype(np.int32)
        return ModelRunnerOutput(plan.request_ids, sampled[:, None])

    def update(self, plan: SchedulerOutput, computed: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """See `Contender.update`."""
        return self._scheduler.update_from_output(plan, computed)

    def shape(self, plan: SchedulerOutput, outputs: dict[int, EngineCoreOutputs]) -> Shape:
        """See `Contender.shape`."""
        num_outputs = sum(len(client.outputs) for client in outputs.values())
        return Shape(len(plan.request_ids), len(plan.preempted_req_ids), num_outputs)

    def encode(self, outputs: dict[int, EngineCoreOutputs]) -> int:
        """See `Contender.encode`."""
        return sum(len(encode(StepOutputs(client.outputs))) for client in outputs.values())


if __name__ == "__main__":
    measure_and_print(__doc__, f"quire {quire.__version__}", QuireContender)
