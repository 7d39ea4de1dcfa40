"""A hand-driven scheduler: the test says who runs how many tokens; this keeps slots, blocks and counts."""

import dataclasses

import numpy as np
import torch

from caches import cache_of
from quire.execution.device_step import DeviceStep
from quire.execution.model_runner import ModelRunner
from quire.kv.blocks.groups import NULL_BLOCK
from quire.sampling_params import SamplingParams
from quire.step import (
    NO_TOKEN,
    CachedRequestData,
    ChosenTokens,
    NewRequestData,
    ResumedRequestData,
    SchedulerOutput,
)

BLOCK_SIZE = 4
_NAN_BYTE = 0xFF  # of which any type of floats is not a number
MAX_NUM_SEQS = 8
MAX_MODEL_LEN = 128


@dataclasses.dataclass
class DrivenRequest:
    prompt: list[int]
    params: SamplingParams
    output: list[int] = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    prompt_logprobs: list = dataclasses.field(default_factory=list)
    slot: int | None = None
    tables: list[list[int]] = dataclasses.field(default_factory=lambda: [[]])  # of each group
    computed: int = 0
    started: bool = False
    error: str | None = None

    @property
    def blocks(self):
        """Those of the group that keeps all."""
        return self.tables[0]

    @property
    def num_known(self):
        return len(self.prompt) + len(self.output)

    @property
    def remaining(self):
        return self.num_known - self.computed


def int_array(values):
    return np.array(values, dtype=np.int32)


def padded(rows, width):
    """A matrix of ragged rows."""
    matrix = np.full((len(rows), width), NO_TOKEN, dtype=np.int32)
    for row, values in enumerate(rows):
        matrix[row, : len(values)] = values
    return matrix


def plan(
    slots=(),
    num_tokens=(),
    computed=(),
    ids=(),
    *,
    known=None,
    drafts=None,
    new=(),
    resumed=(),
    finished=(),
    preempted=(),
    blocks=(),
    forks=(),
    chosen=(),
    copies=(),
    num_drafts_wanted=0,
    metadata=None,
    num_groups=1,
):
    """A SchedulerOutput from plain lists.

    `blocks` holds (slot, index, block id of each group), `chosen` (slot, token), `copies` (from, to), each of
    which is a block id of each group. Without `known` the rows end with their last known token.
    """
    grown = int_array(blocks).reshape(-1, 2 + num_groups).T
    after = np.array(num_tokens, dtype=np.int32) + np.array(computed, dtype=np.int32)
    drafts = drafts or [[]] * len(slots)
    return SchedulerOutput(
        step=0,
        request_ids=list(ids),
        slots=int_array(slots),
        num_tokens=int_array(num_tokens),
        num_computed_tokens=int_array(computed),
        num_known_tokens=after if known is None else int_array(known),
        draft_token_ids=padded(drafts, max(map(len, drafts), default=0)),
        finished_req_ids=list(finished),
        preempted_req_ids=list(preempted),
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=CachedRequestData(grown[0], grown[1], grown[2:], list(resumed)),
        forks=list(forks),
        chosen_tokens=ChosenTokens(*int_array(chosen).reshape(-1, 2).T),
        block_copies=int_array(copies).reshape(-1, 2, num_groups),
        num_drafts_wanted=int_array([num_drafts_wanted] * len(slots)) if num_drafts_wanted else None,
        kv_connector_metadata=metadata,
    )


