"""A decode engine begins behind the state that a prefill engine lends with the KV: the same bits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_window_peers import free_port

from checked_engine import scored_tokens
from checkpoints import make_checkpoint
from hybrid_engines import BLOCK_SIZE, LENGTHS, MAX_TOKENS, Engine, prompts
from insides import always_load, check_nothing_is_shared, connector_of, peer_parts
from quire.config import KVTransferConfig
from quire.datadist.caches.spans import ByteSpans
from quire.datadist.links.decoder_link import DecoderLink
from quire.errors import ConfigError
from quire.kv.peers import peer_prefixes

FULL = [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in LENGTHS]
"""Tokens in front of the last one of each prompt that fill blocks."""

LEND = {"do_remote_decode": True}
FAMILIES = [
    "lfm2",
    *(pytest.param(name, marks=pytest.mark.formats) for name in ("qwen3_5", "granitemoehybrid")),
]


class PeerEngine(Engine):
    """An engine that lends or borrows."""

    def __init__(self, path: Path, role: str, **options: Any) -> None:
        names = [name for name in options if hasattr(KVTransferConfig, name)]
        transfer = KVTransferConfig(
            **{"kv_transfer_token": "secret"} | {name: options.pop(name) for name in names}
        )
        fields = {"num_linear_attention_blocks": 40, "kv_transfer_timeout": 30.0, **options}
        super().__init__(path, role=role, kv_transfer=transfer, num_threads=1, **fields)
        always_load(connector_of(self.core))

    @property
    def peers(self) -> Any:
        return connector_of(self.core).stats()

    def lend(self, prompts: list[np.ndarray], **params: Any) -> list[dict[str, Any]]:
        """Return what each prompt's answer says of its KV."""
        fields = {"max_tokens": 1, **params}
        ends = [outputs[-1] for outputs in self.outputs(prompts, transfers=[LEND] * len(prompts), **fields)]
        return [end.kv_transfer_params or {} for end in ends]

    def check_nothing_is_held(self) -> None:
        deadline = time.monotonic() + 60
        while self.core.has_requests():
            assert time.monotonic() < deadline
            self.step({})
        check_nothing_is_shared(self.core)
        assert not self.checkpoints._held
        assert not self.core.scheduler.accounts.holdings._held_states


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / request.param
    return make_checkpoint(request.param, directory, max_position_embeddings=512)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[Any]]:
    engine = Engine(path)
    return [engine.answers([prompt])[0] for prompt in prompts()]


@pytest.fixture
def engines(path: Path) -> Iterator[Any]:
    started: list[PeerEngine] = []

    def start(role: str, **options: Any) -> PeerEngine:
        started.append(PeerEngine(path, role, **options))
        return started[-1]

    yield start
    for engine in started[::-1]:
        engine.check_nothing_is_held()
        engine.core.shutdown()


@pytest.mark.parametrize(
    "options", [{}, {"overlap_steps": True}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 2}], ids=str
)
def test_a_loan_moves_full_blocks_and_the_state_behind_them(engines, expected, options):
    lender, borrower = engines("prefill", **options), engines("decode", **options)
    transfers = lender.lend(prompts())
    assert borrower.answers(prompts(), transfers=transfers) == expected
    assert borrower.stats.num_loaded_tokens == sum(FULL)
    num_pieces = borrower.core.runner.states.num_pieces
    num_blocks = sum(FULL) // BLOCK_SIZE + len(FULL) * num_pieces
    assert borrower.peers.num_loaded_blocks == num_blocks
    assert borrower.peers.loaded_bytes == num_blocks * borrower.core.runner.states.tensor.shape[1]
    assert borrower.answers(prompts()) == expected, "from its own prefix cache"
    assert borrower.stats.prefix_hit_tokens == sum(FULL)
    longer = [np.append(prompt, [11] * 9) for prompt in prompts()]
    answers = borrower.answers(longer, transfers=lender.lend(longer))
    assert answers == lender.answers(longer, transfers=None)
    assert not borrower.stats.num_failed_loads


