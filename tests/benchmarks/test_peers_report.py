"""What the tables say of given figures."""

from __future__ import annotations

import io

import pytest
from peers_report import best_peer, disagreements, failures, rates, ratio, tables
from peers_workload import WORKLOADS
from rich.console import Console

pytestmark = pytest.mark.representative


def engine(*start_seconds: float, peak_bytes: int = 0, failure: str = ""):
    return {
        "start_seconds": list(start_seconds),
        "peak_bytes": peak_bytes,
        "versions": {},
        "failure": failure,
    }


@pytest.fixture
def results():
    figures = {
        "machine": {"bandwidth": 3e10, "gemm_rate": {"bf16": 4e11, "int8": 8e11}},
        "engines": {
            "quire": engine(4.0, 2.0, peak_bytes=4_000_000_000),
            "vllm": engine(failure="no compiler"),
            "openvino": engine(3.0, 1.0, peak_bytes=5_000_000_000),
        },
        "workloads": {
            "1x32/32": {
                "limit_seconds": 1.0,
                "seconds": {"quire": [2.0, 1.6], "openvino": [3.2, 4.0]},
                "same_first_tokens": {"quire": 16, "openvino": 7},
                "first_tokens": {"quire": 16, "openvino": 16},
            }
        },
    }
    return {"shape": "0.6b", "precisions": {"bf16": figures}}


def lines_of(results) -> list[list[str]]:
    """All rows of all tables, as words."""
    console = Console(width=200, file=io.StringIO())
    with console.capture() as capture:
        console.print(*tables(results))
    return [line.split() for line in capture.get().replace("│", " ").splitlines()]


def test_a_rate_is_that_of_the_best_round():
    workload = WORKLOADS["8x256/1"]
    assert rates(workload, {"quire": [4.0, 2.0], "vllm": []}) == {"quire": 8 * 257 / 2.0}


def test_the_best_peer_is_never_quire():
    assert best_peer({"quire": 9.0, "vllm": 1.0, "openvino": 2.0}) == ("openvino", 2.0)
    assert best_peer({"quire": 0.1, "vllm": 1.0, "openvino": 2.0}, least=True) == ("vllm", 1.0)
    assert best_peer({"quire": 1.0, "quire-int8": 2.0}) is None


def test_a_ratio_needs_both_sides():
    assert ratio({"quire": 3.0, "vllm": 2.0}) == "1.50x"
    assert ratio({"vllm": 2.0}) == "-"
    assert ratio({"quire": 3.0}) == "-"


def test_tables_hold_rates_ratios_shares_starts_and_memory(results):
    lines = lines_of(results)
    assert ["1x32/32", "20.0", "-", "10.0", "2.00x", "32.0", "62%", "31%"] in lines
    assert ["first", "start,", "s", "4.00", "-", "3.00", "1.33x"] in lines
    assert ["next", "start,", "s", "2.00", "-", "1.00", "2.00x"] in lines
    assert ["peak", "memory,", "GB", "4.00", "-", "5.00", "0.80x"] in lines


def test_four_bits_are_compared_with_eight_too(results):
    figures = results["precisions"]["int4"] = results["precisions"].pop("bf16")
    figures["engines"]["quire-int8"] = engine(3.0, 3.0)
    figures["workloads"]["1x32/32"]["seconds"]["quire-int8"] = [2.0]
    assert ["1x32/32", "20.0", "-", "10.0", "16.0", "2.00x", "1.25x", "32.0", "62%", "31%"] in lines_of(
        results
    )


def test_failures_and_disagreements_are_told(results):
    assert list(failures(results)) == ["vLLM in bf16: no compiler"]
    assert list(disagreements(results)) == ["OpenVINO in bf16: only 7 of 16 first tokens agree"]


@pytest.mark.parametrize(("same", "compared"), [(0, 15), (8, 16)])
def test_few_tokens_or_half_of_them_are_no_disagreement(results, same, compared):
    workload = results["precisions"]["bf16"]["workloads"]["1x32/32"]
    workload["same_first_tokens"]["openvino"] = same
    workload["first_tokens"]["openvino"] = compared
    assert list(disagreements(results)) == []
