"""The times of a request: where they are divided, and that none is absurd whatever clocks and engines do."""

from __future__ import annotations

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from quire.request_output import CompletionOutput, RequestOutput
from quire.server.metrics import request_timer
from quire.server.metrics.registry import BulkHistogram, Metrics
from quire.server.metrics.request_timer import RequestTimer
from quire.server.tenancy.metrics import TenantFigures
from quire.status import FinishReason


class Timed:
    """A timer on a clock that a test sets."""

    def __init__(self, monkeypatch, num_sequences: int = 1) -> None:
        self.now = 100.0
        monkeypatch.setattr(request_timer, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        self.metrics = Metrics("fake", 16)
        self.timer = RequestTimer(self.metrics, TenantFigures(), num_sequences)

    def see(self, now: float, *lengths: int, scheduled: float | None = None, finished: bool = False) -> None:
        self.now = now
        reason = FinishReason.LENGTH if finished else None
        completions = [
            CompletionOutput(index, "", [7] * length, finish_reason=reason)
            for index, length in enumerate(lengths)
        ]
        self.timer.observe(
            RequestOutput(
                "r", None, [1, 2, 3], completions, first_scheduled_time=scheduled, finished=finished
            )
        )

    def values(self) -> dict[str, float]:
        text = self.metrics.exposition().decode()
        families = list(text_string_to_metric_families(text))
        return {one.name: one.value for family in families for one in family.samples if not one.labels}


def sums(values: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Return count and sum of the times."""
    names = {
        name.removesuffix("_sum")
        for name in values
        if name.startswith("quire_") and name.endswith("_seconds_sum")
    }
    return {
        name.removeprefix("quire_").removesuffix("_seconds"): (values[f"{name}_count"], values[f"{name}_sum"])
        for name in names
    }


def test_the_time_of_a_request_is_divided_into_three(monkeypatch):
    timed = Timed(monkeypatch, num_sequences=2)
    timed.see(104, 1, 0, scheduled=101)
    timed.see(105, 2, 1, scheduled=101)
    timed.see(109, 4, 2, scheduled=101)
    timed.see(110, 4, 2, scheduled=101, finished=True)
    values = timed.values()
    assert sums(values) == {
        "queue_time": (1, 1),
        "prefill_time": (1, 3),
        "time_to_first_token": (1, 4),
        "decode_time": (1, 5),
        "inference_time": (1, 8),
        "request_duration": (1, 10),
        "inter_token_latency": (4, 1 + 2 + 2 + 4),
        "time_per_output_token": (2, 5 / 3 + 4),
    }
    assert values["quire_request_prompt_tokens_sum"] == 3
    assert values["quire_request_generation_tokens_count"] == 2
    assert values["quire_request_generation_tokens_sum"] == values["quire_generation_tokens_total"] == 6


def test_a_request_that_ends_without_a_token_has_an_end_and_no_parts(monkeypatch):
    timed = Timed(monkeypatch)
    timed.see(103, 0, scheduled=101, finished=True)
    found = sums(timed.values())
    assert {name for name, (count, _) in found.items() if count} == {"request_duration"}
    assert found["request_duration"] == (1, 3)


def test_tokens_that_come_together_have_no_time_between_them(monkeypatch):
    timed = Timed(monkeypatch)
    timed.see(104, 5, scheduled=101, finished=True)
    found = sums(timed.values())
    assert found["decode_time"] == (1, 0)
    assert found["time_per_output_token"] == found["inter_token_latency"] == (0, 0)


@given(
    steps=st.lists(st.tuples(st.floats(0, 1e4), st.integers(0, 3)), min_size=1, max_size=6),
    scheduled=st.none() | st.floats(-1e9, 1e9),
)
def test_no_time_is_negative_and_the_parts_add_up_whatever_the_engines_clock_says(steps, scheduled):
    with pytest.MonkeyPatch.context() as patch:
        timed = Timed(patch)
        length = 0
        for number, (wait, num_new) in enumerate(steps, 1):
            length += num_new
            timed.see(timed.now + wait, length, scheduled=scheduled, finished=number == len(steps))
        found = sums(timed.values())
    assert all(total >= 0 for _, total in found.values())
    assert found["request_duration"] == (1, pytest.approx(timed.now - 100))
    first = found["time_to_first_token"]
    assert first[0] == (length > 0)
    assert found["queue_time"][0] == found["inference_time"][0] == (length > 0 and scheduled is not None)
    if length and scheduled is not None:
        assert found["queue_time"][1] + found["prefill_time"][1] == pytest.approx(first[1])
        parts = found["prefill_time"][1] + found["decode_time"][1]
        assert found["inference_time"][1] == pytest.approx(parts)
    if length:
        assert found["inter_token_latency"][1] == pytest.approx(found["decode_time"][1])
        assert first[1] + found["decode_time"][1] <= found["request_duration"][1] + 1e-6


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 9.0]), st.integers(1, 3)), max_size=20))
def test_a_histogram_in_bulk_says_what_prometheus_clients_says(observations):
    mine, theirs = CollectorRegistry(), CollectorRegistry()
    bulk = BulkHistogram("x_seconds", "Seconds.", buckets=(0.5, 1, 2.5), registry=mine)
    official = Histogram("x_seconds", "Seconds.", buckets=(0.5, 1, 2.5), registry=theirs)
    for value, count in observations:
        bulk.observe(value, count)
        for _ in range(count):
            official.observe(value)
    [family] = mine.collect()
    assert isinstance(family, HistogramMetricFamily)
    expected = generate_latest(theirs).decode().splitlines()
    assert generate_latest(mine).decode().splitlines() == [one for one in expected if "_created" not in one]
