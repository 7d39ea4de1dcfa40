"""The scheduler's specification, section 2: policies, and the order within a step."""

from __future__ import annotations

import pytest
from conformance import row
from fake_runner import naive_generation
from scene import Scene

from preempting import preempt
from quire.config import SchedulerConfig
from quire.scheduling.policies.admission import AdmissionPolicy
from quire.scheduling.policies.order import QueueOrder
from quire.scheduling.policies.victim import VictimPolicy

# -- policies ----------------------------------------------------------------------------------------------


class LastComeFirstServed(QueueOrder):
    """By arrival, backwards."""

    def key(self, request):
        return (-request.arrival,)


def order_of_service(**settings) -> list[str]:
    scene = Scene(max_num_seqs=1, **settings)
    for name, priority, tenant in (("a", 2, "x"), ("b", 1, "x"), ("c", 1, "y")):
        own = {"priority": priority} if settings.get("policy") == "priority" else {}
        scene.add(name, range(4), max_tokens=1, tenant=tenant, **own)
    scene.finish()
    return list(scene.ends)


@row("policy")
def test_policy_by_name_or_object():
    assert order_of_service() == ["a", "b", "c"]
    assert order_of_service(policy="priority") == ["b", "c", "a"]
    assert order_of_service(policy="fair") == ["a", "c", "b"]
    assert order_of_service(policy=f"{__name__}.LastComeFirstServed") == ["c", "b", "a"]
    own = LastComeFirstServed(config=SchedulerConfig(), find_cached=lambda request: 0)
    assert order_of_service(policy=own) == ["c", "b", "a"]


@row("policy")
def test_the_longest_cached_prefix_first():
    scene = Scene(max_num_seqs=1, policy="longest-prefix")
    scene.add("warm", range(8), max_tokens=1)
    scene.finish()
    scene.add("cold", range(20, 28), max_tokens=1)
    scene.add("hit", range(9), max_tokens=1)
    scene.finish()
    assert list(scene.ends) == ["warm", "hit", "cold"]


@row("priority_ageing")
@pytest.mark.parametrize(("ageing", "first"), [(10.0, "old"), (0.0, "urgent")])
def test_seconds_of_waiting_make_up_for_a_level_of_priority(ageing, first):
    scene = Scene(max_num_seqs=1, policy="priority", priority_ageing=ageing)
    scene.add("old", range(4), max_tokens=1, priority=1)
    scene.clock.advance(11)
    scene.add("urgent", range(4), max_tokens=1, priority=0)
    scene.finish()
    assert next(iter(scene.ends)) == first


class OneAtATime(AdmissionPolicy):
    """Nobody beside anybody."""

    def admits(self, candidate, memory):
        return not len(memory.running.num_tokens)


@row("admission")
def test_admission_by_name_or_object():
    def running_together(**settings) -> int:
        scene = Scene(num_blocks=16, max_num_seqs=8, **settings)
        for number in range(4):
            scene.add(f"r{number}", range(4), max_tokens=20)
        return len(scene.step())

    assert running_together() == 4, "their prompts fit"
    assert running_together(admission="past-future") == 2, "6 blocks each at their peak, as far as is known"
    assert running_together(admission=f"{__name__}.OneAtATime") == 1
    assert running_together(admission=OneAtATime(config=SchedulerConfig())) == 1


class Second(VictimPolicy):
    """The second in the order of service."""

    def choose(self, running):
        return 0


@row("victim", "the victim is the newest (FCFS) or the worst by priority and arrival")
@pytest.mark.parametrize(
    ("victim", "expected"),
    [("last", "c"), ("fewest-computed", "b"), (f"{__name__}.Second", "b"), (Second(), "b")],
)
def test_victim_by_name_or_object(victim, expected):
    scene = Scene(num_blocks=9, victim=victim, enable_prefix_caching=False)
    scene.add("a", range(12), max_tokens=8)
    scene.add("b", range(4), max_tokens=8)
    scene.add("c", range(8), max_tokens=8)
    while not (plan := scene.plan()).preempted_req_ids:
        scene.apply(plan)
    assert plan.preempted_req_ids[:1] == [expected]
    scene.apply(plan)
    scene.finish()
    scene.check_naive()


