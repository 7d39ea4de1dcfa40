"""Dummy steps before the first request: they compile kernels, and measure memory and time."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator

import numpy as np

from quire.execution.model_runner import ModelRunner
from quire.kernels.bounds import prompt_logit_rows
from quire.kv.blocks.groups import NULL_BLOCK
from quire.pooling_params import PoolingParams
from quire.sampling_params import MAX_LOGPROBS, SamplingParams
from quire.step import (
    NO_TOKEN,
    CachedRequestData,
    ChosenTokens,
    EvictionData,
    GrammarOutput,
    IntArray,
    NewRequestData,
    SchedulerOutput,
    StateCopies,
    StepInFlight,
)

MAX_ATTENDED_TOKENS = 1 << 21
"""Cached tokens that a step reads, so that the longest prompts take no longer than a second."""

MAX_SCORED_TOKENS = 256
"""Of steps that score keys: larger ones need no other kernels, and would count in what is measured."""

MAX_DECODES_BESIDE = 16
"""Rows beside a chunk, both so few that attention divides the keys of all of them."""

TIMES = 3
"""That a step is computed to be captured: what it reads is learnt, its kernels are loaded, it is captured."""

MIN_TIMED_TOKENS = 64
"""Of the smallest step that is timed; each further one has twice as many."""

SHARE_OF_HOST = 0.9
"""Of the time of a step that the host takes to ask for it, at least, if the device waits for the host."""

_PLAIN = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
_GREEDY = SamplingParams(temperature=0.0)  # drawing takes long from logits as alike as made-up ones are
_PROMPT_LOGPROBS = dataclasses.replace(_PLAIN, prompt_logprobs=1)
_ALL_THERE_IS = dataclasses.replace(
    _PLAIN,
    logprobs=MAX_LOGPROBS,
    logit_bias={0: 1.0},
    min_tokens=1,
    frequency_penalty=0.1,
)


@dataclasses.dataclass(slots=True, frozen=True)
class StepLimits:
    """How large a step may become."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # tokens of a request
    draft_length: int  # tokens, of each of `max_num_seqs` requests
    longest_draft: int = 0  # tokens, of a request while few run
    max_drafts: int = 0  # tokens, of all requests together
    is_causal: bool = True  # else prompts come whole


@dataclasses.dataclass(slots=True, frozen=True)
class _Row:
    """A request of one step."""

    num_computed: int
    num_tokens: int  # after these, without drafts


def profile_run(runner: ModelRunner, vocab_size: int, limits: StepLimits) -> int:
    """Compute one step of each kind that takes much memory, and wait for each.

    They are: all sizes that have kernels of their own; a prompt whose log-probabilities are reported; the
    most tokens, with a token sampled for the most requests in all ways that the device knows; chunks of
    prompts behind the longest context, one of them beside decodes; and decode steps of the most requests,
    some of which have the longest context, and of requests with drafts, captured if the runner captures any.
    Then the largest step with prompts that is worth a capture is captured.

    Args:
        runner: has no requests, and is of no use afterwards; its KV cache may be smaller than any request,
            and it needs no checkpoints of states.
        vocab_size: of the model.
        limits: of its steps.

    Returns:
        The maximum number of tokens of a step with chunks of prompts that is worth a capture
        (`ModelRunner.max_captured_tokens`): the host takes longer to launch it than the device to compute it.
        0 if the runner captures nothing.
    """
    for cache in runner.kv_caches:
        cache.tensor.zero_()
    if runner.states is not None:
        runner.states.states.zero_()
    steps = _DummySteps(runner, vocab_size)
    compile_only = runner.compile_only()
    if compile_only is not None:
        with compile_only:
            _compute_all(steps, limits, 1)
    _compute_all(steps, limits, TIMES)
    if not runner.captures:
        return 0
    most = _largest_launch_bound_step(steps, limits)
    runner.max_captured_tokens = most
    if most:
        steps.compute(_captured_chunk(most, limits), _PLAIN, times=TIMES)
    return most


