"""How many engines there should be, by what they report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.ray.autoscaling import LoadPolicy

IDLE = {"queued_prompt_tokens": 0.0, "oldest_wait_seconds": 0.0, "kv_cache_usage": 0.0}


def wanted(*replicas: dict[str, float], target: int = 0, **targets: float) -> int:
    """The wanted number of engines, given what each of them reports."""
    metrics: dict[str, dict[int, float]] = {}
    for number, reported in enumerate(replicas):
        for name, value in reported.items():
            metrics.setdefault(name, {})[number] = value
    context: Any = SimpleNamespace(
        aggregated_metrics=metrics, current_num_replicas=len(replicas), target_num_replicas=target
    )
    number_wanted, state = LoadPolicy(**targets)(context)
    assert state == {}
    return number_wanted


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ([IDLE] * 4, 0),  # Ray raises it to the minimum
        ([IDLE | {"kv_cache_usage": 0.7}] * 4, 4),
        ([IDLE | {"kv_cache_usage": 0.35}] * 4, 2),
        ([IDLE | {"kv_cache_usage": 0.71}] * 4, 5),
        ([IDLE | {"queued_prompt_tokens": 6144.0}] * 4, 6),
        ([IDLE | {"queued_prompt_tokens": 16384.0}, IDLE, IDLE, IDLE], 4),  # others can take them
        ([IDLE | {"oldest_wait_seconds": 7.5}, IDLE], 3),  # none should wait so long
        ([IDLE | {"oldest_wait_seconds": 7500.0}, IDLE], 4),  # at most twice as many at once
        ([IDLE | {"kv_cache_usage": 0.7, "queued_prompt_tokens": 9.0}] * 2, 2),
    ],
)
def test_the_largest_load_decides(replicas: list[dict[str, float]], expected: int) -> None:
    assert wanted(*replicas) == expected


def test_targets_can_be_set() -> None:
    assert wanted(IDLE | {"kv_cache_usage": 0.9}, target_kv_usage=0.9) == 1
    assert wanted(IDLE | {"queued_prompt_tokens": 10.0}, target_queued_tokens=5.0) == 2
    assert wanted(IDLE | {"oldest_wait_seconds": 1.5}, target_wait=1.0) == 2


def test_without_reports_nothing_changes() -> None:
    assert wanted({}, {}, target=3) == 3


@pytest.mark.parametrize("name", ["target_queued_tokens", "target_kv_usage", "target_wait"])
def test_a_target_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}"):
        LoadPolicy(**{name: 0.0})