@row("prefix_retention", "retention by LRU", "retention by priority")
@pytest.mark.parametrize(
    ("retention", "survivor"), [("lru", "recent"), ("lfu", "often found"), ("priority", "important")]
)
def test_prefix_retention_by_name(retention, survivor):
    scene = Scene(num_blocks=9, prefix_retention=retention, policy="priority", priority_ageing=0.0)
    prompts = {"often found": range(9), "important": range(10, 19), "recent": range(20, 29)}
    for name in ("often found", "often found", "often found", "important", "recent"):
        scene.add(name, prompts[name], max_tokens=1, priority=-1 if name == "important" else 5)
        scene.finish()
    scene.add("large", range(30, 57), max_tokens=1, priority=5)
    scene.finish()
    for name, prompt in prompts.items():
        request = scene.add(name, prompt, max_tokens=1)
        assert scene.scheduler.accounts.kv.count_cached_tokens(request) == (8 if name == survivor else 0), (
            name
        )
        scene.scheduler.finish_requests(name, request.status.FINISHED_ABORTED)


# -- order within a step -----------------------------------------------------------------------------------


@row("running first, then resumed, then waiting")
def test_running_then_resumed_then_waiting():
    scene = Scene(num_blocks=8, enable_prefix_caching=False)
    scene.add("runs", range(6), max_tokens=6)
    scene.add("resumes", range(20, 26), max_tokens=12)
    scene.step()
    preempt(scene.scheduler, scene.runner.slot_of["resumes"])
    scene.add("waits", range(3), max_tokens=2)
    plan = scene.plan()
    assert plan.request_ids == ["runs", "resumes", "waits"]
    scene.apply(plan)
    scene.finish()
    scene.check_naive()


@row("if anything was preempted, nothing new is admitted")
def test_a_step_that_preempts_admits_nobody():
    scene = Scene(num_blocks=6, enable_prefix_caching=False)
    scene.add("old", range(8), max_tokens=12)
    scene.add("new", range(20, 28), max_tokens=12)
    scene.step()
    scene.add("small", [1], max_tokens=1)
    while not (plan := scene.plan()).preempted_req_ids:
        assert "small" not in plan.request_ids
        scene.apply(plan)
    assert plan.request_ids == ["old"]
    scene.apply(plan)
    scene.finish()


@row("a preempted request is recomputed and goes to the front of its priority")
@pytest.mark.parametrize(("caching", "tokens"), [(False, 10), (True, 2)])
def test_a_preempted_request_is_recomputed_prefix_cache_permitting(caching, tokens):
    scene = Scene(enable_prefix_caching=caching, max_num_seqs=1)
    scene.add("a", range(8), max_tokens=12)
    scene.step()
    scene.step()
    scene.add("behind", range(3))
    preempt(scene.scheduler, scene.runner.slot_of["a"])
    assert scene.step() == {"a": tokens}
    scene.finish()
    scene.check_naive()


@row("the victim is the newest (FCFS) or the worst by priority and arrival")
@row("a priority victim's partial plan is rolled back exactly")
def test_a_priority_victims_partial_plan_is_rolled_back():
    scene = Scene(num_blocks=8, policy="priority", enable_prefix_caching=False, max_num_batched_tokens=12)
    scene.add("urgent", range(10), max_tokens=18, priority=0)
    scene.add("middle", range(20, 24), max_tokens=9, priority=1)
    scene.add("worst", range(30, 34), max_tokens=9, priority=2)
    preempted = []
    while scene.scheduler.has_requests():
        before = scene.scheduler.make_stats().num_free_blocks
        plan = scene.plan()
        assert not set(plan.preempted_req_ids) & set(plan.request_ids)
        assert plan.total_num_scheduled_tokens == sum(plan.num_scheduled_tokens.values())
        assert scene.scheduler.make_stats().num_free_blocks <= max(before, 8)
        preempted += plan.preempted_req_ids
        scene.apply(plan)
    assert preempted[0] == "worst"
    assert "urgent" not in preempted
    scene.check_naive()
    assert scene.outputs["urgent"] == naive_generation(list(range(10)), 18, set())
