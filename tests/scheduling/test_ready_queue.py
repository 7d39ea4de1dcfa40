from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from policy_requests import Arrivals, run_to

from counted_lines import num_lines
from held import num_held
from quire.config import SchedulerConfig
from quire.scheduling.accounts.ready_queue import ReadyQueue
from quire.scheduling.policies import ORDERS
from quire.scheduling.policies.order import LongestPrefix
from quire.status import RequestStatus
from unmutated import UNMUTATED


class SmallWindow(LongestPrefix):
    WINDOW = 4
    MAX_LANES = 2


class QueueMachine(RuleBasedStateMachine):
    """The queue against a list that is sorted each time: the best of the lanes' firsts.

    Beside it are the lines of the flows, of which each has one request that came last to a place.
    """

    order_name: object = "fcfs"

    @initialize(ageing=st.sampled_from([0.0, 5.0]))
    def build(self, ageing):
        self.cached: dict[str, int] = {}
        self.order = ORDERS.build(
            self.order_name,
            config=SchedulerConfig(priority_ageing=ageing, block_size=2),
            find_cached=lambda request: self.cached.get(request.request_id, 0),
        )
        self.queue = ReadyQueue(self.order, lambda request: self.arrivals.take_place(request, self.now))
        self.firsts: dict[tuple, object] = {}  # by flow, priority and tenant
        self.lines: dict[tuple, list] = {}
        self.arrivals = Arrivals()
        self.now = 0.0
        self.waiting: list[tuple] = []  # lane, lane key, request
        self.running: list = []

    def push(self, request):
        is_new = not request.has_had_place
        self.queue.push(request)
        key = self.line_of(request)
        if is_new and key in self.firsts:
            self.lines[key].append(request)
            return
        if is_new:
            self.firsts[key] = request
            self.lines[key] = []
        self.place(request)

    @staticmethod
    def line_of(request):
        return request.flow, request.priority, request.tenant

    def place(self, request):
        self.waiting.append((self.order.lane(request), self.order.lane_key(request), request))

    def all_waiting(self):
        return [place[2] for place in self.waiting] + [one for line in self.lines.values() for one in line]

    def expected_head(self):
        firsts = {}
        for lane, key, request in sorted(self.waiting, key=lambda place: place[1], reverse=True):
            firsts[lane] = (key, request)
        return min((request for _, request in firsts.values()), key=self.order.key, default=None)

    def drop(self, request):
        key = self.line_of(request)
        line = self.lines.get(key, [])
        if request in line:
            line.remove(request)
            self.queue.remove(request.request_id)
            return
        self.waiting = [place for place in self.waiting if place[2] is not request]
        is_first = self.firsts.get(key) is request
        following = min(line, key=lambda other: other.arrival) if is_first and line else None
        self.queue.remove(request.request_id)
        if following is not None:
            line.remove(following)
            self.firsts[key] = following
            assert following.queued_time == self.now
            self.place(following)
        elif is_first:
            del self.firsts[key], self.lines[key]

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        tenant=st.sampled_from("abc"),
        priority=st.integers(-1, 2),
        wait=st.floats(0, 10),
        flow=st.sampled_from(["", "", "x", "y"]),
    )
    def arrive(self, prompt, tenant, priority, wait, flow):
        self.now += wait
        fields = {"tenant": tenant, "priority": priority, "at": self.now}
        self.push(self.arrivals.request(prompt=prompt, flow=flow, **fields))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), num_cached=st.integers(0, 4))
    def cache(self, data, num_cached):
        request = data.draw(st.sampled_from(self.waiting))[2]
        self.cached[request.request_id] = min(num_cached, request.num_prompt_tokens - 1)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data):
        self.drop(data.draw(st.sampled_from(self.all_waiting())))

    @precondition(lambda self: self.waiting)
    @rule()
    def admit(self):
        request = self.queue.head()
        self.drop(request)
        self.order.admitted(request)
        request.status = RequestStatus.RUNNING
        self.running.append(request)

    @precondition(lambda self: self.waiting)
    @rule(count=st.integers(1, 3))
    def pass_over(self, count):
        """Some are put off, and return to their places: the order has not heard of it."""
        keys = {request.request_id: self.order.key(request) for _, _, request in self.waiting}
        for _ in range(min(count, len(self.waiting))):
            self.queue.pass_over(self.queue.head().request_id)
        self.queue.restore()
        assert keys == {request.request_id: self.order.key(request) for _, _, request in self.waiting}

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_output=st.integers(0, 300), preempt=st.booleans())
    def leave(self, data, num_output, preempt):
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        status = RequestStatus.PREEMPTED if preempt else RequestStatus.FINISHED_STOPPED
        self.order.left(run_to(request, num_output, status))
        if preempt:
            self.push(request)

    @invariant()
    def agrees(self):
        if not hasattr(self, "queue"):
            return
        requests = self.all_waiting()
        assert all(self.queue.is_in_line(one.request_id) for line in self.lines.values() for one in line)
        assert all(self.queue.num_in_line(self.firsts[key]) == len(self.lines[key]) for key in self.firsts)
        assert self.queue.head() is self.expected_head()
        assert len(self.queue) == len(requests)
        assert set(self.queue) == set(requests)
        assert self.queue.num_tokens == sum(request.num_tokens for request in requests)
        assert all(self.queue.get(request.request_id) is request for request in requests)


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("order", [*ORDERS.known, SmallWindow])
def test_the_queue_agrees_with_a_sorted_list(order):
    machine = type("Machine", (QueueMachine,), {"order_name": order})
    machine.TestCase.settings = settings(backend=UNMUTATED, max_examples=15, stateful_step_count=30)
    machine.TestCase().runTest()


