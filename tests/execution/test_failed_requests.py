"""Whose KV of a step may not be stored: who failed, who read that, and both until they leave their slots."""

import numpy as np
import pytest
from step_driver import plan

from quire.execution.failed_requests import FailedRequests, KnownErrors
from quire.step import NewRequestData, ResumedRequestData

BLOCK_SIZE = 4
TABLES = [[0, 1, 2, 99], [0, 1, 3, 99], [0, 1, 3, 4], [7, 8, 9, 99], [0, 5, 6, 99]]  # by slot; 99: nothing
NAMES = [f"r{slot}" for slot in range(len(TABLES))]
SLOTS = range(len(TABLES))


class LateErrors:
    """Errors that arrive when they are waited for, or when a test says so."""

    def __init__(self, *requests):
        self.requests = requests
        self.have_arrived = False

    def failed_ids(self):
        self.have_arrived = True
        if "device" in self.requests:
            raise RuntimeError("the device has failed")
        return self.requests


def step_of(slots=SLOTS, *, computed=(0, 8, 12, 0, 4), num_tokens=5, **changes):
    """Slot 0 fills blocks 0 and 1, slot 1 the block 3 behind them, slot 4 the block 5."""
    slots = list(slots)
    computed = [computed[slot] for slot in slots]
    return plan(slots, [num_tokens] * len(slots), computed, [NAMES[slot] for slot in slots], **changes)


def verdict_in(failed, errors, slots=SLOTS, tables=TABLES, **changes):
    failed.begin(step_of(slots, **changes))
    return failed.end(errors, lambda: np.array([tables[slot] for slot in slots]))


def failed_in(failed, errors=(), **changes):
    return verdict_in(failed, KnownErrors(errors), **changes).failed_ids()


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


NEW = NewRequestData("r3", 3, np.arange(5), [], None, (), np.array([TABLES[3]]), 0)
RESUMED = ResumedRequestData("r3", 3, np.array([TABLES[3]]), 0, 5, 0)


@pytest.mark.parametrize(
    "changes", [{"finished": ["r3"]}, {"preempted": ["r3"]}, {"new": [NEW]}, {"resumed": [RESUMED]}]
)
def test_who_has_left_its_slot_begins_anew(failed, changes):
    assert failed_in(failed, {"r3"}) == {"r3"}
    assert failed_in(failed, slots=[3]) == {"r3"}
    assert failed_in(failed, slots=[3], **changes) == frozenset()
    assert failed_in(failed, slots=[3]) == frozenset()


def test_a_step_that_was_not_computed_leaves_nothing_valid(failed):
    failed.begin(step_of([1, 3]))
    assert failed_in(failed, slots=[1, 3, 4]) == {"r1", "r3"}
    assert failed_in(failed, slots=[3, 4], preempted=["r3"]) == frozenset()


# -- steps in flight ---------------------------------------------------------------------------------------


def test_a_verdict_waits_for_its_step_and_for_those_before(failed):
    late = [LateErrors("r3"), LateErrors(), LateErrors("r1")]
    verdicts = [verdict_in(failed, errors) for errors in late]
    assert not any(verdict.is_known for verdict in verdicts)
    late[1].have_arrived = True
    assert not verdicts[1].is_known
    assert verdicts[1].failed_ids() == {"r3"}
    assert [errors.have_arrived for errors in late] == [True, True, False]
    assert [verdict.is_known for verdict in verdicts] == [True, True, False]
    assert verdicts[2].failed_ids() == {"r1", "r2", "r3"}
    assert verdicts[0].failed_ids() == {"r3"}
    assert failed_in(failed) == {"r1", "r2", "r3"}


def test_a_step_behind_one_in_flight_is_not_known_before_it(failed):
    late = LateErrors("r0")
    verdict_in(failed, late)
    behind = verdict_in(failed, KnownErrors(()))
    assert not behind.is_known
    assert behind.failed_ids() == {"r0", "r1", "r2", "r4"}


def test_blocks_are_those_that_the_rows_had_in_their_step(failed):
    tables = [list(table) for table in TABLES]
    verdict = verdict_in(failed, LateErrors("r0"), tables=tables)
    tables[:] = [[50 + slot] * 4 for slot in SLOTS]
    assert verdict.failed_ids() == {"r0", "r1", "r2", "r4"}


def test_all_requests_of_a_step_fail_with_the_device(failed):
    verdict = verdict_in(failed, LateErrors("device"), slots=[1, 3])
    assert verdict.failed_ids() == {"r1", "r3"}
    assert failed_in(failed, slots=[3, 4]) == {"r3"}


def test_a_request_that_fails_in_flight_may_have_left_its_slot_by_then(failed):
    first = verdict_in(failed, LateErrors("r3"), slots=[3])
    back = verdict_in(failed, LateErrors(), slots=[3], resumed=[RESUMED])
    assert back.failed_ids() == frozenset()
    assert first.failed_ids() == {"r3"}


def test_steps_are_forgotten_once_they_are_known(failed):
    late = [LateErrors() for _ in range(2000)]  # more than a chain of steps could be followed through
    for number, errors in enumerate(late):
        verdict = verdict_in(failed, errors)
        late[number - 1].have_arrived = number > 0
    assert verdict.failed_ids() == frozenset()


def test_a_step_without_rows_has_nothing_to_fail(failed):
    assert verdict_in(failed, LateErrors(), slots=[]).failed_ids() == frozenset()
