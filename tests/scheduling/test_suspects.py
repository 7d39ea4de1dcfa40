"""After steps that fail, the requests at fault are found, and nobody else ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.scheduling.accounts.suspects import PROBE_ID, Suspects

MOST_STEPS = 400


class Trials:
    """Requests that run until they end; those of `bad` make their steps fail from some step of theirs on."""

    def __init__(self, num_requests: int, bad: dict[int, int], lengths: list[int]) -> None:
        self.suspects = Suspects()
        self.left = {str(number): lengths[number % len(lengths)] for number in range(num_requests)}
        self.bad = {str(number): at for number, at in bad.items() if number < num_requests}
        self.done = dict.fromkeys(self.left, 0)
        self.running: set[str] = set()
        self.convicted: list[str] = []

    def step(self, most: int) -> None:
        allowed = self.suspects.may_start(self.left.__contains__)
        for name in self.left:
            if (allowed is None or name in allowed) and len(self.running) < most:
                self.running.add(name)
        members = sorted(self.running)
        if any(self.bad.get(name, 10**9) <= self.done[name] for name in members):
            self._fail(members)
        else:
            self._succeed(members)

    def _fail(self, members: list[str]) -> None:
        self.running.clear()
        at_fault = self.suspects.cause_of_failure(members)
        if at_fault is not None:
            self.convicted.append(at_fault)
            del self.left[at_fault]

    def _succeed(self, members: list[str]) -> None:
        self.suspects.clear(members)
        for name in members:
            self.done[name] += 1
            self.left[name] -= 1
            if not self.left[name]:
                del self.left[name]
                self.running.remove(name)


@given(
    st.integers(1, 40),
    st.dictionaries(st.integers(0, 39), st.integers(0, 3), max_size=4),
    st.lists(st.integers(5, 9), min_size=1, max_size=5),
    st.integers(1, 40),
)
def test_those_at_fault_end_and_nobody_else(num_requests, bad, lengths, most):
    trials = Trials(num_requests, bad, lengths)
    for _ in range(MOST_STEPS):
        if trials.left:
            trials.step(most)
    assert not trials.left
    assert sorted(trials.convicted) == sorted(trials.bad)
    assert not len(trials.suspects)


def test_a_fault_is_found_in_few_steps():
    trials = Trials(1024, {700: 0}, [100])
    for _ in range(30):
        if not trials.convicted:
            trials.step(1024)
    assert trials.convicted == ["700"]


def test_nothing_runs_beside_the_probe():
    suspects = Suspects()
    assert suspects.cause_of_failure(["a", "b"]) is None
    assert suspects.may_start({"a", "b", PROBE_ID}.__contains__) == {PROBE_ID}
    assert suspects.cause_of_failure([PROBE_ID]) == PROBE_ID
    assert suspects.may_start({"a", "b"}.__contains__) == {"a"}


def test_what_cannot_be_computed_together_takes_turns():
    suspects = Suspects()
    assert suspects.cause_of_failure(["a", "b"]) is None
    for first in "abab":
        assert suspects.may_start({"a", "b"}.__contains__) == {first}
        suspects.clear([first])
        assert suspects.may_start({"a", "b"}.__contains__) == {"a", "b"}
        assert suspects.cause_of_failure(["a", "b"]) is None
