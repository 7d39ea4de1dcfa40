"""What peers may read of steps that a device computes later than it is asked for, and when."""

from __future__ import annotations

import pytest

from late_device import LateDevice
from quire.datadist.loans.loans import Loans
from quire.kv.connectors.load_costs import LoadCosts
from quire.kv.connectors.step_times import StepTimes, host_mark
from quire.kv.peers.loan_steps import LoanStep, LoanSteps

DIGEST = b"what these blocks hold"
NUM_BLOCKS = 4


def nobody() -> frozenset[str]:
    return frozenset()


class Bench:
    """Two requests whose prompts are lent, and a device that computes when it is let."""

    def __init__(self) -> None:
        self.device = LateDevice()
        self.loans = Loans(8)
        self.steps = LoanSteps(self.loans, are_in_flight=True)
        self.numbers = {name: self.loans.offer(name, name, NUM_BLOCKS, DIGEST) for name in ("a", "b")}

    def ask(self, *parts: tuple[str, int, list[int]], failed_ids=nobody) -> None:
        """Ask for a step that computes blocks of requests, from one on."""
        self.steps.begin(
            [LoanStep(name, self.numbers[name], first, [(one,) for one in ids]) for name, first, ids in parts]
        )
        self.steps.end(failed_ids, self.device.mark())

    def compute(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            assert self.device.run(lambda ready: ready[0])

    def num_ready(self, name: str) -> int:
        return self.loans._loans[name].num_ready if name in self.loans._loans else -1


def test_blocks_are_ready_when_their_step_has_been_computed():
    bench = Bench()
    bench.ask(("a", 0, [5, 3]), ("b", 0, [9]))
    bench.ask(("a", 2, [8, 7]))
    assert [bench.num_ready(name) for name in "ab"] == [0, 0]
    bench.compute()
    bench.ask()
    assert [bench.num_ready(name) for name in "ab"] == [2, 1]
    bench.compute()
    bench.ask()
    assert [bench.num_ready(name) for name in "ab"] == [4, 1]
    assert bench.loans.is_ready(bench.numbers["a"])
    reading = bench.loans.open("a", 0, NUM_BLOCKS, DIGEST, patience=0, is_wanted=lambda: True)
    part = reading.ready_part()
    assert reading.block_ids(part).tolist() == [[5, 3, 8, 7]]
    assert (part.offset, part.num_bytes) == (0, 8)


def test_what_a_request_computed_whose_tokens_are_known_is_told_at_once():
    bench = Bench()
    bench.ask(("b", 0, [9]))
    bench.ask(("a", 0, [5, 3]))
    bench.ask(("a", 2, [8, 7]), ("b", 1, [1]))
    bench.ask(("b", 2, [2, 4]))
    bench.steps.settle("a")
    assert [bench.num_ready(name) for name in "ab"] == [4, 2]
    bench.steps.settle("a")
    bench.compute(3)
    bench.ask()
    assert [bench.num_ready(name) for name in "ab"] == [4, 2]
    bench.compute()
    bench.ask()
    assert [bench.num_ready(name) for name in "ab"] == [4, 4]


def test_only_the_loan_of_a_request_that_failed_ends():
    bench = Bench()
    asked = []

    def failed() -> frozenset[str]:
        asked.append(bench.device.num_done)
        return frozenset({"a"})

    bench.ask(("a", 0, [5, 3]), ("b", 0, [9]), failed_ids=failed)
    bench.ask(("a", 2, [8, 7]), ("b", 1, [1]))
    assert not asked, "nobody waits for what the device has not computed"
    bench.compute(2)
    bench.ask()
    assert asked == [2]
    assert [bench.num_ready(name) for name in "ab"] == [-1, 2]


def test_a_loan_ends_with_a_step_that_was_never_asked_for():
    bench = Bench()
    bench.steps.begin([LoanStep("a", bench.numbers["a"], 0, [5, 3])])
    bench.ask(("a", 2, [8, 7]), ("b", 0, [9]))
    bench.compute()
    bench.ask()
    assert [bench.num_ready(name) for name in "ab"] == [-1, 1]


def test_a_loan_that_ended_meanwhile_is_none_of_another_of_that_name():
    bench = Bench()
    bench.ask(("a", 0, [5, 3]))
    bench.loans.end(bench.numbers["a"], "its request was preempted")
    assert bench.loans.offer("a", "c", NUM_BLOCKS, DIGEST)
    bench.compute()
    bench.ask()
    assert bench.num_ready("a") == 0


@pytest.mark.parametrize("mark", [host_mark, None], ids=["host", "device"])
def test_steps_cost_what_computing_them_took(mark):
    device, noted = LateDevice(), []
    costs = LoadCosts(16)
    costs.note_step = lambda seconds, num_tokens: noted.append((seconds, num_tokens))
    times = StepTimes(mark or device.mark, costs)
    for num_tokens in (20, 30):
        times.begin(num_tokens)
        device.steps.ask(lambda: None)
        times.end()
    assert [tokens for _, tokens in noted] == ([20, 30] if mark else [])
    device.finish()
    times.end()  # of a step that was not begun
    assert [tokens for _, tokens in noted] == [20, 30]
    assert all(seconds >= (0 if mark else 1) for seconds, _ in noted)
