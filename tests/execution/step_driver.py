"""A hand-driven scheduler: the test says who runs how many tokens; this keeps slots, blocks and counts."""

import dataclasses

import numpy as np
import torch

from quire.request import SamplingParams
from quire.step import (
    NO_TOKEN,
    CachedRequestData,
    NewRequestData,
    ResumedRequestData,
    SchedulerOutput,
)

BLOCK_SIZE = 4


@dataclasses.dataclass
class DrivenRequest:
    prompt: list[int]
    params: SamplingParams
    output: list[int] = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    prompt_logprobs: list = dataclasses.field(default_factory=list)
    slot: int | None = None
    blocks: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    started: bool = False
    error: str | None = None

    @property
    def remaining(self):
        return len(self.prompt) + len(self.output) - self.computed


def plan(
    slots=(), num_tokens=(), computed=(), ids=(), *, new=(), resumed=(), finished=(), preempted=(), blocks=()
):
    """A SchedulerOutput from plain lists; `blocks` holds (slot, index, block id)."""
    columns = np.array(blocks, dtype=np.int32).reshape(-1, 3).T
    return SchedulerOutput(
        step=0,
        request_ids=list(ids),
        slots=np.array(slots, dtype=np.int32),
        num_tokens=np.array(num_tokens, dtype=np.int32),
        num_computed_tokens=np.array(computed, dtype=np.int32),
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=CachedRequestData(*columns, list(resumed)),
        finished_req_ids=list(finished),
        preempted_req_ids=list(preempted),
    )


class StepDriver:
    """Drives a runner over `num_blocks` blocks; slots and blocks are handed out in random order.

    Blocks that nobody holds are filled with NaN, so that reading one is seen.
    """

    def __init__(self, runner, kv_cache, *, max_num_seqs, seed=0):
        self.runner = runner
        self.kv_cache = kv_cache
        self.requests = {}
        self._rng = np.random.default_rng(seed)
        self._free_slots = list(range(max_num_seqs))
        self._free_blocks = list(range(kv_cache.num_blocks))
        self._finished, self._preempted = [], []
        with torch.inference_mode():
            kv_cache.tensor.fill_(float("nan"))

    def add(self, request_id, prompt, params):
        self.requests[request_id] = DrivenRequest(list(prompt), params)

    def _take(self, free):
        return free.pop(int(self._rng.integers(len(free))))

    def _release(self, request):
        with torch.inference_mode():
            self.kv_cache.tensor[request.blocks] = float("nan")
        self._free_slots.append(request.slot)
        self._free_blocks += request.blocks
        request.slot, request.blocks, request.computed = None, [], 0

    def preempt(self, request_id):
        self._preempted.append(request_id)
        self._release(self.requests[request_id])

    def finish(self, request_id):
        self._finished.append(request_id)
        request = self.requests[request_id]
        if request.slot is not None:
            self._release(request)

    def step(self, num_tokens):
        """Run one step of {request id: tokens}; those that have no slot are started or resumed."""
        new, resumed, grown = [], [], []
        for request_id, count in num_tokens.items():
            request = self.requests[request_id]
            missing = -(-(request.computed + count) // BLOCK_SIZE) - len(request.blocks)
            fresh = [self._take(self._free_blocks) for _ in range(missing)]
            if request.slot is not None:
                first = len(request.blocks)
                grown += [(request.slot, first + index, block) for index, block in enumerate(fresh)]
                request.blocks += fresh
                continue
            request.slot, request.blocks = self._take(self._free_slots), fresh
            common = {
                "request_id": request_id,
                "slot": request.slot,
                "block_ids": np.array(fresh, dtype=np.int32),
                "num_computed_tokens": 0,
            }
            if request.started:
                num_known = len(request.prompt) + len(request.output)
                resumed.append(ResumedRequestData(**common, num_tokens=num_known))
            else:
                request.started = True
                new.append(
                    NewRequestData(
                        **common,
                        prompt_token_ids=request.prompt,
                        sampling_params=request.params,
                        eos_token_ids=(2,),
                    )
                )
        scheduled = [self.requests[request_id] for request_id in num_tokens]
        output = plan(
            [request.slot for request in scheduled],
            list(num_tokens.values()),
            [request.computed for request in scheduled],
            num_tokens,
            new=new,
            resumed=resumed,
            finished=self._finished,
            preempted=self._preempted,
            blocks=grown,
        )
        self._finished, self._preempted = [], []
        result = self.runner.execute(output)
        self._apply(num_tokens, result)
        return result

    def _apply(self, num_tokens, result):
        assert result.request_ids == list(num_tokens)
        assert result.sampled_token_ids.shape == (len(num_tokens), 1)
        for (request_id, count), token in zip(
            num_tokens.items(), result.sampled_token_ids[:, 0], strict=True
        ):
            request = self.requests[request_id]
            catches_up = count == request.remaining
            request.computed += count
            request.error = result.errors.get(request_id)
            if request.error is None:
                assert (token != NO_TOKEN) == catches_up
                request.output += [int(token)] if catches_up else []
            request.logprobs += result.logprobs.get(request_id, [])
            request.prompt_logprobs += result.prompt_logprobs.get(request_id, [])

    def run(self, num_output, *, chunk=1_000, budget=1_000, on_step=None):
        """Run all requests to `num_output` tokens: in order, at most `chunk` each and `budget` together."""
        number = 0
        while live := {i: r for i, r in self.requests.items() if len(r.output) < num_output}:
            left, num_tokens, free_slots = budget, {}, len(self._free_slots)
            for request_id, request in live.items():
                count = min(request.remaining, chunk, left)
                needs_slot = request.slot is None
                if count and free_slots >= needs_slot:
                    num_tokens[request_id] = count
                    left -= count
                    free_slots -= needs_slot
            self.step(num_tokens)
            for request_id, request in live.items():
                if len(request.output) == num_output:
                    self.finish(request_id)
            number += 1
            if on_step:
                on_step(number)