@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_how_many_go_before_is_what_the_keys_say(order):
    order = ORDERS.build(order, config=SchedulerConfig(), find_cached=lambda request: 0)
    queue, arrivals = ReadyQueue(order), Arrivals()
    requests = [
        arrivals.request(5, tenant="abcd"[index % 4], priority=index % 3, at=0.1 * index)
        for index in range(24)
    ]
    for request in requests:
        queue.push(request)
    for _ in range(5):
        first = queue.head()
        queue.remove(first.request_id)
        order.admitted(first)
        requests.remove(first)
    for request in requests:
        assert queue.num_before(request) == sum(order.key(other) < order.key(request) for other in requests)


def test_the_head_costs_the_same_however_many_tenants_wait():
    costs = []
    for num_tenants in (100, 5000):
        order = ORDERS.build("fair", config=SchedulerConfig(), find_cached=lambda request: 0)
        queue, arrivals = ReadyQueue(order), Arrivals()
        for number in range(num_tenants):
            queue.push(arrivals.request(5, tenant=f"t{number}"))
        queue.head()

        def serve(queue=queue, order=order):
            for _ in range(20):
                request = queue.head()
                queue.remove(request.request_id)
                order.admitted(request)

        costs.append(num_lines(serve))
    assert costs[1] < 1.2 * costs[0]


def test_where_one_stands_among_many_is_not_looked_up_for_each_of_them():
    lookups = []
    order = ORDERS.build(
        "longest-prefix", config=SchedulerConfig(), find_cached=lambda request: len(lookups.append(0) or [])
    )
    queue, arrivals = ReadyQueue(order), Arrivals()
    requests = [arrivals.request(prompt=[number % 300] * 16) for number in range(3000)]
    for request in requests:
        queue.push(request)
    lookups.clear()
    assert 0 < queue.num_before(requests[-1]) < 3000
    assert len(lookups) <= 3 * LongestPrefix.MAX_LANES


@pytest.mark.parametrize("order", [*ORDERS.known, SmallWindow])
def test_what_was_preempted_goes_first(order):
    order = ORDERS.build(order, config=SchedulerConfig(), find_cached=lambda request: 0)
    queue = ReadyQueue(order)
    arrivals = Arrivals()
    requests = [arrivals.request(5, tenant=tenant) for tenant in "aabb"]
    for request in requests:
        queue.push(request)
    first = queue.head()
    queue.remove(first.request_id)
    order.admitted(first)
    order.left(run_to(first, 1000, RequestStatus.PREEMPTED))
    queue.push(first)
    assert queue.head() is first


def test_a_request_that_does_not_wait_is_not_found():
    queue = ReadyQueue(ORDERS.build("fcfs", config=SchedulerConfig(), find_cached=lambda request: 0))
    assert queue.head() is None
    assert queue.get("r0") is None
    assert "r0" not in queue
    with pytest.raises(KeyError):
        queue.remove("r0")


@pytest.mark.parametrize("order", ORDERS.known)
def test_the_queue_does_not_grow_with_what_has_passed_through_it(order):
    queue = ReadyQueue(ORDERS.build(order, config=SchedulerConfig(), find_cached=lambda request: 0))
    arrivals = Arrivals()
    queue.push(arrivals.request(tenant="stays"))
    held = num_held(queue)
    for number in range(5000):
        request = arrivals.request(prompt=[number], tenant=f"t{number % 10}")
        queue.push(request)
        queue.remove(request.request_id)
    assert len(queue) == 1
    assert num_held(queue) <= held + 1000


def test_a_flow_takes_turns_with_requests_that_come_later():
    arrivals = Arrivals()
    queue = ReadyQueue(
        ORDERS.build("fcfs", config=SchedulerConfig(), find_cached=lambda request: 0),
        lambda request: arrivals.take_place(request, 0.0),
    )
    for _ in range(3):
        queue.push(arrivals.request(flow="large"))
    for name in "ab":
        queue.push(arrivals.request(flow=name))
    served = []
    while (head := queue.head()) is not None:
        served.append(head.flow)
        queue.remove(head.request_id)
        if head.flow == "a":
            queue.push(arrivals.request(flow="c"))
    assert served == ["large", "a", "b", "large", "c", "large"]


def test_what_has_had_its_place_does_not_line_up_again():
    arrivals = Arrivals()
    queue = ReadyQueue(
        ORDERS.build("fcfs", config=SchedulerConfig(), find_cached=lambda request: 0),
        lambda request: arrivals.take_place(request, 0.0),
    )
    requests = [arrivals.request(flow="large") for _ in range(3)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[0].request_id)
    queue.push(run_to(requests[0], 1, RequestStatus.PREEMPTED))
    assert queue.head() is requests[0]
    assert queue.is_in_line(requests[2].request_id)
    assert not queue.is_in_line(requests[1].request_id)
