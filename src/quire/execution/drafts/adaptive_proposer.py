"""Drafts only as long as they are likely to pay."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np
import torch
from typing_extensions import override

from quire.execution.drafts.proposer import Proposer, RowsToContinue
from quire.kernels.attention.batch import AttentionBatch
from quire.step import NO_TOKEN, Int64Array, IntArray

_FIRST_ACCEPTANCE = 0.5
_OWN_MEMORY, _SHARED_MEMORY = 0.9, 0.98  # what an estimate of acceptance keeps of itself for each draft
_FOUND_MEMORY = 0.8  # what an estimate of how often drafts are found keeps of itself each time
_HIGHEST_ACCEPTANCE = 0.98  # that is believed, so that many accepted drafts are soon forgotten
_MARGIN = 1.1  # by which a draft's worth must exceed its cost, because both are estimates
_PROBE_SHARE = 0.01  # of the time, for drafts that are not expected to pay
_MAX_IDLE_STEPS = 8  # in a row, so that the cost of rows is measured in the others, unless waiting costs more


class AdaptiveProposer(Proposer):
    """Limits the drafts of another proposer to as many as are likely to pay, for each request.

    A draft that is accepted saves its request a step; verifying one takes the time of a row, which `RowCost`
    measures. If a request's drafts are accepted with probability p, the k-th draft is with p^k, and is
    proposed while that is above its cost. Where not even the first pays, one draft is tried now and then, so
    rarely that it costs 1 % of the time, to see whether the text has begun to repeat itself. A new request
    starts with the acceptance that others have had.

    Where steps overlap, requests with drafts also wait for their tokens: see `Waiting`.

    Its own time counts, too, where a step takes a millisecond, so it works on numbers and not on arrays, and
    is not asked for requests that no draft is due for.

    Args:
        proposer: makes the drafts; is not asked for rows that are to have none.
        max_num_seqs: number of slots.
        overlaps: whether a step that no drafts follow is in flight while the next one is begun.
        repeats: whether drafts that are accepted are computed again in the next step, see `StateCopies`.
        clock: tells seconds.
    """

    def __init__(
        self,
        proposer: Proposer,
        max_num_seqs: int,
        *,
        overlaps: bool = False,
        repeats: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.follows_tokens = proposer.follows_tokens
        self._proposer = proposer
        self._clock = clock
        self._repeats = repeats
        self._waiting = Waiting() if overlaps else None
        self._cost = RowCost()
        self._num_steps = 0
        self._step_began = 0.0
        self._num_step_rows = 0
        self._is_alone = True  # the step: its duration is its own
        self._shared = Acceptance(_FIRST_ACCEPTANCE, _SHARED_MEMORY)
        self._shared_found = 1.0
        self._by_slot = [DraftedRequest(_FIRST_ACCEPTANCE, 1.0, 0) for _ in range(max_num_seqs)]

    @override
    def open(self, slot: int, num_tokens: int, scope: tuple[str, str]) -> None:
        self._by_slot[slot] = DraftedRequest(self._shared.estimate, self._shared_found, num_tokens)
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
        self._num_steps += 1
        self._num_step_rows, self._is_alone = num_tokens, is_alone
        self._step_began = self._clock()
        if self._waiting is not None:
            self._waiting.begin_step(self._step_began, is_alone=is_alone)

    @override
    def follow(self, token_ids: torch.Tensor, batch: AttentionBatch, *, is_captured: bool) -> None:
        self._proposer.follow(token_ids, batch, is_captured=is_captured)

    @override
    def propose(self, rows: RowsToContinue, num_drafts: int) -> IntArray | None:
        step_ended = self._clock() - rows.seconds_known
        requests = self._requests(rows.slots)
        num_tokens = rows.num_tokens.tolist()
        if rows.is_newest:
            self._measure(requests, len(rows.other_slots), step_ended)
        for request, known in zip(requests, num_tokens, strict=True):
            if request.num_drafts:
                self._shared.note(*request.outcome(known))
        cost = self._cost.of_draft(len(requests) + len(rows.other_slots))
        if self._repeats:  # p^k (1 - cost) is to exceed the cost
            cost = min(cost / (1 - cost), 1.0)
        lengths = [
            request.choose_length(known, cost, most)
            for request, known, most in zip(requests, num_tokens, rows.max_drafts.tolist(), strict=True)
        ]
        if self._waiting is None:
            for request, known in zip(requests, num_tokens, strict=True):
                request.idle_until = self._num_steps + request.steps_until_trial(known, cost)
        else:
            others = self._requests(rows.other_slots)
            self._waiting.choose(requests, others, self._num_steps, step_ended)
        chosen = [row for row, length in enumerate(lengths) if length and not self._is_idle(requests[row])]
        if not chosen:
            return None
        proposed = self._proposer.propose(_selected_rows(rows, chosen, lengths), num_drafts)
        if proposed is None:
            proposed = np.full((len(chosen), num_drafts), NO_TOKEN, dtype=np.int32)
        for row, count in zip(chosen, (proposed != NO_TOKEN).sum(axis=1).tolist(), strict=True):
            requests[row].note_drafts(count, num_tokens[row])
            self._shared_found = _moving_average(self._shared_found, count > 0, _SHARED_MEMORY)
        if len(chosen) == len(requests):
            return proposed
        drafts = np.full((len(requests), num_drafts), NO_TOKEN, dtype=np.int32)
        drafts[chosen] = proposed
        return drafts

    @override
    def num_idle_steps(self, slots: Int64Array) -> IntArray:
        idle = [max(request.idle_until - self._num_steps, 0) for request in self._requests(slots)]
        return np.array(idle, dtype=np.int32)

    def _requests(self, slots: Int64Array) -> list[DraftedRequest]:
        return [self._by_slot[slot] for slot in slots.tolist()]

    def _is_idle(self, request: DraftedRequest) -> bool:
        return request.idle_until > self._num_steps

    def _measure(self, requests: list[DraftedRequest], num_others: int, step_ended: float) -> None:
        """Record the duration of the newest step, in which these and others have sampled."""
        step_seconds = step_ended - self._step_began
        num_rows = len(requests) + num_others + sum(request.num_drafts for request in requests)
        has_prompt = self._num_step_rows != num_rows
        if self._is_alone and not has_prompt:
            self._cost.note(self._num_step_rows, step_seconds)
        if self._waiting is not None:
            self._waiting.step_seconds = step_seconds


class Acceptance:
    """How often drafts are accepted, as a moving average over drafts."""

    __slots__ = ("_memory", "estimate")

    def __init__(self, estimate: float, memory: float) -> None:
        self.estimate = estimate
        self._memory = memory

    def note(self, num_accepted: int, is_rejected: bool) -> None:
        """Record how many drafts were accepted, and whether the next one was rejected."""
        self.estimate = 1 - (1 - self.estimate) * self._memory**num_accepted
        if is_rejected:
            self.estimate *= self._memory


class DraftedRequest:
    """What is known of one request's drafts.

    Args:
        acceptance: to begin with.
        found: how often drafts are found, to begin with.
        num_tokens: known tokens, prompt and output.
    """

    __slots__ = ("_acceptance", "_found", "_num_tokens", "idle_until", "num_drafts", "worth")

    def __init__(self, acceptance: float, found: float, num_tokens: int) -> None:
        self._acceptance = Acceptance(acceptance, _OWN_MEMORY)
        self._found = found  # of the times that drafts were looked for
        self._num_tokens = num_tokens  # when the newest drafts were made
        self.num_drafts = 0  # made after the step before
        self.worth = 0.0  # tokens that the drafts of a step are expected to save, less what they cost
        self.idle_until = 0  # number of the step after which it may have drafts again

    def note_drafts(self, num_drafts: int, num_tokens: int) -> None:
        """Record how many drafts were found after `num_tokens` tokens."""
        self.num_drafts, self._num_tokens = num_drafts, num_tokens
        self._found = _moving_average(self._found, num_drafts > 0, _FOUND_MEMORY)

    def outcome(self, num_tokens: int) -> tuple[int, bool]:
        """Return how many of the drafts were accepted, and whether the next was rejected."""
        num_accepted = max(0, min(num_tokens - self._num_tokens - 1, self.num_drafts))
        is_rejected = num_accepted < self.num_drafts
        self._acceptance.note(num_accepted, is_rejected)
        self.num_drafts = 0
        return num_accepted, is_rejected

    def choose_length(self, num_tokens: int, cost: float, most: int) -> int:
        """Return how many drafts are likely to pay, and set `worth`.

        Args:
            num_tokens: known tokens.
            cost: of one draft, see `RowCost.of_draft`.
            most: maximum number of drafts.
        """
        threshold = min(_MARGIN * cost, 1.0)
        acceptance = min(self._acceptance.estimate, _HIGHEST_ACCEPTANCE)
        if acceptance <= threshold:
            self.worth = 0.0
            return min(int(num_tokens - self._num_tokens >= cost / _PROBE_SHARE), most)
        length = min(int(math.log(threshold) / math.log(acceptance)), most)
        saved = acceptance * (1 - acceptance**length) / (1 - acceptance) - length * cost
        self.worth = self._found * saved
        return length

    def steps_until_trial(self, num_tokens: int, cost: float) -> int:
        """Return for how many steps no draft will be tried; at most 8, 0 if drafts pay."""
        if self.worth:
            return 0
        due = self._num_tokens + cost / _PROBE_SHARE
        return min(max(math.ceil(due - num_tokens) - 1, 0), _MAX_IDLE_STEPS)


class Waiting:
    """Which requests wait for their tokens, because drafts may follow them, where steps overlap.

    A request that waits is not in the step that is begun meanwhile. If all requests wait, there is no such
    step, and each of them loses the time until the next one begins. If some do, these lose a step each, and
    the others nothing. Whichever is expected to save more is chosen, and none waits if neither saves
    anything.

    Now and then, all requests wait to see whether drafts have become better, so rarely that it costs 1 % of
    the time.

    Attributes:
        step_seconds: the duration of the last step that was measured.
    """

    _MEMORY = 0.9

    def __init__(self) -> None:
        self.step_seconds = 0.0
        self._share = 0.0  # cost of waiting, as a share of a step
        self._num_waits = 0
        self._all_wait_since = 0.0  # 0: they do not, or have not done so
        self._idle_until: int | None = None  # number of the step that ends the pause of those who do not wait

    def begin_step(self, now: float, *, is_alone: bool) -> None:
        """Record the start of a step; `is_alone` says whether the step before has been computed."""
        if self._all_wait_since and self.step_seconds and is_alone:
            self._num_waits += 1
            share = min((now - self._all_wait_since) / self.step_seconds, 1.0)
            self._share += max(1 - self._MEMORY, 1 / self._num_waits) * (share - self._share)
        self._all_wait_since = 0.0

    def choose(
        self, requests: list[DraftedRequest], others: list[DraftedRequest], step: int, now: float
    ) -> None:
        """Choose which requests wait for the tokens of the next step, and how long the others are idle.

        Args:
            requests: those that have waited for the tokens of the last step.
            others: those that have sampled in it, too.
            step: its number.
            now: when it ended, in seconds.
        """
        everyone = [*requests, *others]
        is_trial = self._idle_until is not None and step >= self._idle_until
        if is_trial or self._all_should_wait(everyone):
            self._idle_until = None
            self._all_wait_since = 0.0 if others else now
        elif self._idle_until is None:
            # A trial waits twice: for drafts, and for what becomes of them.
            self._idle_until = step + math.ceil(2 * self._share / _PROBE_SHARE)
        idle_until = step if self._idle_until is None else self._idle_until
        for request in everyone:
            request.idle_until = step if request.worth > _MARGIN else idle_until

    def _all_should_wait(self, everyone: list[DraftedRequest]) -> bool:
        worth = [request.worth for request in everyone]
        together = sum(worth) - _MARGIN * len(everyone) * self._share
        apart = sum((one - 1) / 2 for one in worth if one > _MARGIN)
        return together > 0 and together >= apart


class RowCost:
    """The time that one more row adds to a step: the slope of a line through recent durations.

    While their numbers of rows hardly differ, a row is assumed to take 0.3 times its share of the step.
    """

    _MEMORY = 0.98  # what the averages keep of themselves at each step
    _ASSUMED_COST = 0.3
    _ASSUMED_WEIGHT = 0.005  # rows²; the assumption counts as much as steps of this variance
    _MIN_COST, _MAX_COST = 0.05, 0.99

    def __init__(self) -> None:
        self._num_steps = 0
        self._rows = self._seconds = self._variance = self._covariance = 0.0

    def note(self, num_rows: int, seconds: float) -> None:
        """Record the duration of a step."""
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

        All requests wait for the row of a draft, and only one of them may gain a token.
        """
        if not self._num_steps:
            return self._ASSUMED_COST
        cost = self._slope() * num_requests / self._expected(num_requests)
        return min(max(cost, self._MIN_COST), self._MAX_COST)

    def _slope(self) -> float:
        """Return the seconds that one more row takes."""
        assumed = self._ASSUMED_COST * self._seconds / self._rows
        covariance = self._covariance + self._ASSUMED_WEIGHT * assumed
        return covariance / (self._variance + self._ASSUMED_WEIGHT)

    def _expected(self, num_rows: int) -> float:
        """Return the seconds that a step is expected to take."""
        return max(self._seconds + self._slope() * (num_rows - self._rows), self._seconds / 10)


def _moving_average(average: float, value: float, memory: float) -> float:
    """Return a moving average updated by a value."""
    return memory * average + (1 - memory) * value


def _selected_rows(rows: RowsToContinue, chosen: list[int], lengths: list[int]) -> RowsToContinue:
    """Return the chosen ones of `rows`, each with at most its number of `lengths` as drafts."""
    return dataclasses.replace(
        rows,
        slots=rows.slots[chosen],
        num_tokens=rows.num_tokens[chosen],
        max_drafts=np.array([lengths[row] for row in chosen], dtype=np.int64),
    )