def test_a_loan_is_asked_for_before_it_is_computed(engines, expected):
    lender, borrower = engines("prefill"), engines("decode")
    host, port = lender.core.info.kv_transfer_address
    where = {"do_remote_prefill": True, "remote_host": host, "remote_port": port, "transfer_id": "early"}
    prompt = prompts()[0]
    answers = borrower.begin([prompt], transfers=[where], logprobs=0)
    lent = lender.begin([prompt], transfers=[LEND | {"transfer_id": "early"}], max_tokens=30)
    deadline = time.monotonic() + 60
    while borrower.core.has_unfinished_requests() or lender.core.has_unfinished_requests():
        assert time.monotonic() < deadline
        lender.step(lent)
        borrower.step(answers)
    assert list(map(scored_tokens, answers.values())) == expected[:1]
    assert borrower.stats.num_loaded_tokens == FULL[0]


def test_a_lent_state_is_not_overwritten(engines, expected):
    lender, borrower = engines("prefill", num_linear_attention_blocks=5), engines("decode")
    transfers = lender.lend(prompts()[:1])
    rng = np.random.default_rng(1)
    others = [rng.integers(5, 90, 50) for _ in range(3)]
    first = lender.answers(others)  # while the only checkpoint is lent
    assert lender.checkpoints._held
    assert borrower.answers(prompts()[:1], transfers=transfers) == expected[:1]
    assert borrower.stats.num_loaded_tokens == FULL[0]
    lender.check_nothing_is_held()
    assert lender.answers(others) == first


def test_a_state_that_was_overwritten_is_not_lent(engines, expected):
    lender, borrower = engines("prefill"), engines("decode")
    outputs = lender.begin(prompts()[:1], transfers=[LEND], max_tokens=9)
    while len(next(iter(outputs.values()))) < 5:
        lender.step(outputs)
    lender.checkpoints.forget_contents()
    while lender.core.has_unfinished_requests():
        lender.step(outputs)
    [[*_, end]] = outputs.values()
    assert end.kv_transfer_params is None
    assert borrower.answers(prompts()[:1]) == expected[:1]


def test_requests_that_borrow_and_generate_on_lend_what_they_began_with(engines, expected):
    lender, borrower = engines("prefill"), engines("decode")
    transfers = lender.lend(prompts(), max_tokens=MAX_TOKENS)
    sampled = {"temperature": 1.0, "seed": 3, "n": 3}
    several = borrower.answers(prompts()[:1], transfers=transfers[:1], **sampled)
    assert several == lender.answers(prompts()[:1], **sampled)
    assert borrower.answers(prompts()[1:], transfers=transfers[1:]) == expected[1:]
    assert borrower.stats.num_loaded_tokens == sum(FULL)


def test_a_request_that_another_engine_has_begun_is_computed_beside_peers(engines, expected):
    borrower = engines("decode")
    begun = [[[token for token, _ in answer[:5]]] for answer in expected]
    where = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9, "transfer_id": "old"}
    answers = borrower.answers(prompts(), begun=begun, transfers=[where] * len(LENGTHS))
    assert answers == [answer[5:] for answer in expected]


@pytest.mark.parametrize("fault", ["ends", "less", "gone"])
def test_a_peer_that_fails_costs_time_and_no_request(engines, expected, monkeypatch, fault):
    lender, borrower = (engines(role, kv_transfer_timeout=1.0) for role in ("prefill", "decode"))
    transfers = lender.lend(prompts())
    shared, pull_parts = peer_parts(lender.core).session._shared, DecoderLink.pull_parts
    spans_of = shared.spans_of

    def without_last(*arguments: Any) -> ByteSpans:
        spans = spans_of(*arguments)
        return ByteSpans(spans.tensors, spans.offsets[:-1], spans.lengths[:-1])

    def end_first(link: DecoderLink, *arguments: Any) -> None:
        peer_parts(lender.core).loans.close("the engine dies")
        pull_parts(link, *arguments)

    def fail(*_: Any) -> None:
        raise ConnectionError("it is gone")

    if fault == "less":
        object.__setattr__(shared, "spans_of", without_last)
    else:
        monkeypatch.setattr(DecoderLink, "pull_parts", end_first if fault == "ends" else fail)
    assert borrower.answers(prompts(), transfers=transfers) == expected
    assert not borrower.stats.num_loaded_tokens
    assert borrower.stats.num_failed_loads == len(LENGTHS)


