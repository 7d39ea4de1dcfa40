"""Engines of several ranks share KV with others, whose number of ranks is another one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

from call_through import call_through
from engine_checks import check_after_every_step, core_of
from insides import always_load, check_nothing_is_shared, connector_of
from quire import LLM, SamplingParams
from quire.datadist.links.decoder_link import DecoderLink
from quire.errors import ConfigError, EngineDeadError
from quire.kv.peers import block_layouts, peer_prefixes

PROMPT = [5 + index % 90 for index in range(12 * 16 + 3)]
OPTIONS = {"num_threads": 1, "num_kv_blocks": 40, "kv_transfer_token": "secret", "max_num_batched_tokens": 80}

pytestmark = [pytest.mark.usefixtures("preloaded_engines"), pytest.mark.processes]


@contextlib.contextmanager
def engine(model: str, num_ranks: int, **options):
    with LLM(model, tensor_parallel_size=num_ranks, **{**OPTIONS, **options}) as llm:
        check_after_every_step(core_of(llm))
        always_load(connector_of(llm))
        yield llm


def params(**changes) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "logprobs": 1, **changes}
    )


def answer(llm: LLM, transfer: dict | None = None, **changes) -> tuple[list, list]:
    """Tokens and log-probabilities of all completions of the prompt."""
    [output] = llm.generate([PROMPT], params(**changes), kv_transfer_params=transfer)
    logprobs = [
        [entry.logprob for position in one.logprobs or [] for entry in position.values()]
        or one.cumulative_logprob
        for one in output.outputs
    ]
    return [one.token_ids for one in output.outputs], logprobs


def prefill(llm: LLM, **more) -> dict:
    lend = {"do_remote_decode": True, **more}
    return llm.generate([PROMPT], params(max_tokens=1), kv_transfer_params=lend)[0].kv_transfer_params


def check_nothing_is_held(*engines: LLM) -> None:
    for llm in engines:
        core, deadline = core_of(llm), time.monotonic() + 60
        while core.has_requests():
            assert time.monotonic() < deadline
            core.step()
        check_nothing_is_shared(core)
        assert llm.reset_prefix_cache()
        assert core.stats().num_free_blocks == llm.info.num_blocks


@pytest.fixture(scope="module")
def alone(checkpoint):
    """The answer of one engine, by its number of ranks."""
    answers: dict[int, tuple[list, list]] = {}

    def of(num_ranks: int) -> tuple[list, list]:
        if num_ranks not in answers:
            with engine(checkpoint, num_ranks) as llm:
                answers[num_ranks] = answer(llm)
        return answers[num_ranks]

    return of


@pytest.mark.parametrize(
    ("lending", "borrowing", "options"),
    [
        (2, 1, {}),
        (1, 2, {}),
        (1, 2, {"block_size": 32, "num_kv_blocks": 20, "kv_transports": "tcp"}),
        (2, 2, {"overlap_steps": True}),
    ],
)
def test_a_prompt_travels_between_engines_of_any_number_of_ranks(
    checkpoint, alone, lending, borrowing, options
):
    tokens, logprobs = alone(1)
    with (
        engine(checkpoint, lending, role="prefill") as first,
        engine(checkpoint, borrowing, role="decode", **options) as second,
    ):
        answers = [answer(second, prefill(first))]
        check_nothing_is_held(first, second)
        # Layer by layer, while it is computed.
        host, port = core_of(first).info.kv_transfer_address
        where = {"do_remote_prefill": True, "remote_host": host, "remote_port": port, "transfer_id": "t"}
        decoding = threading.Thread(target=lambda: answers.append(answer(second, where)))
        decoding.start()
        prefill(first, transfer_id="t")
        decoding.join(60)
        check_nothing_is_held(first, second)
        stats = second.stats()
        assert (stats.num_loaded_tokens, stats.num_failed_loads) == (2 * (len(PROMPT) - 1), 0)
        num_blocks = -(-(len(PROMPT) - 1) // first.info.block_size)
        block_bytes = first.info.kv_cache_bytes // first.info.num_blocks  # of all ranks together
        assert stats.kv_connector.loaded_bytes == 2 * num_blocks * block_bytes
    assert answers[0] == answers[1]
    if lending == borrowing:  # sums have one order then
        assert answers[0] == alone(lending)
    assert answers[0][0] == tokens
    np.testing.assert_allclose(answers[0][1], logprobs, atol=1e-4)


def test_ranks_that_divide_heads_further(tmp_path_factory):
    from checkpoints import make_checkpoint

    model = str(make_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama"))  # 4 KV heads
    with engine(model, 1, dtype="float32") as llm:
        tokens, _ = answer(llm)
    with (
        engine(model, 2, role="prefill", dtype="float32") as first,
        engine(model, 4, role="decode", dtype="float32") as second,
    ):
        assert answer(second, prefill(first))[0] == tokens
        assert second.stats().num_loaded_tokens == len(PROMPT) - 1
        check_nothing_is_held(first, second)


@pytest.mark.parametrize(
    "changes",
    [{"n": 3, "temperature": 1.0, "seed": 7}, {"beam_width": 3, "n": 2, "logprobs": None}],
    ids=str,
)
def test_blocks_are_copied_on_all_ranks(checkpoint, changes):
    with engine(checkpoint, 2) as llm:
        expected = answer(llm, **changes)
    with engine(checkpoint, 2, role="prefill") as first, engine(checkpoint, 2, role="decode") as second:
        assert answer(second, prefill(first), **changes) == expected
        assert answer(first, **changes) == expected
        check_nothing_is_held(first, second)


def test_prefixes_are_read_from_equals_of_another_number_of_ranks(checkpoint, alone, monkeypatch):
    monkeypatch.setattr(peer_prefixes, "LOOKUP_PATIENCE", 30.0)
    monkeypatch.setattr(peer_prefixes, "MIN_COMPUTING_TIME", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [listener.getsockname()[1] for listener in (one, other)]
    peers = ",".join(f"127.0.0.1:{port}" for port in ports)
    with (
        engine(checkpoint, 2, kv_peers=peers, kv_transfer_port=ports[0]) as first,
        engine(checkpoint, 1, kv_peers=peers, kv_transfer_port=ports[1]) as second,
    ):
        assert answer(first) == alone(2)
        assert answer(second)[0] == alone(1)[0]
        assert second.stats().num_loaded_tokens == 12 * 16
        assert second.reset_prefix_cache()
        assert first.reset_prefix_cache()
        answer(second)
        assert answer(first)[0] == alone(1)[0]
        assert first.stats().num_loaded_tokens == 12 * 16
        check_nothing_is_held(first, second)


def test_engines_of_other_kv_are_not_linked(checkpoint, alone, caplog):
    with (
        engine(checkpoint, 2, role="prefill", kv_cache_dtype="int8") as first,
        engine(checkpoint, 1, role="decode") as second,
    ):
        assert answer(second, prefill(first)) == alone(1)
        assert second.stats().num_loaded_tokens == 0
        assert "the KV differs in KV dtype: PROMPT int8, DECODER float32" in caplog.text


def test_kv_heads_must_divide():
    reason = "tensor_parallel_size is 4, which does not divide the 2 KV heads .* set it to 1, 2$"
    for options in ({"role": "decode"}, {"kv_transfer_port": 7000}):
        with pytest.raises(ConfigError, match=reason):
            LLM("mini", tensor_parallel_size=4, **OPTIONS, **options)


# -- faults ------------------------------------------------------------------------------------------------


@pytest.fixture
def reading(monkeypatch):
    """What is called in a reading whose first part has been taken; it goes on when that returns."""
    monkeypatch.setattr(block_layouts, "MAX_SENT_SPANS", 5)
    interruptions = []

    def receive(receive_part, link, *arguments):
        receive_part(link, *arguments)
        if interruptions:
            interruptions.pop()()

    call_through(monkeypatch, DecoderLink, "_receive_part", receive)
    return interruptions


@pytest.mark.representative
def test_a_read_that_fails_is_computed_instead(checkpoint, alone, reading):
    def fail():
        raise MemoryError("injected")

    with engine(checkpoint, 1, role="prefill") as first, engine(checkpoint, 2, role="decode") as second:
        reading.append(fail)
        assert answer(second, prefill(first)) == alone(2)
        assert second.stats().num_failed_loads == 1
        assert answer(second, prefill(first))[0] == alone(1)[0]
        assert second.stats().num_failed_loads == 1
        check_nothing_is_held(first, second)


@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_a_lender_whose_rank_dies_while_it_is_read(checkpoint, alone, reading, transport):
    with engine(checkpoint, 1, role="decode", kv_transports=transport) as second:
        with engine(checkpoint, 2, role="prefill", kv_transports=transport) as first:
            transfer = prefill(first)
            [rank] = core_of(first).ranks.pids
            core = core_of(first)

            def kill() -> None:
                os.kill(rank, signal.SIGKILL)
                with pytest.raises(EngineDeadError, match=f"the process {rank}, was killed by SIGKILL"):
                    answer(first)
                connector_of(core).close()  # as the end of its process does

            reading.append(kill)
            assert answer(second, transfer) == alone(1)
        assert second.stats().num_failed_loads == 1
        check_nothing_is_held(second)


def test_a_borrower_whose_rank_dies_while_it_reads(checkpoint, reading):
    with engine(checkpoint, 2, role="prefill", kv_transfer_timeout=1.0) as first:
        with engine(checkpoint, 2, role="decode") as second:
            [rank] = core_of(second).ranks.pids
            reading.append(lambda: os.kill(rank, signal.SIGKILL))
            with pytest.raises(EngineDeadError, match=f"the process {rank}, was killed by SIGKILL"):
                answer(second, prefill(first))
        check_nothing_is_held(first)
