"""Drafts only as long as they are likely to pay."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np
import torch
from typing_extensions import override

from quire.execution.proposer import Proposer, RowsToContinue
from quire.kernels.batch import AttentionBatch
from quire.step import NO_TOKEN, IntArray

_FIRST_ACCEPTANCE = 0.5
_OWN_MEMORY, _SHARED_MEMORY = 0.9, 0.98  # what an estimate of acceptance keeps of itself for each draft
_HIGHEST_ACCEPTANCE = 0.98  # that is believed, so that many accepted drafts are soon forgotten
_MARGIN = 1.1  # by which a draft's worth must exceed its cost, because both are estimates
_PROBE_SHARE = 0.01  # of the time, for drafts that are not expected to pay
_MOST_IDLE_STEPS = (
    8  # in a row, so that the cost of rows is measured in the others, unless waiting costs more
)


class AdaptiveProposer(Proposer):
    """Has another proposer propose, for each request as many tokens as are likely to pay.

    A draft that is accepted saves its request a step; verifying one takes the time of a row, which `RowCost`
    measures. If drafts of a request are accepted with probability p, its k-th is with p^k, and is proposed
    while that is above its cost. Where not even the first pays, one draft is tried now and then, so rarely
    that it costs 1 % of the time, to see whether the text has begun to repeat itself. A new request starts
    with the acceptance that others have had.

    Where steps overlap, drafts cost something else: all requests wait until the tokens that they follow are
    known, also those that get none. So they are made only if all of them together save more than that; else
    they are tried as rarely as drafts that are not expected to pay, and steps overlap meanwhile.

    Its own time counts, too, where a step takes a millisecond, so it works on numbers and not on arrays, and
    is idle while no draft is due.

    Args:
        proposer: makes the drafts; is not asked for rows that are to have none.
        max_num_seqs: number of slots.
        overlaps: whether a step that no drafts follow is in flight while the next one is begun.
        clock: tells seconds.
    """

    def __init__(
        self,
        proposer: Proposer,
        max_num_seqs: int,
        *,
        overlaps: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.follows_tokens = proposer.follows_tokens
        self._proposer = proposer
        self._clock = clock
        self._wait = WaitShare() if overlaps else None
        self._asked_at = 0.0  # 0: not after the last step
        self._step_seconds = 0.0
        self._cost = RowCost()
        self._step_began = 0.0
        self._num_step_rows = 0
        self._is_alone = True  # the step: its duration is its own
        self._num_idle_steps = 0
        self._shared = Acceptance(_FIRST_ACCEPTANCE, _SHARED_MEMORY)
        self._by_slot = [DraftedRequest(_FIRST_ACCEPTANCE, 0) for _ in range(max_num_seqs)]

    @override
    def open(self, slot: int, num_tokens: int, scope: tuple[str, str]) -> None:
        self._by_slot[slot] = DraftedRequest(self._shared.estimate, num_tokens)
        self._proposer.open(slot, num_tokens, scope)

    @override
    def finish(self, slot: int, output: IntArray) -> None:
        self._proposer.finish(slot, output)

    @override
    def copy_blocks(self, copies: IntArray) -> None:
        self._proposer.copy_blocks(copies)

    @override
    def begin_step(self, num_tokens: int, *, is_alone: bool) -> None:
        self._proposer.begin_step(num_tokens, is_alone=is_alone)
        self._num_step_rows, self._is_alone = num_tokens, is_alone
        self._step_began = self._clock()
        if self._wait is not None and self._asked_at and is_alone:
            self._wait.note(self._step_began - self._asked_at, self._step_seconds)
        self._asked_at = 0.0

    @override
    def follow(self, token_ids: torch.Tensor, batch: AttentionBatch, *, is_recorded: bool) -> None:
        self._proposer.follow(token_ids, batch, is_recorded=is_recorded)

    @override
    def propose(self, rows: RowsToContinue, num_drafts: int) -> IntArray | None:
        self._asked_at = self._clock()
        step_seconds = self._step_seconds = self._asked_at - self._step_began
        requests = [self._by_slot[slot] for slot in rows.slots.tolist()]
        num_tokens = rows.num_tokens.tolist()
        has_prompt = self._num_step_rows != len(requests) + sum(request.num_drafts for request in requests)
        if self._is_alone and not has_prompt:
            self._cost.note(self._num_step_rows, step_seconds)
        follows_drafts = False
        for request, known in zip(requests, num_tokens, strict=True):
            if request.num_drafts:
                follows_drafts = True
                self._shared.note(*request.outcome(known))
        cost = self._cost.of_draft(len(requests))
        lengths = [
            min(request.num_wanted(known, cost), most)
            for request, known, most in zip(requests, num_tokens, rows.max_drafts.tolist(), strict=True)
        ]
        chosen = [row for row, length in enumerate(lengths) if length]
        if not chosen or (follows_drafts and not self._pays(requests, lengths, cost)):
            until_trial = (
                request.steps_until_trial(known, cost)
                for request, known in zip(requests, num_tokens, strict=True)
            )
            of_wait = 0 if self._wait is None else self._wait.steps_until_trial
            self._num_idle_steps = max(min(until_trial, default=0), of_wait)
            return None
        self._num_idle_steps = 0
        proposed = self._proposer.propose(_selected(rows, chosen, lengths), num_drafts)
        if proposed is None:
            return None
        for row, count in zip(chosen, (proposed != NO_TOKEN).sum(axis=1).tolist(), strict=True):
            requests[row].drafted(count, num_tokens[row])
        drafts = np.full((len(requests), num_drafts), NO_TOKEN, dtype=np.int32)
        drafts[chosen] = proposed
        return drafts

    @override
    def num_idle_steps(self) -> int:
        return self._num_idle_steps

    def _pays(self, requests: list[DraftedRequest], lengths: list[int], cost: float) -> bool:
        """Return whether drafts of these lengths save more than it costs all requests to wait for them."""
        if self._wait is None:
            return True
        saved = sum(
            request.tokens_saved(length, cost) for request, length in zip(requests, lengths, strict=True)
        )
        return saved > _MARGIN * len(requests) * self._wait.share


class Acceptance:
    """How often drafts are accepted, as a moving average over drafts."""

    __slots__ = ("_memory", "estimate")

    def __init__(self, estimate: float, memory: float) -> None:
        self.estimate = estimate
        self._memory = memory

    def note(self, num_accepted: int, is_rejected: bool) -> None:
        """Take that so many drafts were accepted, and whether the one behind them was rejected."""
        self.estimate = 1 - (1 - self.estimate) * self._memory**num_accepted
        if is_rejected:
            self.estimate *= self._memory


class DraftedRequest:
    """What is known of one request's drafts.

    Args:
        acceptance: to begin with.
        num_tokens: known tokens, prompt and output.
    """

    __slots__ = ("_acceptance", "_num_tokens", "num_drafts")

    def __init__(self, acceptance: float, num_tokens: int) -> None:
        self._acceptance = Acceptance(acceptance, _OWN_MEMORY)
        self._num_tokens = num_tokens  # when the newest drafts were made
        self.num_drafts = 0  # made after the step before

    def drafted(self, num_drafts: int, num_tokens: int) -> None:
        """Take that drafts were made behind `num_tokens`."""
        self.num_drafts, self._num_tokens = num_drafts, num_tokens

    def outcome(self, num_tokens: int) -> tuple[int, bool]:
        """Return how many of the drafts were accepted, and whether the next was rejected."""
        num_accepted = max(0, min(num_tokens - self._num_tokens - 1, self.num_drafts))
        is_rejected = num_accepted < self.num_drafts
        self._acceptance.note(num_accepted, is_rejected)
        self.num_drafts = 0
        return num_accepted, is_rejected

    def num_wanted(self, num_tokens: int, cost: float) -> int:
        """Return how many drafts are likely to pay; `cost` is that of one, see `RowCost.of_draft`."""
        threshold = min(_MARGIN * cost, 1.0)
        acceptance = min(self._acceptance.estimate, _HIGHEST_ACCEPTANCE)
        if acceptance > threshold:
            return int(math.log(threshold) / math.log(acceptance))
        return int(num_tokens - self._num_tokens >= cost / _PROBE_SHARE)

    def tokens_saved(self, num_drafts: int, cost: float) -> float:
        """Return how many tokens so many drafts are expected to save, less what they cost; 0 of a trial."""
        acceptance = min(self._acceptance.estimate, _HIGHEST_ACCEPTANCE)
        if acceptance <= _MARGIN * cost:
            return 0.0
        return acceptance * (1 - acceptance**num_drafts) / (1 - acceptance) - num_drafts * cost

    def steps_until_trial(self, num_tokens: int, cost: float) -> int:
        """Return the number of next steps after which no draft will be tried, if none pays; at most 8."""
        due = self._num_tokens + cost / _PROBE_SHARE
        return min(max(math.ceil(due - num_tokens) - 1, 0), _MOST_IDLE_STEPS)


class WaitShare:
    """What waiting for a step's tokens takes before the next step begins, as a share of the step."""

    _MEMORY = 0.9

    def __init__(self) -> None:
        self._num_waits = 0
        self.share = 0.0

    def note(self, seconds: float, step_seconds: float) -> None:
        """Take how long one wait was; it is longer than the step only where there was nothing to do."""
        self._num_waits += 1
        share = min(seconds / step_seconds, 1.0) if step_seconds > 0.0 else 1.0
        self.share += max(1 - self._MEMORY, 1 / self._num_waits) * (share - self.share)

    @property
    def steps_until_trial(self) -> int:
        """Steps that overlap between two trials, each of which waits twice: for drafts, and for their end."""
        return math.ceil(2 * self.share / _PROBE_SHARE)


