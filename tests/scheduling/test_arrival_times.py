"""Requests are served by the times at which they came, in whatever order the scheduler gets them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import SchedulerConfig
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduling import Scheduler
from quire.scheduling.context import SchedulerContext
from quire.status import RequestStatus

NOW = 1000.0
TIMES = st.sampled_from([math.inf, NOW + 5, NOW, NOW - 1, NOW - 2.5, NOW - 3600])


def order_of_service(policy: str, given_times: list[float], priorities: list[int]) -> list[str]:
    """Return the ids in the order in which they run, one at a time."""
    config = SchedulerConfig(policy=policy, max_num_seqs=1, num_kv_blocks=16, priority_ageing=0)
    scheduler = Scheduler(
        config, num_blocks=16, max_model_len=64, context=SchedulerContext(clock=lambda: NOW)
    )
    params = SamplingParams(max_tokens=1, seed=0, temperature=0)
    for index, (at, priority) in enumerate(zip(given_times, priorities, strict=True)):
        request = Request(str(index), [1, 2, 3], params, priority=priority, arrival_time=at)
        scheduler.add_request(request)
        assert request.arrival_time == min(at, NOW)
    served = []
    while scheduler.has_unfinished_requests():
        served += scheduler.schedule().request_ids
        scheduler.finish_requests(served[-1], RequestStatus.FINISHED_STOPPED)
    return served


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TIMES, st.integers(0, 2)), min_size=1, max_size=6))
def test_requests_are_served_by_the_time_that_they_came(policy: str, requests: list[tuple[float, int]]):
    times = [at for at, _ in requests]
    priorities = [priority if policy == "priority" else 0 for _, priority in requests]
    expected = sorted(range(len(times)), key=lambda i: (priorities[i], min(times[i], NOW), i))
    assert order_of_service(policy, times, priorities) == [str(index) for index in expected]