@pytest.fixture
def equals(engines, monkeypatch) -> Any:
    """A function that starts two engines, of which the second asks the first what it has cached."""
    monkeypatch.setattr(peer_prefixes, "LOOKUP_PATIENCE", 10.0)
    monkeypatch.setattr(peer_prefixes, "MIN_COMPUTING_TIME", 0.0)

    def start(**options: Any) -> tuple[PeerEngine, PeerEngine]:
        first = engines("both", kv_transfer_port=free_port(), **options)
        port = first.core.info.kv_transfer_address[1]
        return first, engines("both", kv_peers=f"127.0.0.1:{port}", **options)

    return start


@pytest.mark.parametrize("options", [{}, {"overlap_steps": True}, {"max_num_batched_tokens": 7}], ids=str)
def test_a_prefix_of_a_peer_is_read_up_to_its_deepest_state(equals, expected, options):
    first, second = equals(**options)
    first.answers(prompts())
    assert second.answers(prompts()) == expected
    assert second.stats.num_loaded_tokens == sum(FULL)
    longer = np.append(prompts()[0], np.arange(20, 60))  # behind the second engine's own part
    first.answers([longer])
    before = second.stats.num_loaded_tokens
    assert second.answers([longer]) == first.answers([longer])
    num_full = (len(longer) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert second.stats.num_loaded_tokens - before == num_full - FULL[0]
    assert not second.stats.num_failed_loads


def test_where_only_a_state_is_gone_little_more_than_that_is_read(equals, engines, expected):
    first, second = equals()
    lender, borrower = engines("prefill"), engines("decode")
    first.answers(prompts())
    transfers = None
    for reader in (second, borrower):
        reader.answers(prompts())
        reader.checkpoints.forget_contents()
        before = reader.stats.num_loaded_tokens
        if reader is borrower:
            transfers = lender.lend(prompts())
        assert reader.answers(prompts(), transfers=transfers) == expected
        assert reader.stats.num_loaded_tokens - before == len(LENGTHS) * BLOCK_SIZE
        assert not reader.stats.num_failed_loads


def test_what_a_peer_has_no_state_of_is_computed(equals, expected):
    first, second = equals()
    first.answers(prompts())
    first.checkpoints.forget_contents()
    assert second.answers(prompts()) == expected
    assert not second.stats.num_loaded_tokens
    assert not second.peers.num_prefixes_found


def test_a_state_that_is_overwritten_while_it_is_read_is_computed(equals, expected, monkeypatch):
    first, second = equals()
    first.answers(prompts())
    pull_parts = DecoderLink.pull_parts

    def overwrite_first(link: DecoderLink, *arguments: Any) -> None:
        first.checkpoints.forget_contents()
        first.core.runner.states.states[:] = 7
        pull_parts(link, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(DecoderLink, "pull_parts", overwrite_first)
        assert second.answers(prompts()) == expected
    assert second.stats.num_failed_loads
    assert not second.stats.num_loaded_tokens
    first.answers(prompts()[::-1])
    assert second.answers(prompts()) == expected


def test_engines_that_keep_no_states_are_refused_by_name(path):
    with pytest.raises(ConfigError, match="role is 'prefill', but no states of recurrent layers are kept"):
        Engine(path, role="prefill", num_linear_attention_blocks=4)
