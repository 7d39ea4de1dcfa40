"""A proposer that raises or proposes what are no drafts costs its drafts and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from quire.execution.drafts.proposer import FOREVER, GuardedProposer, Proposer, RowsToContinue
from quire.step import NO_TOKEN

VOCAB_SIZE = 10
CALLS = ["finish", "open", "copy_blocks", "begin_step", "follow", "propose", "num_idle_steps"]
ROWS = RowsToContinue(
    np.ones((4, 8), np.int32),
    np.arange(2),
    np.array([3, 4]),
    np.zeros((2, 1), np.int32),
    np.ones(2, np.int64),
    np.array([3, 3]),
    other_slots=np.array([3]),
    is_newest=True,
)
SLOTS = np.array([0, 1, 3])


class Faulty(Proposer):
    """Raises in one call, or proposes what it is told to."""

    def __init__(self, drafts: object = None, raises_in: str = "", idle: object = None) -> None:
        self.drafts = drafts
        self.idle = np.array([5, 0, 7]) if idle is None else idle
        self.raises_in = raises_in
        self.calls: list[str] = []

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.raises_in:
            raise ZeroDivisionError("no luck")

    def open(self, slot, num_tokens, scope):
        self._note("open")

    def finish(self, slot, output):
        self._note("finish")

    def copy_blocks(self, copies):
        self._note("copy_blocks")

    def begin_step(self, num_tokens, *, is_alone):
        self._note("begin_step")

    def follow(self, token_ids, batch, *, is_captured):
        self._note("follow")

    def propose(self, rows, num_drafts):
        self._note("propose")
        return self.drafts

    def num_idle_steps(self, slots):
        self._note("num_idle_steps")
        assert slots is SLOTS
        return self.idle


def run_step(proposer: Proposer) -> np.ndarray:
    proposer.finish(0, np.arange(3))
    proposer.open(0, 3, ("", ""))
    proposer.copy_blocks(np.empty((0, 2), np.int32))
    proposer.begin_step(2, is_alone=True)
    proposer.follow(None, None, is_captured=True)
    drafts = proposer.propose(ROWS, 3)
    return drafts if proposer.num_idle_steps(SLOTS).tolist() == [5, 0, 7] else None


@pytest.mark.parametrize(
    "drafts", [None, np.arange(6).reshape(2, 3), np.array([[1, NO_TOKEN, NO_TOKEN], [9, 0, 9]])]
)
def test_drafts_are_passed_on(drafts):
    proposer = Faulty(drafts)
    guarded = GuardedProposer(proposer, VOCAB_SIZE)
    for _ in range(2):
        assert run_step(guarded) is drafts
    assert proposer.calls == CALLS * 2


@pytest.mark.parametrize("call", CALLS)
def test_after_a_call_that_raises_nothing_is_proposed_any_more(call, caplog):
    proposer = Faulty(np.ones((2, 3), np.int32), raises_in=call)
    guarded = GuardedProposer(proposer, VOCAB_SIZE)
    for _ in range(2):
        assert run_step(guarded) is None
    assert proposer.calls[-1] == call
    assert proposer.calls.count(call) == 1
    assert [record.message for record in caplog.records] == [
        "the proposer of drafts failed; until the engine ends, nothing is proposed"
    ]
    assert "no luck" in caplog.text


@pytest.mark.parametrize(
    "drafts",
    [
        "drafts",
        [[1, 2, 3], [4, 5, 6]],
        7,
        np.int32(7),
        np.ones((2, 3)),
        np.ones((2, 3), np.bool_),
        np.ones((2, 4), np.int32),
        np.ones((2, 2), np.int32),
        np.ones((3, 3), np.int32),
        np.ones(3, np.int32),
        np.full((2, 3), VOCAB_SIZE),
        np.full((2, 3), NO_TOKEN - 1),
        np.array([[1, 2, 3], [4, 2**40, 6]]),
        np.array([[None] * 3] * 2),
    ],
    ids=lambda drafts: f"{drafts!r:.30}".replace("\n", ""),
)
def test_what_are_no_drafts_is_proposed_to_nobody(drafts, caplog):
    guarded = GuardedProposer(Faulty(drafts), VOCAB_SIZE)
    assert run_step(guarded) is None
    assert "failed" in caplog.text


@pytest.mark.parametrize(
    "idle", [3, [1, 2, 3], np.ones(3), np.ones(2, np.int32), np.ones((3, 1), np.int32), "steps"]
)
def test_what_are_no_numbers_of_steps_ends_drafts(idle, caplog):
    guarded = GuardedProposer(Faulty(None, idle=idle), VOCAB_SIZE)
    assert guarded.num_idle_steps(SLOTS).tolist() == [FOREVER] * 3
    assert "are not an array [3] of integers" in caplog.text


def test_numbers_of_steps_that_make_no_sense_are_bounded():
    guarded = GuardedProposer(Faulty(None, idle=np.array([-4, 1 << 60, 2])), VOCAB_SIZE)
    assert guarded.num_idle_steps(SLOTS).tolist() == [0, FOREVER, 2]
