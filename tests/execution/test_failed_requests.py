"""Whose KV of a step may not be stored: who failed, who read that, and both until they leave their slots."""

import numpy as np
import pytest
from step_driver import plan

from quire.execution.failed_requests import FailedRequests
from quire.step import NewRequestData, ResumedRequestData

BLOCK_SIZE = 4
TABLES = [[0, 1, 2], [0, 1, 3], [0, 1, 3, 4], [7, 8, 9], [0, 5, 6]]  # by slot
NAMES = [f"r{slot}" for slot in range(len(TABLES))]


def failed_in(failed, errors=(), *, slots=range(5), computed=(0, 8, 12, 0, 4), num_tokens=5, **changes):
    """Compute a step; slot 0 fills blocks 0 and 1, slot 1 the block 3 behind them, slot 4 the block 5."""
    slots = list(slots)
    computed = [computed[slot] for slot in slots]
    output = plan(slots, [num_tokens] * len(slots), computed, [NAMES[slot] for slot in slots], **changes)
    failed.begin(output)
    return failed.end(output, errors, lambda slot: np.array(TABLES[slot]))


@pytest.fixture
def failed():
    return FailedRequests(BLOCK_SIZE)


def test_without_errors_all_kv_is_valid(failed):
    assert failed_in(failed) == frozenset()


def test_who_reads_what_a_failed_request_wrote_in_the_step_has_invalid_kv(failed):
    assert failed_in(failed, {"r0"}) == {"r0", "r1", "r2", "r4"}


def test_what_precedes_a_failed_request_is_valid(failed):
    assert failed_in(failed, {"r1"}) == {"r1", "r2"}


def test_who_failed_stays_invalid_until_it_leaves_its_slot(failed):
    assert failed_in(failed, {"r1", "gone"}) == {"r1", "r2"}
    assert failed_in(failed, slots=[3]) == frozenset()
    assert failed_in(failed, slots=[1, 3]) == {"r1"}
    assert failed_in(failed, slots=[2, 3], computed=[0] * 5) == {"r2"}


NEW = NewRequestData("r3", 3, np.arange(5), [], None, (), np.array(TABLES[3]), 0)
RESUMED = ResumedRequestData("r3", 3, np.array(TABLES[3]), 0, 5)


@pytest.mark.parametrize(
    "changes", [{"finished": ["r3"]}, {"preempted": ["r3"]}, {"new": [NEW]}, {"resumed": [RESUMED]}]
)
def test_who_has_left_its_slot_begins_anew(failed, changes):
    assert failed_in(failed, {"r3"}) == {"r3"}
    assert failed_in(failed, slots=[3]) == {"r3"}
    assert failed_in(failed, slots=[3], **changes) == frozenset()
    assert failed_in(failed, slots=[3]) == frozenset()
