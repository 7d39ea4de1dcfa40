"""A connector that answers what it may not, or what is not so: no request and no block is lost."""

from __future__ import annotations

import dataclasses

import fake_runner
import numpy as np
import pytest
from scene import Scene

from faulty_connector import FaultyConnector
from quire.step import KVConnectorOutput


class Unreadable:
    """Cannot even be iterated over, compared or shown."""

    def __iter__(self):
        raise OSError("no answer")

    __eq__ = __repr__ = __bool__ = __iter__
    __hash__ = None


NONSENSE = {
    "get_num_new_matched_tokens": [
        None,
        7,
        (),
        (-5, True),
        (2.5, True),
        ("8", True),
        (4, Unreadable()),
        (4, np.array([1, 0])),
        (None, None),
    ],
    "request_finished": [None, (Unreadable(), None), ("yes", 7), (True, {"a": object()}), (False, [1])],
    "leases_renewed": [None, 7, "abc", [None], Unreadable(), ["unknown"]],
    "reset": [Unreadable(), None],
}
BOUNDLESS = [10**9, np.int64(5)]  # tokens to load
NEWS = [
    None,
    7,
    "abc",
    {"unknown"},
    [None, -1, 10**9, 2.5],
    frozenset(range(200)),
    np.array(["0", "1"]),
    np.arange(-5, 50),
    Unreadable(),
]


class Lying(FaultyConnector):
    """Answers nonsense in the calls that it is told to."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.nonsense: dict[str, list] = {}


def _lying(name):
    honest = getattr(FaultyConnector, name)

    def method(self, *arguments):
        answer = honest(self, *arguments)
        return self.nonsense[name].pop() if self.nonsense.get(name) else answer

    return method


for _name in NONSENSE:
    setattr(Lying, _name, _lying(_name))


def run_with_lies(connector: Lying, method: str, answer) -> Scene:
    """Run requests some of which begin with what others have stored, and let everything end."""
    scene = Scene(connector=connector, num_blocks=24, enable_prefix_caching=False)
    for number in range(6):
        connector.nonsense = {method: [answer] * 3}
        scene.add(f"{number}", range(number % 3, number % 3 + 9))
        for _ in range(3):
            scene.step()
    scene.scheduler.reset_prefix_cache(reset_connector=True)
    scene.clock.advance(scene.config.kv_transfer_timeout + 1)
    connector.nonsense = {}
    scene.finish()
    assert set(scene.reasons) == set(scene.requests)
    return scene


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("load_steps", [0, 2])
@pytest.mark.parametrize(
    ("method", "number"),
    [(method, number) for method, answers in NONSENSE.items() for number in range(len(answers))],
)
def test_whatever_a_connector_answers_all_end_as_they_should(method, number, load_steps):
    connector = Lying(4, load_steps=load_steps, send_steps=2)
    run_with_lies(connector, method, NONSENSE[method][number]).check_naive()


@pytest.mark.parametrize("load_steps", [0, 2])
@pytest.mark.parametrize("count", BOUNDLESS, ids=str)
def test_a_connector_that_offers_what_is_not_there_keeps_nobody_from_ending(count, load_steps):
    connector = Lying(4, load_steps=load_steps)
    run_with_lies(connector, "get_num_new_matched_tokens", (count, load_steps > 0))


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("load_steps", [0, 2])
@pytest.mark.parametrize("number", range(len(NEWS)))
def test_whatever_the_worker_side_reports_all_end_as_they_should(number, load_steps):
    connector = Lying(4, load_steps=load_steps, send_steps=2)
    connector_output = fake_runner.FakeRunner.connector_output

    def lying(runner, plan, failed):
        output = connector_output(runner, plan, failed)
        silent = [field for field in dataclasses.fields(output) if not getattr(output, field.name)]
        return dataclasses.replace(output, **{field.name: NEWS[number] for field in silent})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fake_runner.FakeRunner, "connector_output", lying)
        run_with_lies(connector, "reset", True).check_naive()


def test_a_report_of_another_type_is_nothing(caplog):
    scene = Scene(connector=FaultyConnector(4))
    scene.add("a", range(9))
    plan = scene.plan()
    computed = dataclasses.replace(scene.compute(plan), kv_connector_output="nothing")
    scene.apply(plan, computed)
    scene.finish()
    scene.check_naive()
    assert "has reported str" in caplog.text


def test_a_connector_that_never_knows_is_not_waited_for_longer_than_for_a_load(caplog):
    connector = FaultyConnector(4)
    connector.get_num_new_matched_tokens = lambda *_: (None, True)
    scene = Scene(connector=connector)
    scene.add("a", range(9))
    for _ in range(3):
        assert not scene.step()
    scene.clock.advance(scene.config.kv_transfer_timeout + 1)
    assert scene.step() == {"a": 9}
    scene.finish()
    scene.check_naive()
    assert "has not said" in caplog.text


def test_blocks_that_nobody_loaded_cannot_fail(caplog):
    scene = Scene(connector=FaultyConnector(4), kv_load_failure="fail")
    scene.add("a", range(9), max_tokens=8)
    while scene.scheduler.has_unfinished_requests():
        plan = scene.plan()
        output = KVConnectorOutput(failed_block_ids=frozenset(range(16)))
        scene.apply(plan, dataclasses.replace(scene.compute(plan), kv_connector_output=output))
    assert scene.scheduler.make_stats().num_preemptions == 0
    scene.check_naive()
    assert "that it was not asked to load" in caplog.text