class StepDriver:
    """Drives a runner over caches, of groups with `windows`; slots and blocks are handed out in random order.

    Blocks that nobody holds are filled with NaN, so that reading one is seen. What has left a window is held
    by nobody.
    """

    def __init__(self, runner, *kv_caches, max_num_seqs, seed=0, windows=(0,)):
        self.runner = runner
        self.kv_cache = kv_caches[0]
        self.kv_caches = kv_caches
        self.windows = windows
        self.requests = {}
        self._rng = np.random.default_rng(seed)
        self._free_slots = list(range(max_num_seqs))
        firsts = [0 if window == 0 else NULL_BLOCK + 1 for window in windows]
        self.free = [
            list(range(first, cache.num_blocks)) for first, cache in zip(firsts, kv_caches, strict=True)
        ]
        self._finished, self._preempted = [], []
        with torch.inference_mode():
            for cache in kv_caches:
                cache.tensor.view(torch.uint8).fill_(_NAN_BYTE)

    @property
    def free_blocks(self):
        return self.free[0]

    def add(self, request_id, prompt, params):
        tables = [[] for _ in self.kv_caches]
        self.requests[request_id] = DrivenRequest(list(prompt), params, tables=tables)

    def _take(self, free):
        return free.pop(int(self._rng.integers(len(free))))

    def _give_back(self, group, blocks):
        blocks = [block for block in blocks if group == 0 or block != NULL_BLOCK]
        with torch.inference_mode():
            self.kv_caches[group].tensor.view(torch.uint8)[blocks] = _NAN_BYTE
        self.free[group] += blocks

    def _release(self, request):
        for group, blocks in enumerate(request.tables):
            self._give_back(group, blocks)
        self._free_slots.append(request.slot)
        request.slot, request.computed = None, 0
        request.tables = [[] for _ in self.kv_caches]

    def _leave_windows(self, request):
        for group, window in enumerate(self.windows):
            num_left = max(0, request.computed - window + 1) // BLOCK_SIZE if window else 0
            table = request.tables[group]
            self._give_back(group, table[:num_left])
            table[:num_left] = [NULL_BLOCK] * num_left

    def preempt(self, request_id):
        self._preempted.append(request_id)
        self._release(self.requests[request_id])

    def finish(self, request_id):
        self._finished.append(request_id)
        request = self.requests[request_id]
        if request.slot is not None:
            self._release(request)

    def step(self, num_tokens, *, drafts=None, num_drafts_wanted=0, grammar=None):
        """Run one step of {request id: tokens}; those that have no slot are started or resumed.

        `drafts` holds the drafts of some of them, which come on top of their tokens.
        """
        drafts = drafts or {}
        num_drafts = {request_id: len(drafts.get(request_id, ())) for request_id in num_tokens}
        total = {request_id: count + num_drafts[request_id] for request_id, count in num_tokens.items()}
        new, resumed, grown = [], [], []
        for request_id in num_tokens:
            self._leave_windows(self.requests[request_id])
        for request_id, count in total.items():
            self._place(request_id, count, new, resumed, grown)
        scheduled = [self.requests[request_id] for request_id in num_tokens]
        output = plan(
            [request.slot for request in scheduled],
            list(total.values()),
            [request.computed for request in scheduled],
            num_tokens,
            known=[request.num_known for request in scheduled],
            drafts=[drafts.get(request_id, []) for request_id in num_tokens],
            new=new,
            resumed=resumed,
            finished=self._finished,
            preempted=self._preempted,
            blocks=grown,
            num_drafts_wanted=num_drafts_wanted,
            num_groups=len(self.kv_caches),
        )
        self._finished, self._preempted = [], []
        result = self.runner.execute(output, lambda: grammar)
        if isinstance(result, DeviceStep):
            result = result.result()
        self._apply(num_tokens, num_drafts, result)
        return result

    def _place(self, request_id, count, new, resumed, grown):
        """Give a request the slot and blocks that it lacks, and say so in the lists of the plan."""
        request = self.requests[request_id]
        missing = max(0, -(-(request.computed + count) // BLOCK_SIZE) - len(request.blocks))
        first = len(request.blocks)
        fresh = [[self._take(free) for _ in range(missing)] for free in self.free]
        for table, blocks in zip(request.tables, fresh, strict=True):
            table.extend(blocks)
        if request.slot is not None:
            of_groups = zip(*fresh, strict=True)
            grown += [(request.slot, first + index, *blocks) for index, blocks in enumerate(of_groups)]
            return
        request.slot = self._take(self._free_slots)
        common = {
            "request_id": request_id,
            "slot": request.slot,
            "block_ids": int_array(request.tables),
            "num_computed_tokens": request.computed,
        }
        if request.started:
            num_reported = len(request.prompt_logprobs)
            resumed.append(
                ResumedRequestData(**common, num_tokens=request.num_known, num_prompt_logprobs=num_reported)
            )
            return
        request.started = True
        new.append(
            NewRequestData(
                **common,
                prompt_token_ids=int_array(request.prompt),
                output_token_ids=list(request.output),
                sampling_params=request.params,
                eos_token_ids=(2,),
            )
        )

    def _apply(self, num_tokens, num_drafts, result):
        assert result.request_ids == list(num_tokens)
        assert result.sampled_token_ids.shape == (len(num_tokens), 1 + max(num_drafts.values(), default=0))
        for (request_id, count), row in zip(num_tokens.items(), result.sampled_token_ids, strict=True):
            request = self.requests[request_id]
            catches_up = count == request.remaining
            request.error = result.errors.get(request_id)
            emitted = row[row != NO_TOKEN].tolist()
            logprobs = result.logprobs.get(request_id, [])
            if request.error is None:
                assert (row[len(emitted) :] == NO_TOKEN).all()
                assert catches_up <= len(emitted) <= catches_up + num_drafts[request_id]
                wants_logprobs = request.params.logprobs is not None
                assert len(logprobs) == (len(emitted) if wants_logprobs else 0)
            else:
                assert not emitted
            request.computed += count + max(0, len(emitted) - 1)
            request.output += emitted
            request.logprobs += logprobs
            request.prompt_logprobs += result.prompt_logprobs.get(request_id, [])

    def run(self, num_output, *, chunk=1_000, budget=1_000, on_step=None, draft=None):
        """Run all requests to `num_output` tokens: in order, at most `chunk` each and `budget` together.

        `draft(request_id, request)` returns the drafts of a request that samples in the next step.
        """
        number = 0
        while live := {i: r for i, r in self.requests.items() if len(r.output) < num_output}:
            left, num_tokens, drafts, free_slots = budget, {}, {}, len(self._free_slots)
            for request_id, request in live.items():
                count = min(request.remaining, chunk, left)
                needs_slot = request.slot is None
                if count and free_slots >= needs_slot:
                    num_tokens[request_id] = count
                    left -= count
                    free_slots -= needs_slot
                    if draft is not None and count == request.remaining:
                        drafts[request_id] = draft(request_id, request)
            self.step(num_tokens, drafts=drafts)
            for request_id, request in live.items():
                if len(request.output) >= num_output:
                    self.finish(request_id)
            number += 1
            if on_step:
                on_step(number)


def model_cache(model, num_blocks=200):
    config = model.config
    return cache_of(config, num_blocks, BLOCK_SIZE, model.dtype)


def make_driver(model, *, num_blocks=200, seed=0, max_num_seqs=MAX_NUM_SEQS, **parts):
    """A driver of a new runner; `parts` are its proposer and connector."""
    kv_cache = model_cache(model, num_blocks)
    runner = ModelRunner(
        model,
        [kv_cache],
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        **parts,
    )
    return StepDriver(runner, kv_cache, max_num_seqs=max_num_seqs, seed=seed)


def add_all(driver, prompts, params):
    for index, prompt in enumerate(prompts):
        driver.add(f"r{index}", prompt, params)


def outputs(driver):
    return [request.output for request in driver.requests.values()]


def preempt_now_and_then(driver):
    """An `on_step` that preempts the newest or the oldest running request every few steps, eight times."""

    def on_step(number):
        running = [i for i, r in driver.requests.items() if r.slot is not None]
        if number % 4 == 0 and number <= 32 and running:
            driver.preempt(running[-1 if number % 8 else 0])

    return on_step
