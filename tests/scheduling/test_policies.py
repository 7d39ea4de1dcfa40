from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_requests import Arrivals, run_to

from quire.config import EngineConfig, SchedulerConfig
from quire.engine.messages import EngineStart, decode_start, encode_start
from quire.errors import ConfigError
from quire.kv.blocks.retention import RETENTIONS, RetentionPolicy, idle_blocks
from quire.limits import limits_of
from quire.scheduling.accounts.ready_queue import ReadyQueue
from quire.scheduling.policies import ADMISSIONS, ORDERS, VICTIMS, AdmissionPolicy, QueueOrder, VictimPolicy
from quire.scheduling.policies.victim import Last, RunningView
from quire.status import RequestStatus

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
POLICIES = {
    name: limits.choices for name, limits in limits_of(SchedulerConfig).items() if limits.takes_dotted_names
}
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def order(choice, *, find_cached=lambda request: 0, **fields):
    return ORDERS.build(choice, config=SchedulerConfig(**fields), find_cached=find_cached)


# -- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("registry", "field"), [(ORDERS, "policy"), (ADMISSIONS, "admission"), (VICTIMS, "victim")]
)
def test_the_names_are_those_of_the_configuration(registry, field):
    assert tuple(registry.known) == POLICIES[field]
    assert registry.field == f"SchedulerConfig.{field}"


@pytest.mark.parametrize("registry", [ORDERS, RETENTIONS])
def test_only_the_priority_policies_read_priorities(registry):
    readers = [name for name, policy in registry.known.items() if policy.reads_priority]
    assert readers == ["priority"]


class Unfinished(VictimPolicy):
    pass


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("lst", r"is 'lst'; did you mean 'last'"),
        ("no.such.module.Last", r"cannot be imported: ModuleNotFoundError: No module named 'no'"),
        (".Last", r"cannot be imported: ValueError"),
        ("quire.scheduling.policies.victim.Lst", r"victim has no 'Lst'; did you mean 'Last'"),
        ("collections.Last", r"but collections has no 'Last'$"),
        ("collections.OrderedDict", r"not a subclass of quire.scheduling.policies.victim.VictimPolicy"),
        ("quire.scheduling.policies.order.Priority", r"not a subclass of .*VictimPolicy"),
        (f"{__name__}.Unfinished", r"which does not define choose"),
        (Unfinished, r"which does not define choose"),
        (3, r"is 3, which is not a subclass"),
        (None, r"is None, which is not a subclass"),
    ],
)
def test_what_is_not_a_policy_is_refused_with_the_reason(choice, message):
    with pytest.raises(ConfigError, match=r"^SchedulerConfig\.victim .*" + message):
        VICTIMS.build(choice)


def test_a_policy_is_found_by_name_by_dotted_name_by_class_and_as_an_object():
    policy = Last()
    assert VICTIMS.build(policy) is policy
    for choice in ("last", "quire.scheduling.policies.victim.Last", Last):
        assert type(VICTIMS.build(choice)) is Last


def test_an_engine_in_this_process_takes_objects_and_another_process_only_names():
    for name in POLICIES:
        config = EngineConfig(scheduler=SchedulerConfig(**{name: Last}))
        with pytest.raises(ConfigError, match=f"SchedulerConfig.{name} is .*give the dotted name"):
            encode_start(EngineStart(config=config, model_path="", module_path=[]))
    config = EngineConfig(scheduler=SchedulerConfig(victim=f"{__name__}.Mine"))
    assert decode_start(encode_start(EngineStart(config, "", []))).config == config


# -- orders --------------------------------------------------------------------------------------------------


def test_with_ageing_a_stream_of_important_requests_cannot_hold_up_the_rest():
    arrivals, queue = Arrivals(), ReadyQueue(order("priority", priority_ageing=60))
    patient = arrivals.request(priority=5)
    queue.push(patient)
    for second in range(1000):
        queue.push(arrivals.request(priority=0, at=float(second)))
        head = queue.head()
        queue.remove(head.request_id)
        if head is patient:
            break
    assert second == pytest.approx(5 * 60, abs=1)