def _compute_all(steps: _DummySteps, limits: StepLimits, times: int) -> None:
    """Compute all steps, each decode step `times` times."""
    longest, most = limits.max_model_len, limits.max_num_batched_tokens
    # Kernels differ by the power of two that a step's tokens, or those that sample, are rounded up to. The
    # steps with the most of them follow.
    for num_tokens in _powers_of_two_below(min(most, limits.max_num_seqs * longest)):
        rows = [_Row(0, min(longest, num_tokens - start)) for start in range(0, num_tokens, longest)]
        steps.compute(rows, _PLAIN, scores=num_tokens <= MAX_SCORED_TOKENS)
    for num_rows in _powers_of_two_below(min(most, limits.max_num_seqs)):
        steps.compute([_Row(0, 1)] * num_rows, _PLAIN)
    # As many positions as have logits at a time, and one more: a whole prompt would be reported for nothing.
    of_prompt = 1 + prompt_logit_rows(steps.vocab_size, limits.max_num_seqs)
    steps.compute([_Row(0, min(longest, most, of_prompt))], _PROMPT_LOGPROBS)
    num_drafts = min(limits.draft_length, longest - 1, most - 1)
    steps.compute(_most_tokens(limits, num_drafts), _ALL_THERE_IS, num_drafts=num_drafts)
    for rows in _chunks(limits):
        steps.compute(rows, _PLAIN)
    for rows in _decodes(limits) if limits.is_causal else ():
        steps.compute(rows, _PLAIN, times=times)
    longest_draft = min(limits.longest_draft, longest - 1, most - 1)
    if longest_draft:
        num_rows = min(limits.max_num_seqs, limits.max_drafts // longest_draft, most // (1 + longest_draft))
        steps.compute([_Row(0, 1)] * num_rows, _PLAIN, times=times, num_drafts=longest_draft)


def _largest_launch_bound_step(steps: _DummySteps, limits: StepLimits) -> int:
    """Return the tokens of the largest timed step that is launch-bound; 0: none is."""
    most, num_tokens = 0, MIN_TIMED_TOKENS
    while num_tokens <= limits.max_num_batched_tokens:
        rows = _rows_of(num_tokens, limits)
        if sum(row.num_tokens for row in rows) < num_tokens:
            break
        _, *timed = steps.compute(rows, _GREEDY, times=1 + TIMES)  # the first one loads its kernels
        if min(one.until_computed for one in timed) * SHARE_OF_HOST > min(one.until_asked for one in timed):
            break
        most = num_tokens
        num_tokens *= 2
    return most


def _rows_of(num_tokens: int, limits: StepLimits) -> list[_Row]:
    """Return rows of `num_tokens` tokens, of as many requests as possible short of a decode step."""
    num_rows = min(limits.max_num_seqs, num_tokens // 2)
    return _most_tokens(StepLimits(num_rows, num_tokens, limits.max_model_len, 0), num_drafts=0)


def _captured_chunk(num_tokens: int, limits: StepLimits) -> list[_Row]:
    """Return a chunk beside as many decodes as possible, `num_tokens` in all, after the longest contexts."""
    longest = limits.max_model_len
    num_decodes = min(limits.max_num_seqs, num_tokens // 2) - 1
    num_long = min(num_decodes, MAX_ATTENDED_TOKENS // longest)
    chunk = min(num_tokens - num_decodes, longest)
    decodes = [_Row(longest - 1, 1)] * num_long + [_Row(0, 1)] * (num_decodes - num_long)
    return [_Row(longest - chunk, chunk), *decodes]


def _powers_of_two_below(end: int) -> list[int]:
    return [1 << exponent for exponent in range((end - 1).bit_length())]


def _most_tokens(limits: StepLimits, num_drafts: int) -> list[_Row]:
    """Return rows of as many tokens and requests as a step can have, the first as long as possible.

    Each has `num_drafts` drafts after its tokens.
    """
    num_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens // (1 + num_drafts))
    left = limits.max_num_batched_tokens - num_rows * (1 + num_drafts)
    rows = []
    for _ in range(num_rows):
        more = min(left, limits.max_model_len - num_drafts - 1)
        left -= more
        rows.append(_Row(0, 1 + more))
    return rows


def _chunks(limits: StepLimits) -> Iterator[list[_Row]]:
    """Yield a chunk of a prompt behind the longest context; a smaller one; and one beside a few decodes.

    Where prompts come whole, they are as long as that.
    """
    longest, most = limits.max_model_len, limits.max_num_batched_tokens
    chunks = [max(1, min(longest, most // share)) for share in (4, 16)]
    few = max(0, min(MAX_DECODES_BESIDE, limits.max_num_seqs - 1, most - chunks[1]))
    decode = _Row(longest - 1, 1)
    for length, num_decodes in ((chunks[0], 0), (chunks[1], 0), (chunks[1], few)):
        rows = [_Row(longest - length, length)] + [decode] * num_decodes
        yield rows if limits.is_causal else [dataclasses.replace(row, num_computed=0) for row in rows]


def _decodes(limits: StepLimits) -> Iterator[list[_Row]]:
    """Yield rows of decode steps: one half after the other has the longest context, the most first.

    Attention keeps most partial results where just enough rows are long to have their keys divided.
    """
    num_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    num_long = max(1, min(num_rows, MAX_ATTENDED_TOKENS // limits.max_model_len))
    while num_long:
        long, short = _Row(limits.max_model_len - 1, 1), _Row(0, 1)
        yield [long] * num_long + [short] * (num_rows - num_long)
        num_long //= 2


@dataclasses.dataclass(slots=True, frozen=True)
class _Times:
    """Seconds from the beginning of a step."""

    until_asked: float  # the host has asked the device for all of it
    until_computed: float


class _DummySteps:
    """Runs dummy steps, each with new requests."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self._runner = runner
        self.vocab_size = vocab_size
        self._numbers = itertools.count()
        self._running: list[str] = []

    def compute(
        self,
        rows: list[_Row],
        params: SamplingParams,
        *,
        times: int = 1,
        num_drafts: int = 0,
        scores: bool = False,
    ) -> list[_Times]:
        """Compute a step in which every row samples, and wait for it.

        Args:
            rows: of requests whose prompts end there.
            params: of all; with every parameter set, a grammar that allows everything is added.
            times: how often the step is computed; each further time as if it had been lost.
            num_drafts: of each row; as many are proposed after it.
            scores: whether the keys of the cache are scored, if any are evicted.

        Returns:
            What each time took.
        """
        new = [self._request(slot, row, params, num_drafts) for slot, row in enumerate(rows)]
        request_ids = [request.request_id for request in new]
        known = _array([row.num_tokens for row in rows])
        num_tokens = known + num_drafts
        none, pairs = np.zeros_like(num_tokens), np.empty((0, 2), dtype=np.int32)
        num_groups = len(self._runner.kv_caches)
        output = SchedulerOutput(
            step=0,
            request_ids=request_ids,
            slots=_array(range(len(rows))),
            num_tokens=num_tokens,
            num_computed_tokens=_array([row.num_computed for row in rows]),
            num_known_tokens=_array([row.num_computed + row.num_tokens for row in rows]),
            draft_token_ids=np.zeros((len(rows), num_drafts), dtype=np.int32),
            finished_req_ids=self._running,
            preempted_req_ids=[],
            scheduled_new_reqs=new,
            forks=[],
            scheduled_cached_reqs=CachedRequestData(
                _array([]), _array([]), np.empty((num_groups, 0), dtype=np.int32), []
            ),
            chosen_tokens=ChosenTokens(_array([]), _array([])),
            block_copies=np.empty((0, 2, num_groups), dtype=np.int32),
            num_drafts_wanted=np.full(len(rows), num_drafts, dtype=np.int32) if num_drafts else None,
            evictions=EvictionData(none, none) if scores else None,
            state_copies=StateCopies(pairs, pairs, known.astype(np.int64)),
        )
        self._running = request_ids
        allowed = self._grammar(request_ids, 1 + num_drafts) if params is _ALL_THERE_IS else None
        taken = [self._computed(output, allowed)]
        again = dataclasses.replace(output, finished_req_ids=[], scheduled_new_reqs=[])
        return taken + [self._computed(again, allowed) for _ in range(1, times)]

    def _computed(self, output: SchedulerOutput, allowed: GrammarOutput | None) -> _Times:
        started = time.perf_counter()
        result = self._runner.execute(output, lambda: allowed)
        until_asked = time.perf_counter() - started
        if isinstance(result, StepInFlight):
            result.result()
            result.drafts()
        return _Times(until_asked, time.perf_counter() - started)

    def _request(self, slot: int, row: _Row, params: SamplingParams, num_drafts: int) -> NewRequestData:
        pooling = PoolingParams(pooling_type="last" if row.num_computed else "mean")
        length = row.num_computed + row.num_tokens
        caches = self._runner.kv_caches
        entries = np.arange(-(-(length + num_drafts) // caches[0].block_size))
        firsts = [0, *[NULL_BLOCK + 1] * (len(caches) - 1)]
        tables = [
            first + entries % (cache.num_blocks - first) for first, cache in zip(firsts, caches, strict=True)
        ]
        return NewRequestData(
            request_id=str(next(self._numbers)),
            slot=slot,
            prompt_token_ids=np.zeros(length, dtype=np.int32),
            output_token_ids=[],
            sampling_params=params,
            eos_token_ids=(0,),
            block_ids=_array(tables),
            num_computed_tokens=row.num_computed,
            pooling_params=pooling if self._runner.is_pooled else None,
        )

    def _grammar(self, request_ids: list[str], num_places: int) -> GrammarOutput:
        counts = np.full(len(request_ids), num_places, dtype=np.int32)
        words = -(-self.vocab_size // 32)
        bitmask = np.full((len(request_ids) * num_places, words), NO_TOKEN, dtype=np.int32)
        return GrammarOutput(request_ids, counts, bitmask)


def _array(values: object) -> IntArray:
    return np.array(values, dtype=np.int32)
