"""Layers with windows give back their KV beside peers: what is seen is moved, no more."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import make_checkpoint
from free_ports import free_port
from insides import always_load, check_nothing_is_shared, connector_of, peer_parts
from quire.config import EngineConfig, KVTransferConfig, SchedulerConfig
from quire.datadist.caches.spans import ByteSpans
from quire.datadist.links.decoder_link import DecoderLink
from quire.engine.core import EngineCore
from quire.engine.memory import plan as memory_plan
from quire.engine.messages import EngineCoreRequest
from quire.kv.peers import peer_prefixes
from quire.request_options import RequestOptions
from quire.sampling_params import SamplingParams

BLOCK_SIZE = 4
LENGTH = 32 * 9 + 3  # windows of 9 tokens
LEND = {"do_remote_decode": True}


class Engine:
    """An engine in this process, whose blocks are checked after each step."""

    def __init__(self, path: Path, role: str = "both", **options: Any) -> None:
        scheduler = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": BLOCK_SIZE}
        scheduler |= {"num_kv_blocks": 240, "kv_transfer_timeout": 30.0}
        transfer = {"kv_transfer_token": "secret"}
        for fields, kind in ((scheduler, SchedulerConfig), (transfer, KVTransferConfig)):
            names = {field.name for field in dataclasses.fields(kind)} & options.keys()
            fields |= {name: options.pop(name) for name in names}
        config = EngineConfig(
            model=str(path),
            dtype="float32",
            num_threads=1,
            role=role,
            kv_transfer=KVTransferConfig(**transfer),
            scheduler=SchedulerConfig(**scheduler),
            **options,
        )
        self.core = EngineCore(config, path)
        always_load(connector_of(self.core))
        self.num_requests = 0

    @property
    def peers(self) -> Any:
        return connector_of(self.core).stats()

    def add(self, prompt: np.ndarray, transfer: dict[str, Any] | None = None, **params: Any) -> str:
        self.num_requests += 1
        name = str(self.num_requests)
        fields = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params}
        options = RequestOptions(kv_transfer_params=transfer)
        request = EngineCoreRequest(
            [name], [self.num_requests], prompt.tolist(), SamplingParams(**fields), options=options
        )
        self.core.add(request)
        return name

    def run(self) -> dict[str, Any]:
        """Step until nothing is left to do; return each request's tokens, and what it says of its KV."""
        tokens: dict[str, list[int]] = {}
        self.lent: dict[str, Any] = {}
        deadline = time.monotonic() + 60
        while self.core.has_unfinished_requests():
            assert time.monotonic() < deadline
            for output in self.core.step()[0]:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.kv_transfer_params:
                    self.lent[output.request_id] = output.kv_transfer_params
            self.core.scheduler.check_invariants()
            time.sleep(0.0005)  # for the threads of the links
        return tokens

    def answer(self, prompt: np.ndarray, transfer: dict[str, Any] | None = None, **params: Any) -> list[int]:
        name = self.add(prompt, transfer, **params)
        return self.run()[name]

    def lend(self, prompt: np.ndarray, **params: Any) -> dict[str, Any]:
        name = self.add(prompt, LEND, **{"max_tokens": 1, **params})
        self.run()
        return self.lent[name]

    def check_nothing_is_held(self) -> None:
        deadline = time.monotonic() + 60
        while self.core.has_requests():
            assert time.monotonic() < deadline
            self.core.step()
            time.sleep(0.001)
        check_nothing_is_shared(self.core)


@pytest.fixture
def engines() -> Iterator[Any]:
    with ExitStack() as stack:

        def started(*args: Any, **options: Any) -> Engine:
            engine = Engine(*args, **options)
            stack.callback(engine.core.shutdown)
            return engine

        yield started


OTHERS = [pytest.param(family, marks=pytest.mark.formats) for family in ("mistral", "gemma4")]


