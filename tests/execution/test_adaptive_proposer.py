"""How much time drafts cost where they are wrong, and save where they are right, in a simulated engine."""

from __future__ import annotations

import numpy as np
import pytest

from quire.execution.adaptive_proposer import AdaptiveProposer, RowCost
from quire.execution.proposer import Proposer, RowsToContinue
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

    Steps overlap if a `wait` is given, in seconds: between a step that drafts may follow and the next one.
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
        self.num_drafted = 0
        self.num_idle_left = self.num_idle_steps = 0
        self.is_idle = False
        for slot in self.slots:
            self.proposer.open(slot, 10, SCOPE)

    def step(self, *, is_alone=True):
        rows = len(self.slots) + int(self.drafts.sum())
        self.num_drafted += int(self.drafts.sum())
        self.proposer.begin_step(rows, is_alone=is_alone)
        self.now += 1 + self.row * rows
        for slot, count in enumerate(self.drafts):
            hits = self.rng.random(count) < self.right[slot]
            self.num_tokens[slot] += 1 + int(np.cumprod(hits).sum())
        size = len(self.slots)
        to_continue = RowsToContinue(
            token_ids=np.ones((size, 1), np.int32),
            slots=self.slots,
            num_tokens=self.num_tokens.copy(),
            block_tables=np.zeros((size, 1), np.int32),
            num_blocks=np.ones(size, np.int64),
            max_drafts=np.full(size, NUM_DRAFTS),
        )
        drafts = None
        self.is_idle = bool(self.num_idle_left)
        if self.is_idle:
            self.num_idle_left -= 1
            self.num_idle_steps += 1
        else:
            drafts = self.proposer.propose(to_continue, NUM_DRAFTS)
            self.num_idle_left = self.proposer.num_idle_steps() if drafts is None else 0
            self.now += self.wait or 0.0
        self.drafts = np.zeros(size, np.int64) if drafts is None else (drafts != NO_TOKEN).sum(axis=1)

    def gain(self, num_steps=400):
        """Run, and return tokens per second, relative to those without drafts."""
        tokens, began = self.num_tokens.sum(), self.now
        for _ in range(num_steps):
            self.step(is_alone=self.wait is None or not self.is_idle)
        speed = (self.num_tokens.sum() - tokens) / (self.now - began)
        return speed * (1 + self.row * len(self.slots)) / len(self.slots)


@pytest.mark.parametrize("row", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_drafts_that_are_always_wrong_cost_at_most_three_percent(row, num_requests):
    assert Engine([0.0] * num_requests, row).gain() >= 0.97


@pytest.mark.parametrize("row", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("right", [0.1, 0.2, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_drafts_that_are_sometimes_right_cost_at_most_three_percent(row, right, num_requests):
    assert Engine([right] * num_requests, row).gain() >= 0.97


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
    never_idle.proposer.num_idle_steps = lambda: 0
    engine.gain(), never_idle.gain()
    assert engine.num_idle_steps > 200
    assert engine.num_drafted == pytest.approx(never_idle.num_drafted, abs=num_requests)
    assert engine.proposer.num_idle_steps() <= 8


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
    for _ in range(30):
        engine.step(is_alone=False)
    assert engine.proposer._cost.of_draft(1) == 0.3, "as assumed"
    for _ in range(200):
        engine.step()
    assert engine.proposer._cost.of_draft(1) == pytest.approx(0.8 / 1.8, rel=0.2)


def test_steps_of_one_length_tell_nothing_of_the_cost_of_a_row():
    cost = RowCost()
    for _ in range(2000):
        cost.note(4, 0.001)
    assert cost.of_draft(4) == pytest.approx(0.3)
