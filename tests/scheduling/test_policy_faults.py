"""Policies that raise or return nonsense: the default takes their place, and no request notices."""

from __future__ import annotations

import pytest
from mixed_policies import METHODS, Fault, misbehaving
from scene import Scene

from quire.scheduling.policies.order import FirstComeFirstServed

BUILT_IN = {
    "policy": ["priority", "fair"],
    "admission": ["past-future"],
    "victim": ["fewest-computed"],
    "prefix_retention": ["lfu"],
}
CALLS = [
    (field, name, method)
    for field, (_, asked, told) in METHODS.items()
    for name in BUILT_IN[field]
    for method in asked + told
]
ANSWERS = [(field, method) for field, (_, asked, _) in METHODS.items() for method in asked]


class Case:
    """A scene that uses every method of the policy, which fails at the call that is told."""

    def __init__(self, field: str, name: str, fault: Fault) -> None:
        registry, asked, told = METHODS[field]
        policy = misbehaving(registry.class_of(name), asked, told)
        scene = self.scene = Scene(num_blocks=9, max_num_seqs=3, **{field: policy})
        for number in range(7):
            scene.add(f"{number}", [number % 4] * 9, tenant=f"tenant-{number % 3}", max_tokens=6 + number % 5)
            scene.step()
            if number == 2:
                policy.fault = fault
        scene.finish()
        scene.check_naive()


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize(("field", "name", "method"), CALLS)
def test_a_policy_that_raises_is_replaced(field, name, method, caplog):
    case = Case(field, name, Fault(method, ZeroDivisionError("no luck")))
    assert case.scene.scheduler.make_stats().num_replaced_policies == 1
    assert f"SchedulerConfig.{field}" in caplog.text
    assert "no luck" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("nonsense", [(), -1, 10**9, "text"])
@pytest.mark.parametrize(("field", "method"), ANSWERS)
def test_whatever_a_policy_returns_all_requests_end_as_they_should(field, method, nonsense):
    Case(field, BUILT_IN[field][-1], Fault(method, nonsense))


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("field", "method", "nonsense"),
    [
        ("policy", "key", None),
        ("policy", "key", ("text",)),
        ("policy", "running_key", (float("nan"), 1)),
        ("policy", "lane", []),
        ("policy", "changed_lanes", 7),
        ("admission", "admits", None),
        ("admission", "admits", 1),
        ("victim", "choose", -1),
        ("victim", "choose", 2),
        ("victim", "choose", 0.0),
        ("prefix_retention", "rank", "text"),
        ("prefix_retention", "rank", (1, 2, 3)),
        ("prefix_retention", "rank", float("nan")),
    ],
)
def test_an_answer_of_the_wrong_kind_replaces_a_policy(field, method, nonsense, caplog):
    case = Case(field, BUILT_IN[field][-1], Fault(method, nonsense))
    assert case.scene.scheduler.make_stats().num_replaced_policies == 1
    assert f"SchedulerConfig.{field}" in caplog.text


def test_who_waits_stands_in_the_default_order_from_then_on():
    class LastComeFirstServed(FirstComeFirstServed):
        reads_priority = False

        def lane(self, request):
            return request.arrival % 2

        def key(self, request):
            if request.request_id == "7":
                raise ZeroDivisionError
            return (-request.arrival,)

    scene = Scene(policy=LastComeFirstServed, max_num_seqs=1)
    for number in range(7):
        scene.add(f"{number}", [number] * 3, max_tokens=1)
    assert [*scene.step()] == ["6"]
    scene.add("7", [7] * 3, max_tokens=1)
    started = [name for _ in range(7) for name in scene.step()]
    assert started == [*"0123457"]


def test_built_in_policies_have_no_guard():
    from quire.scheduling.policies import ADMISSIONS, ORDERS, VICTIMS

    scheduler = Scene().scheduler
    assert ORDERS.has(scheduler.accounts.order)
    assert ADMISSIONS.has(scheduler._slots.admission_policy)
    assert VICTIMS.has(scheduler._running_phase.victim_policy)