def test_without_ageing_priority_is_strict():
    arrivals, queue = Arrivals(), ReadyQueue(order("priority", priority_ageing=0))
    requests = [arrivals.request(priority=priority, at=1e6 * priority) for priority in (1, 0, 1, -1)]
    for request in requests:
        queue.push(request)
    served = []
    while head := queue.head():
        served.append(head.arrival)
        queue.remove(head.request_id)
    assert served == [3, 1, 0, 2]


def test_the_longest_cached_prefix_goes_first_as_the_cache_stands():
    cached = {}
    arrivals = Arrivals()
    queue = ReadyQueue(order("longest-prefix", find_cached=lambda r: cached.get(r.prompt_token_ids[0], 0)))
    first, second = arrivals.request(prompt=[1, 2, 3]), arrivals.request(prompt=[7, 8, 9])
    for request in (first, second):
        queue.push(request)
    assert queue.head() is first
    cached[7] = 2
    assert queue.head() is second
    cached[1] = 2
    assert queue.head() is first


def test_nobody_is_overtaken_for_ever_for_having_nothing_cached():
    arrivals = Arrivals()
    policy = order("longest-prefix", find_cached=lambda request: request.prompt_token_ids[0])
    queue = ReadyQueue(policy)
    unlucky = arrivals.request(prompt=[0])
    queue.push(unlucky)
    overtaken_by = 0
    while queue.head() is unlucky or overtaken_by < 5 * policy.WINDOW:
        queue.push(arrivals.request(prompt=[5]))
        head = queue.head()
        queue.remove(head.request_id)
        if head is unlucky:
            break
        overtaken_by += 1
    assert overtaken_by == policy.WINDOW - 1


# -- victims -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_victims(num_computed):
    computed = np.array(num_computed, dtype=np.int32)
    running = RunningView(computed + 1, computed, computed + 1)
    assert VICTIMS.build("last").choose(running) == len(num_computed) - 1
    fewest = [index for index, count in enumerate(num_computed) if count == min(num_computed)]
    assert VICTIMS.build("fewest-computed").choose(running) == fewest[-1]


# -- the page ------------------------------------------------------------------------------------------------


def example(name):
    (code,) = [code for code in EXAMPLES if f"class {name}(" in code]
    namespace = {"__name__": "my_policies"}
    exec(compile(code, f"{PAGE.name}: {name}", "exec"), namespace)
    return namespace[name]


def test_each_kind_of_policy_has_an_example_of_under_20_lines():
    kinds = [QueueOrder, AdmissionPolicy, VictimPolicy, RetentionPolicy]
    for kind in kinds:
        codes = [code for code in EXAMPLES if f"({kind.__name__})" in code]
        assert codes, kind
        assert min(len(code.splitlines()) for code in codes) < 20


def test_every_name_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for names in POLICIES.values() for name in names)
    assert all(f"`{field}`" in page for field in POLICIES)


def test_the_example_of_an_order_runs():
    arrivals, queue = Arrivals(), ReadyQueue(order(example("ShortestPrompt")))
    long, short = arrivals.request(3000), arrivals.request(10, at=1.0)
    for request in (long, short):
        queue.push(request)
    assert queue.head() is short


@settings(max_examples=20)
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=20))
def test_the_example_of_an_order_with_lanes_runs(tenants):
    arrivals, policy = Arrivals(), order(example("FewestRunning"))
    queue = ReadyQueue(policy)
    for tenant in tenants:
        queue.push(arrivals.request(tenant=tenant))
    running = []
    while head := queue.head():
        counts = [sum(other.tenant == tenant for other in running) for tenant in {r.tenant for r in queue}]
        assert sum(other.tenant == head.tenant for other in running) == min(counts)
        queue.remove(head.request_id)
        policy.admitted(head)
        running.append(head)
    for request in running:
        policy.left(run_to(request, 1, RequestStatus.FINISHED_STOPPED))
    assert not policy.running


def test_the_example_of_a_victim_policy_runs():
    blocks = np.array([1, 4, 2], dtype=np.int32)
    assert VICTIMS.build(example("MostBlocks")).choose(RunningView(blocks, blocks, blocks)) == 1


def test_the_example_of_a_retention_policy_runs():
    blocks = idle_blocks(example("FoundBefore"), 4)
    blocks.put(np.arange(4, dtype=np.int32), np.array([2, 0, 1, 0], dtype=np.int32), 0)
    assert blocks.evict(4).tolist() == [1, 3, 0, 2]