@pytest.fixture(scope="module", params=["gemma3", *OTHERS])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with windows in some layers, or in all; with layers that share their KV."""
    return make_checkpoint(request.param, tmp_path_factory.mktemp("model"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def alone(path: Path) -> Iterator[Engine]:
    """An engine without peers."""
    engine = Engine(path)
    yield engine
    engine.core.shutdown()


@pytest.fixture(scope="module")
def pair(path: Path) -> Iterator[tuple[Engine, Engine]]:
    """An engine that lends, and one that borrows."""
    engines = Engine(path, "prefill"), Engine(path, "decode")
    yield engines
    for engine in engines:
        engine.check_nothing_is_held()
        engine.core.shutdown()


def prompt(length: int = LENGTH, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 90, length)


@pytest.mark.parametrize("options", [{}, {"overlap_steps": True}], ids=str)
def test_a_loan_moves_what_is_seen_behind_the_prompt(path, engines, monkeypatch, options):
    with monkeypatch.context() as patch:
        patch.setattr(memory_plan, "keeps_all_tokens", lambda _config: True)
        lender, borrower = engines(path, "prefill", **options), engines(path, "decode", **options)
    expected = borrower.answer(prompt(), lender.lend(prompt()))
    all_bytes = borrower.peers.loaded_bytes
    assert len(borrower.core.scheduler.accounts.kv.pools) == 1
    assert expected == engines(path).answer(prompt())

    lender, borrower = engines(path, "prefill", **options), engines(path, "decode", **options)
    assert len(borrower.core.scheduler.accounts.kv.pools) == 2
    assert borrower.answer(prompt(), lender.lend(prompt())) == expected
    num_blocks = -(-(LENGTH - 1) // BLOCK_SIZE)
    assert borrower.peers.num_loaded_blocks == num_blocks
    sizes = [cache.bytes_per_block for cache in borrower.core.runner.kv_caches]
    assert all_bytes == num_blocks * sum(sizes)
    in_window = borrower.peers.loaded_bytes - num_blocks * sizes[0]
    assert 2 * sizes[1] <= in_window <= 4 * sizes[1]
    assert in_window < 0.1 * num_blocks * sizes[1]
    lender.check_nothing_is_held()
    borrower.check_nothing_is_held()
    assert borrower.answer(prompt()) == expected  # from the borrower's own prefix cache
    assert borrower.core.scheduler.make_stats().prefix_hit_tokens >= (LENGTH - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("length", [8, 9, 10, 12, 13, 16, 17, 21, 150])
def test_prompts_of_any_length_are_lent_and_found_again(path, pair, alone, length):
    lender, borrower = pair
    one = prompt(length, seed=length)
    expected = alone.answer(one)
    assert borrower.answer(one, lender.lend(one)) == expected
    loaded = borrower.core.scheduler.make_stats().num_loaded_tokens
    assert lender.answer(one) == borrower.answer(one) == expected
    longer = np.concatenate((one, prompt(13, seed=1)))
    expected = alone.answer(longer)
    assert borrower.answer(longer, lender.lend(longer)) == expected  # behind the borrower's own part
    assert borrower.core.scheduler.make_stats().num_loaded_tokens > loaded
    assert not borrower.peers.num_failed_loads


def test_a_loan_is_read_layer_by_layer_while_it_is_computed(pair, alone):
    lender, borrower = pair
    one = prompt(150, seed=1000)  # four steps
    expected = alone.answer(one)
    host, port = lender.core.info.kv_transfer_address
    where = {"do_remote_prefill": True, "remote_host": host, "remote_port": port, "transfer_id": "early"}
    loaded = borrower.core.scheduler.make_stats().num_loaded_tokens
    name = borrower.add(one, where)
    lender.add(one, LEND | {"transfer_id": "early"}, max_tokens=30)
    deadline = time.monotonic() + 60
    tokens: list[int] = []
    while len(tokens) < 24:
        assert time.monotonic() < deadline
        for engine in (lender, borrower):
            for output in engine.core.step()[0]:
                tokens += output.new_token_ids if (engine, output.request_id) == (borrower, name) else []
            engine.core.scheduler.check_invariants()
        time.sleep(0.002)  # for the threads of the links
    assert tokens == expected
    assert borrower.core.scheduler.make_stats().num_loaded_tokens == loaded + 149


def test_a_lender_that_goes_on_keeps_what_is_lent(pair, alone):
    lender, borrower = pair
    one = prompt(60, seed=2)
    expected = alone.answer(one, max_tokens=40)
    loaded = borrower.core.scheduler.make_stats().num_loaded_tokens
    transfer = lender.lend(one, max_tokens=40)  # several windows
    assert borrower.answer(one, transfer, max_tokens=40) == expected
    assert borrower.core.scheduler.make_stats().num_loaded_tokens == loaded + 59


def test_a_lender_that_is_preempted_lends_nothing(path, engines, alone):
    lender, borrower = engines(path, "prefill", num_kv_blocks=40), engines(path, "decode")
    one, other = prompt(80, seed=3), prompt(60, seed=4)
    names = [lender.add(other, max_tokens=40), lender.add(one, LEND, max_tokens=40)]
    tokens = lender.run()
    assert lender.core.scheduler.make_stats().num_preemptions
    assert tokens[names[0]] == alone.answer(other, max_tokens=40)
    assert tokens[names[1]] == alone.answer(one, max_tokens=40)
    transfer = lender.lent.get(names[1], {})
    assert borrower.answer(one, transfer or None) == alone.answer(one)
    lender.check_nothing_is_held()


def test_a_loan_that_ends_while_it_is_read_is_computed(path, engines, pair, alone, monkeypatch):
    lender, borrower = engines(path, "prefill"), pair[1]
    one = prompt(90, seed=6)
    pull_parts = DecoderLink.pull_parts

    def end_first(link: DecoderLink, *arguments: Any) -> None:
        peer_parts(lender.core).loans.close("the engine dies")
        pull_parts(link, *arguments)

    expected, transfer = alone.answer(one), lender.lend(one)
    failed = borrower.peers.num_failed_loads
    with monkeypatch.context() as patch:
        patch.setattr(DecoderLink, "pull_parts", end_first)
        assert borrower.answer(one, transfer) == expected
    assert borrower.peers.num_failed_loads == failed + 1
    assert borrower.answer(one) == expected


def test_a_lender_that_sends_less_than_it_said_costs_a_timeout(path, engines, alone):
    lender = engines(path, "prefill")
    borrower = engines(path, "decode", kv_transfer_timeout=1.0)
    one = prompt(90, seed=100)
    shared = peer_parts(lender.core).session._shared
    spans_of = shared.spans_of
    calls: list[int] = []

    def shortened(*arguments: Any) -> ByteSpans:
        spans = spans_of(*arguments)
        calls.append(spans.num_bytes)
        return ByteSpans(spans.tensors, spans.offsets[:-1], spans.lengths[:-1])

    object.__setattr__(shared, "spans_of", shortened)
    transfer = lender.lend(one)
    assert borrower.answer(one, transfer) == borrower.answer(one) == alone.answer(one)
    assert calls
    assert not borrower.core.scheduler.make_stats().num_loaded_tokens


def test_blocks_of_another_size_are_refused_by_name(path, engines, alone, caplog):
    lender, borrower = engines(path, "prefill", block_size=2), engines(path, "decode")
    one = prompt(90, seed=7)
    assert borrower.answer(one, lender.lend(one)) == alone.answer(one)
    assert not borrower.peers.num_loaded_blocks
    assert "the KV differs in block size: PROMPT 2, DECODER 4" in caplog.text


def test_an_engine_that_keeps_all_tokens_is_refused_by_name(path, engines, alone, caplog, monkeypatch):
    borrower = engines(path, "decode")
    monkeypatch.setattr(memory_plan, "keeps_all_tokens", lambda _config: True)
    lender = engines(path, "prefill")
    one = prompt(90, seed=7)
    assert borrower.answer(one, lender.lend(one)) == alone.answer(one)
    assert not borrower.peers.num_loaded_blocks
    assert "the KV differs in block size: PROMPT nothing, DECODER 4" in caplog.text


def test_a_peer_is_asked_for_what_all_groups_have(path, engines, alone, monkeypatch):
    monkeypatch.setattr(peer_prefixes, "LOOKUP_PATIENCE", 10.0)
    monkeypatch.setattr(peer_prefixes, "MIN_COMPUTING_TIME", 0.0)
    first = engines(path, kv_transfer_port=free_port())
    port = first.core.info.kv_transfer_address[1]
    second = engines(path, kv_peers=f"127.0.0.1:{port}")
    for length, seed in ((90, 8), (61, 9), (10, 10), (8, 11)):
        one = prompt(length, seed)
        first.answer(one)
        loaded = second.core.scheduler.make_stats().num_loaded_tokens
        assert second.answer(one) == alone.answer(one)
        loaded = second.core.scheduler.make_stats().num_loaded_tokens - loaded
        assert loaded == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        longer = np.concatenate((one, prompt(50, seed + 20)))
        first.answer(longer)
        assert second.answer(longer) == alone.answer(longer)  # behind the second engine's own part
    [(_, window)] = second.core.scheduler.accounts.kv.pools.windows
    sizes = [cache.bytes_per_block for cache in second.core.runner.kv_caches]
    in_windows = second.peers.loaded_bytes - second.peers.num_loaded_blocks * sizes[0]
    assert second.peers.num_prefixes_found == 8
    assert 0 < in_windows <= 8 * -(-(window - 1) // BLOCK_SIZE) * sizes[1]
    assert not second.peers.num_failed_loads


@pytest.mark.processes
@pytest.mark.parametrize(("lending", "borrowing"), [(2, 1), (1, 2)])
def test_ranks_lend_and_borrow_by_group(tmp_path, engines, lending, borrowing):
    path = make_checkpoint("gemma3", tmp_path, max_position_embeddings=512, num_key_value_heads=2)
    lender = engines(path, "prefill", tensor_parallel_size=lending)
    borrower = engines(path, "decode", tensor_parallel_size=borrowing)
    expected = engines(path).answer(prompt())
    assert borrower.answer(prompt(), lender.lend(prompt())) == expected
    assert borrower.core.scheduler.make_stats().num_loaded_tokens == LENGTH - 1
    num_blocks = -(-(LENGTH - 1) // BLOCK_SIZE)
    sizes = [cache.bytes_per_block * borrowing for cache in borrower.core.runner.kv_caches]
    in_window = borrower.peers.loaded_bytes - num_blocks * sizes[0]
    assert 2 * sizes[1] <= in_window <= 4 * sizes[1]
    again = lender.answer(prompt())
    assert again == expected
