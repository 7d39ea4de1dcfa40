"""Engines that share KV while a device computes their steps: what is lent has been computed by then."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_kv_peers import PROMPT, answer, check_nothing_is_held, engine, params, prefill

from call_through import call_through
from engine_checks import core_of
from host_choice import HostChoice
from insides import connector_of, peer_parts
from late_steps import compute_late
from quire import LLM
from quire.datadist.loans.loans import Loans
from quire.kv.peers.loan_steps import LoanSteps


@pytest.fixture
def unknown_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return compute_late(monkeypatch)


def late_engine(role: str = "both", **options: Any) -> Any:
    return engine(role, overlap_steps=True, **options)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 48}, {"kv_transports": "tcp", "kv_cache_dtype": "int8"}],
    ids=str,
)
def test_a_prompt_is_computed_here_and_continued_there(
    unknown_tokens: list[int], options: dict[str, Any]
) -> None:
    with late_engine(**options) as llm:
        expected = answer(llm)
    with late_engine("prefill", **options) as first, late_engine("decode", **options) as second:
        assert connector_of(first).works_by_layer is False
        unknown_tokens.clear()
        for _ in range(3):
            transfer = prefill(first)
            assert core_of(first).stats().num_leased_blocks
            assert answer(second, transfer=transfer) == expected
            check_nothing_is_held(first, second)
            assert first.reset_prefix_cache()
            assert second.reset_prefix_cache()
        assert second.stats().num_loaded_tokens == 3 * 322
        assert second.stats().num_failed_loads == 0
    assert sum(unknown_tokens) > 0


def test_several_prompts_are_lent_by_requests_that_go_on(unknown_tokens: list[int]) -> None:
    prompts = [[5 + (start + index) % 90 for index in range(160)] for start in range(3)]
    with late_engine() as llm:
        expected = [answer(llm, prompt) for prompt in prompts]
    with late_engine("prefill", max_num_batched_tokens=48) as first, late_engine("decode") as second:
        outputs = first.generate(
            prompts, params(max_tokens=12), kv_transfer_params={"do_remote_decode": True}
        )
        found = [
            answer(second, prompt, transfer=output.kv_transfer_params)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        assert found == expected
        assert second.stats().num_loaded_tokens == 3 * 159
        check_nothing_is_held(first, second)
    assert sum(unknown_tokens) > 0


@pytest.mark.usefixtures("unknown_tokens")
def test_nothing_is_lent_before_it_is_known_that_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def watched(settle_first: Any, self: LoanSteps) -> None:
        first = self._in_flight[0]
        verdict = getattr(first.failed_ids, "__self__", None)  # None: it was known at once
        told.append(verdict is None or verdict.is_known or first.end.is_reached)
        settle_first(self)

    def noted(end_step: Any, self: Loans, number: int) -> None:
        assert told
        end_step(self, number)

    call_through(monkeypatch, LoanSteps, "_settle_first", watched)
    call_through(monkeypatch, Loans, "end_step", noted)
    with late_engine("prefill", max_num_batched_tokens=48) as llm:
        assert prefill(llm) is not None
    assert told
    assert all(told)


@pytest.mark.usefixtures("unknown_tokens")
def test_a_prompt_whose_logits_are_nan_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    choose, num_calls = HostChoice.choose, itertools.count()

    def poisoned(self: HostChoice, logits: torch.Tensor, *how: Any) -> Any:
        if next(num_calls) == 0:
            logits[0] = float("nan")
        return choose(self, logits, *how)

    with late_engine() as llm:
        expected = answer(llm)
    monkeypatch.setattr(HostChoice, "choose", poisoned)
    with late_engine("prefill") as first, late_engine("decode") as second:
        assert prefill(first) is None
        check_nothing_is_held(first)
        assert answer(second, transfer=prefill(first)) == expected
        assert second.stats().num_loaded_tokens == 322
        check_nothing_is_held(first, second)


@pytest.mark.parametrize("moment", ["begin_step", "end_step"])
def test_who_gives_a_prompt_back_before_its_request_has_ended_was_lent_it(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    at_that_moment = getattr(Loans, moment)

    def given_back_then(self: Loans, number: int, *blocks: Any) -> None:
        at_that_moment(self, number, *blocks)
        given_back.append(self._by_number[number].name)
        self.release(given_back[-1:])

    given_back: list[str] = []
    monkeypatch.setattr(Loans, moment, given_back_then)
    with LLM("mini", num_threads=1, num_kv_blocks=64, role="prefill", kv_transfer_token="secret") as llm:
        transfer = prefill(llm, PROMPT[:40])
        assert [transfer["transfer_id"]] == given_back
        check_nothing_is_held(llm)


def test_nothing_is_held_for_who_has_given_a_prompt_back_before_its_request_came() -> None:
    with LLM("mini", num_threads=1, num_kv_blocks=64, role="prefill", kv_transfer_token="secret") as llm:
        peer_parts(llm).loans.release(["given-back"])
        transfer = prefill(llm, PROMPT[:40], transfer_id="given-back")
        assert transfer["transfer_id"] == "given-back"
        assert core_of(llm).stats().num_leased_blocks == 0
        check_nothing_is_held(llm)


def test_the_host_still_lends_layer_by_layer() -> None:
    with LLM("mini", num_threads=1, num_kv_blocks=64, role="prefill", kv_transfer_token="secret") as llm:
        assert connector_of(llm).works_by_layer
        assert prefill(llm, PROMPT[:40]) is not None