class RowCost:
    """What a row more costs in a step: the slope of a line through the durations of recent steps.

    While their numbers of rows hardly differ, a row is assumed to take 0.3 times its share of the step.
    """

    _MEMORY = 0.98  # what the averages keep of themselves at each step
    _ASSUMED_COST = 0.3
    _ASSUMED_WEIGHT = 0.005  # rows²; the assumption counts as much as steps of this variance
    _LEAST, _MOST = 0.05, 0.99

    def __init__(self) -> None:
        self._num_steps = 0
        self._rows = self._seconds = self._variance = self._covariance = 0.0

    def note(self, num_rows: int, seconds: float) -> None:
        """Take the duration of a step."""
        self._num_steps += 1
        if self._num_steps == 1:
            self._rows, self._seconds = num_rows, seconds
            return
        seconds = min(seconds, 2 * self._expected(num_rows))  # something else took the rest
        share = max(1 - self._MEMORY, 1 / self._num_steps)
        rows, excess = num_rows - self._rows, seconds - self._seconds
        self._rows += share * rows
        self._seconds += share * excess
        self._variance = (1 - share) * (self._variance + share * rows * rows)
        self._covariance = (1 - share) * (self._covariance + share * rows * excess)

    def of_draft(self, num_requests: int) -> float:
        """Return the time that a draft takes, as a share of the time that one of the requests' tokens takes.

        With a draft more, all requests wait for its row, and only one of them may gain a token.
        """
        if not self._num_steps:
            return self._ASSUMED_COST
        cost = self._slope() * num_requests / self._expected(num_requests)
        return min(max(cost, self._LEAST), self._MOST)

    def _slope(self) -> float:
        """Return the seconds that a row more takes."""
        assumed = self._ASSUMED_COST * self._seconds / self._rows
        covariance = self._covariance + self._ASSUMED_WEIGHT * assumed
        return covariance / (self._variance + self._ASSUMED_WEIGHT)

    def _expected(self, num_rows: int) -> float:
        """Return the seconds that a step is expected to take."""
        return max(self._seconds + self._slope() * (num_rows - self._rows), self._seconds / 10)


def _selected(rows: RowsToContinue, chosen: list[int], lengths: list[int]) -> RowsToContinue:
    """Return the chosen ones of `rows`, with at most so many drafts for each."""
    return dataclasses.replace(
        rows,
        slots=rows.slots[chosen],
        num_tokens=rows.num_tokens[chosen],
        max_drafts=np.array([lengths[row] for row in chosen], dtype=np.int64),
    )
