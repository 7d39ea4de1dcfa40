"""How much time drafts cost where they are wrong, and save where they are right, in a simulated engine."""

from __future__ import annotations

import numpy as np
import pytest

from quire.execution.drafts.adaptive_proposer import AdaptiveProposer, DraftedRequest, RowCost, Waiting
from quire.execution.drafts.proposer import Proposer, RowsToContinue
from quire.step import NO_TOKEN

NUM_DRAFTS = 4
SCOPE = ("", "")


class Always(Proposer):
    """Proposes as much as it may, and notes for how many rows it is asked."""

    def __init__(self):
        self.num_rows = []

    def propose(self, rows, num_drafts):
        self.num_rows.append(len(rows.slots))
        return np.where(np.arange(num_drafts) < rows.max_drafts[:, None], 1, NO_TOKEN).astype(np.int32)


class Engine:
    """A step of n rows takes 1 + n * `row` seconds; drafts of slot s are right with chance `right[s]`.

    Steps overlap if a `wait` is given, in seconds: then a step is begun while requests wait for the tokens of
    the one before, with the others; if there are none, nothing is computed for so long.
    """

    def __init__(self, right, row, wait=None):
        self.right, self.row, self.wait = right, row, wait
        self.rng = np.random.default_rng(7)
        self.now = 0.0
        self.inner = Always()
        self.proposer = AdaptiveProposer(
            self.inner, len(right), overlaps=wait is not None, clock=lambda: self.now
        )
        self.slots = np.arange(len(right))
        self.num_tokens = np.full(len(right), 10)
        self.drafts = np.zeros(len(right), np.int64)
        self.idle = np.zeros(len(right), np.int64)
        self.in_flight = np.zeros(0, np.int64)  # slots that wait for the tokens of the step before
        self.num_drafted = self.num_waits = self.num_idle_steps = 0
        self.has_waited = True
        for slot in self.slots:
            self.proposer.open(slot, 10, SCOPE)

    def step(self, *, is_alone=True):
        """Compute a step with all requests that do not wait, and let others have their drafts meanwhile."""
        slots = np.setdiff1d(self.slots, self.in_flight)
        if self.in_flight.size:
            slots = slots[self.idle[slots] > 0]  # who is about to wait does so together with the others
        if not slots.size:
            self.now += self.wait
            self.num_waits += 1
            self.in_flight, self.has_waited = self.in_flight[:0], True
            return
        rows = len(slots) + int(self.drafts[slots].sum())
        self.num_drafted += int(self.drafts[slots].sum())
        self.proposer.begin_step(rows, is_alone=is_alone and (self.wait is None or self.has_waited))
        self.has_waited = False
        self.now += 1 + self.row * rows
        for slot in slots.tolist():
            hits = self.rng.random(self.drafts[slot]) < self.right[slot]
            self.num_tokens[slot] += 1 + int(np.cumprod(hits).sum())
        self.drafts[slots] = 0
        asked = slots[self.idle[slots] == 0]
        self.idle[slots] = np.maximum(self.idle[slots] - 1, 0)
        self.in_flight = self.in_flight[:0]
        if not asked.size:
            self.num_idle_steps += 1
            return
        self._propose(asked, np.setdiff1d(slots, asked))
        self.idle[slots] = self.proposer.num_idle_steps(slots)
        if self.wait is not None:
            self.in_flight = asked

    def _propose(self, asked, others):
        to_continue = RowsToContinue(
            token_ids=np.ones((len(self.slots), 1), np.int32),
            slots=asked,
            num_tokens=self.num_tokens[asked],
            block_tables=np.zeros((len(self.slots), 1), np.int32),
            num_blocks=np.ones(len(self.slots), np.int64),
            max_drafts=np.full(len(asked), NUM_DRAFTS),
            other_slots=others,
            is_newest=not others.size,
        )
        drafts = self.proposer.propose(to_continue, NUM_DRAFTS)
        if drafts is not None:
            self.drafts[asked] = (drafts != NO_TOKEN).sum(axis=1)

    def gain(self, num_steps=400):
        """Run, and return tokens per second, relative to those without drafts."""
        tokens, began = self.num_tokens.sum(), self.now
        for _ in range(num_steps):
            self.step()
        speed = (self.num_tokens.sum() - tokens) / (self.now - began)
        return speed * (1 + self.row * len(self.slots)) / len(self.slots)


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("row", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_drafts_that_are_always_wrong_cost_at_most_three_percent(row, num_requests):
    assert Engine([0.0] * num_requests, row).gain() >= 0.97


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("row", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("right", [0.1, 0.2, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_drafts_that_are_sometimes_right_cost_at_most_three_percent(row, right, num_requests):
    assert Engine([right] * num_requests, row).gain() >= 0.97


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("wait", [0.0, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("row", [0.02, 0.1])
@pytest.mark.parametrize("num_right", [0, 1, 4, 16])
@pytest.mark.parametrize("right", [0.5, 0.95])
def test_where_steps_overlap_waiting_for_drafts_costs_at_most_three_percent(wait, row, num_right, right):
    engine = Engine([right] * num_right + [0.0] * (16 - num_right), row, wait)
    engine.gain(50)
    assert engine.gain() >= 0.97


@pytest.mark.parametrize(("num_requests", "waits"), [(16, False), (2, True)])
def test_all_wait_for_the_drafts_of_one_only_if_that_pays(num_requests, waits):
    engine = Engine([0.95] + [0.0] * (num_requests - 1), 0.02, wait=0.3)
    engine.gain(100)
    idle_before = engine.num_idle_steps
    gain = engine.gain()
    assert (engine.num_idle_steps - idle_before < 40) == waits
    assert (gain > 1.3) == waits


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("wait", [0.3, 1.0])
def test_one_has_drafts_alone_where_it_does_not_pay_that_all_wait(wait):
    engine = Engine([0.95] + [0.0] * 15, 0.01, wait)
    engine.gain(300)
    waits_before, tokens_before = engine.num_waits, engine.num_tokens.copy()
    gain = engine.gain(800)
    own, *others = engine.num_tokens - tokens_before
    assert gain > 1.0
    assert own > 1.3 * max(others)
    assert min(others) > 0.95 * (800 - engine.num_waits + waits_before), "they are in nearly all steps"


@pytest.mark.parametrize(
    ("worth", "share", "waits"),
    [
        ([3.0, 0.0, 0.0, 0.0], 0.2, [True] * 4),
        ([3.0, 0.0, 0.0, 0.0], 0.5, [True, False, False, False]),  # all: 0.8 tokens, one: 1
        ([1.0, 0.0, 0.0, 0.0], 0.5, [False] * 4),
        ([1.0] * 4, 0.5, [True] * 4),
        ([0.4] * 4, 0.5, [False] * 4),
    ],
)
def test_whatever_saves_most_tokens_is_done(worth, share, waits, monkeypatch):
    waiting, requests = Waiting(), [DraftedRequest(0.5, 1.0, 10) for _ in worth]
    monkeypatch.setattr(waiting, "_share", share)
    for request, tokens in zip(requests, worth, strict=True):
        request.worth = tokens
    waiting.choose(requests[:2], requests[2:], step=7, now=1.0)
    assert [request.idle_until == 7 for request in requests] == waits
    assert {request.idle_until for request in requests} <= {7, 7 + 200 * share}


def test_all_wait_where_the_drafts_of_most_are_right():
    engine = Engine([0.95] * 12 + [0.0] * 4, 0.01, wait=0.3)
    engine.gain(100)
    waits_before = engine.num_waits
    assert engine.gain() > 1.8
    assert engine.num_waits - waits_before > 0.45 * 400, "half of what is counted are waits"


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize(("num_requests", "wait"), [(16, 0.1), (1, 1.0)])
def test_nobody_waits_where_no_drafts_are_found(num_requests, wait):
    engine = Engine([0.9] * num_requests, 0.01, wait)
    engine.gain(50)
    engine.inner.propose = lambda rows, num_drafts: np.full(
        (len(rows.slots), num_drafts), NO_TOKEN, dtype=np.int32
    )
    engine.gain(50)
    assert engine.gain(800) > 0.97
    del engine.inner.propose
    engine.gain(800)
    assert engine.gain(200) > 1.3, "and it is noticed when they are found again"


def test_a_new_request_waits_for_drafts_at_most_once_where_they_do_not_pay():
    engine = Engine([0.0] * 16, 0.01, wait=0.3)
    engine.gain(100)
    waits, idle = engine.num_waits, engine.idle.copy()
    for slot in range(4):
        engine.proposer.open(slot, int(engine.num_tokens[slot]), SCOPE)
        engine.idle[slot] = 0
    tokens = engine.num_tokens.copy()
    while engine.idle[4] > 0:
        engine.step()
    lost = (engine.num_tokens - tokens).max() - (engine.num_tokens - tokens)
    assert idle[4] > 4
    assert lost.tolist() == [1] * 4 + [0] * 12
    assert engine.num_waits == waits


def test_what_one_s_drafts_are_worth_is_noticed_when_others_have_ended():
    engine = Engine([0.95] + [0.0] * 15, 0.02, wait=0.3)
    engine.gain()
    engine.slots, engine.num_tokens, engine.drafts = np.arange(1), engine.num_tokens[:1], engine.drafts[:1]
    engine.gain(150)
    assert engine.gain(100) > 2


def test_drafts_that_are_mostly_right_pay_nearly_as_if_all_had_been_made():
    p, row = 0.9, 0.05
    tokens = (1 - p ** (NUM_DRAFTS + 1)) / (1 - p)
    ideal = tokens * (1 + row) / (1 + row * (1 + NUM_DRAFTS))
    assert Engine([p], row).gain() >= 0.93 * ideal


def test_each_request_has_as_many_drafts_as_pay_for_it():
    engine = Engine([0.95] + [0.0] * 7, 0.02)
    engine.gain()
    assert engine.num_tokens[0] > 3 * engine.num_tokens[1:].max()
    assert np.median(engine.inner.num_rows) == 1


@pytest.mark.parametrize("num_requests", [1, 8])
def test_it_is_idle_while_no_draft_is_due_and_not_when_one_is(num_requests):
    engine, never_idle = Engine([0.0] * num_requests, 0.3), Engine([0.0] * num_requests, 0.3)
    never_idle.proposer.num_idle_steps = lambda slots: np.zeros(len(slots), np.int32)
    engine.gain(), never_idle.gain()
    assert engine.num_idle_steps > 200
    assert engine.num_drafted == pytest.approx(never_idle.num_drafted, abs=num_requests)
    assert engine.proposer.num_idle_steps(engine.slots).max() <= 8


def test_a_text_that_begins_to_repeat_itself_is_noticed():
    engine = Engine([0.0], 0.1)
    engine.gain()
    engine.right = [0.95]
    engine.gain(150)
    assert engine.gain(100) > 2


def test_a_request_begins_with_what_others_have_learned():
    engine = Engine([0.0], 0.1)
    engine.gain()
    engine.proposer.open(0, int(engine.num_tokens[0]), SCOPE)
    before = engine.num_drafted
    engine.gain(20)
    with_experience = engine.num_drafted - before
    engine = Engine([0.0], 0.1)
    engine.gain(20)
    assert engine.num_drafted >= 3 * with_experience


def test_what_ended_a_step_before_a_request_was_opened_is_not_held_against_it():
    engine = Engine([1.0], 0.1)
    engine.gain(50)
    assert engine.drafts[0] == NUM_DRAFTS
    engine.num_tokens[0] = 10  # another request, in the same slot
    engine.proposer.open(0, 10, SCOPE)
    engine.drafts[:] = 0
    engine.step()
    assert engine.drafts[0] == NUM_DRAFTS


def test_the_cost_of_a_row_is_measured():
    cost = RowCost()
    assert cost.of_draft(4) == 0.3
    rng = np.random.default_rng(3)
    for rows in rng.integers(1, 12, 300).tolist():
        cost.note(rows, (5 + 2 * rows) * (1 + 0.1 * rng.random()))
    cost.note(5, 1000.0)  # something else took the time
    assert cost.of_draft(1) == pytest.approx(2 / 7, rel=0.25)
    assert cost.of_draft(8) == pytest.approx(16 / 21, rel=0.25)


def test_a_step_that_begins_behind_another_tells_nothing_of_its_cost():
    engine = Engine([0.5], 0.8)
    cost = engine.proposer._cost
    for _ in range(30):
        engine.step(is_alone=False)
    assert cost.of_draft(1) == 0.3, "as assumed"
    for _ in range(200):
        engine.step()
    assert cost.of_draft(1) == pytest.approx(0.8 / 1.8, rel=0.2)


def test_steps_of_one_length_tell_nothing_of_the_cost_of_a_row():
    cost = RowCost()
    for _ in range(2000):
        cost.note(4, 0.001)
    assert cost.of_draft(4) == pytest.approx(0.3)
