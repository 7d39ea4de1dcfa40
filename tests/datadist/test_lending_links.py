"""Loans over links: bytes arrive as they become ready, and neither side believes what the other says."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import numpy as np
import pytest
import torch
from raw_peers import address_of, soon, started
from sides import link_of, links_to_decoders

from quire.datadist import CacheDesc, CacheKey, DataType, LLMException, LLMRole, LLMStatusCode
from quire.datadist.caches.memory import HostMemory
from quire.datadist.caches.registered_memory import memory_of_tensors
from quire.datadist.caches.spans import part_spans
from quire.datadist.interface.options import InitOptions
from quire.datadist.interface.session import Session
from quire.datadist.links.decoder_link import DecoderLink
from quire.datadist.loans.arriving_blocks import ArrivingBlocks
from quire.datadist.loans.cached_blocks import CachedBlocks
from quire.datadist.loans.loans import Loans
from quire.datadist.loans.shared_blocks import SharedBlocks
from quire.datadist.transports.interface import DestinationEnd, LinkTerms
from quire.datadist.wire.protocol import (
    DIGEST_BYTES,
    BlocksSource,
    LinkOffer,
    LoanReport,
    LoanRequest,
    NumberedBlocksSource,
    PartReady,
    PrefixFound,
    PrefixRequest,
    PullConfirmed,
    PullRefused,
    PullRequest,
    TransportOffer,
    decoder_channel,
    encode_runs,
    prompt_channel,
)

NUM_BLOCKS, BLOCK_BYTES = 12, 96
DESC = CacheDesc(1, [NUM_BLOCKS, BLOCK_BYTES], DataType.DT_INT8)
DIGEST = b"tokens"
IDENTITY = {"model": "tiny 1234", "block size": "16"}


def options(transport: str, address: tuple[str, int] | None) -> InitOptions:
    return InitOptions(
        address=address,
        device=torch.device("cpu"),
        timeout=20.0,
        pool_bytes=None,
        token=b"token",
        use_checksum=True,
        transports=(transport,),
        num_tcp_streams=2,
    )


def shared_blocks(content: np.ndarray, identity: dict[str, str]) -> SharedBlocks:
    return SharedBlocks(
        memory=memory_of_tensors(DESC, [torch.from_numpy(content).view(-1)]),
        block_size=16,
        spans_of=lambda block_ids, *part: part_spans(block_ids[0], BLOCK_BYTES, *part),
        max_sent_blocks=3,
        loans=Loans(BLOCK_BYTES),
        cached=CachedBlocks(),
        identity=lambda: identity,
    )


class LendingSide:
    """A session that lends blocks whose bytes are `content`."""

    def __init__(self, transport: str) -> None:
        self.content = np.random.default_rng(5).integers(1, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        shared = shared_blocks(self.content, IDENTITY)
        self.loans, self.cached = shared.loans, shared.cached
        self.session = Session(LLMRole.PROMPT, 0, options(transport, ("127.0.0.1", 0)), shared)
        self.service = self.session.service

    def lend(self, block_ids: list[int], name: str = "loan") -> None:
        self.number = self.loans.offer(name, "owner", len(block_ids), DIGEST)
        self.loans.begin_step(self.number, 0, [(one,) for one in block_ids])
        self.loans.end_step(self.number)

    def close(self) -> None:
        self.loans.close("the test ends")
        self.session.close()


@contextlib.contextmanager
def linked_to(side: LendingSide, transport: str, identity=IDENTITY):
    own = shared_blocks(np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8), identity)
    session = Session(LLMRole.DECODER, 0, options(transport, None), own)
    try:
        link = session.open_link(side.service.address, soon())
        try:
            yield link
        finally:
            link.drop()
    finally:
        session.close()


@pytest.fixture(params=["tcp", "shared_memory"])
def sides(request):
    side = LendingSide(request.param)
    try:
        with linked_to(side, request.param) as link:
            yield side, link
    finally:
        side.close()


def request_for(num_blocks: int, first: int = 0, name: str = "loan", **changes) -> LoanRequest:
    fields = {"digest": DIGEST, "patience_ms": 0} | changes
    return LoanRequest(0, 0, name, first, num_blocks, fields["digest"], fields["patience_ms"], 0)


def pull(
    link: DecoderLink, request: LoanRequest | PrefixRequest, targets: list[int], deadline: float | None = None
) -> np.ndarray:
    """The blocks of a cache of zeros into which a loan, or cached blocks, were pulled."""
    memory = HostMemory(DESC)
    first = request.first_block if isinstance(request, LoanRequest) else 0
    blocks = ArrivingBlocks(np.array([targets]), first, BLOCK_BYTES)
    link.pull_parts(request, memory, blocks, soon() if deadline is None else deadline)
    return memory.tensor_bytes[0].numpy().reshape(NUM_BLOCKS, BLOCK_BYTES)


def code_of(function, *arguments) -> LLMStatusCode:
    with pytest.raises(LLMException) as caught:
        function(*arguments)
    return caught.value.status_code


def test_blocks_go_where_the_reader_wants_them(sides):
    side, link = sides
    side.lend([3, 4, 5, 11, 0])
    received = pull(link, request_for(5, first=1), [7, 2, 3, 9])
    assert (received[[7, 2, 3, 9]] == side.content[[4, 5, 11, 0]]).all()
    assert not received[[0, 1, 4, 5, 6, 8, 10, 11]].any()
    received = pull(link, request_for(5), [0, 1, 2, 3, 4])
    assert (received[:5] == side.content[[3, 4, 5, 11, 0]]).all()


def test_blocks_arrive_while_they_are_computed(sides):
    side, link = sides
    final = side.content.copy()
    side.content[:] = 0

    def compute() -> None:
        number = side.loans.offer("loan", "owner", 6, DIGEST)
        for first, ids in ((0, [8, 1]), (2, []), (2, [2, 5, 9]), (5, [4])):
            side.loans.begin_step(number, first, [(one,) for one in ids])
            for start, stop in ((0, 32), (32, 40)):
                side.content[ids, start:stop] = final[ids, start:stop]
                side.loans.advance([number], stop)
            side.content[ids, 40:] = final[ids, 40:]
            side.loans.end_step(number)

    thread = threading.Timer(0.02, compute)
    thread.start()
    received = pull(link, request_for(6, patience_ms=20_000), [0, 1, 2, 3, 4, 5])
    thread.join()
    assert (received[:6] == final[[8, 1, 2, 5, 9, 4]]).all()


def test_a_loan_that_ends_while_it_travels_is_refused_and_the_link_goes_on(sides, monkeypatch):
    side, link = sides
    side.lend([1, 2])
    [link_to_decoder] = links_to_decoders(side.service)
    end = link_to_decoder.source_end
    send = end.send

    def send_and_end(*arguments) -> None:
        send(*arguments)
        side.loans.end(side.number, "its blocks have other content now")

    monkeypatch.setattr(end, "send", send_and_end)
    assert code_of(pull, link, request_for(2), [1, 2]) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    monkeypatch.undo()
    side.lend([1, 2])
    assert (pull(link, request_for(2), [1, 2])[[1, 2]] == side.content[[1, 2]]).all()


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (request_for(2, name="another"), LLMStatusCode.LLM_KV_CACHE_NOT_EXIST),
        (request_for(2, digest=b"other tokens"), LLMStatusCode.LLM_PARAM_INVALID),
        (request_for(3), LLMStatusCode.LLM_PARAM_INVALID),
        (request_for(2, first=2**32 - 1), LLMStatusCode.LLM_PARAM_INVALID),
    ],
)
def test_what_is_not_lent_is_refused_and_the_link_goes_on(sides, request_, code):
    side, link = sides
    side.lend([1, 2])
    assert code_of(pull, link, request_, [0]) is code
    assert link.stands
    pull(link, request_for(2), [1, 2])


def test_an_engine_that_was_started_anew_lends_nothing_of_before(sides):
    side, link = sides
    side.lend([1, 2])
    link.epoch ^= 1
    assert code_of(pull, link, request_for(2), [1, 2]) is LLMStatusCode.LLM_NOT_YET_LINK


def test_a_reader_that_leaves_frees_the_lender(sides):
    side, link = sides
    side.loans.offer("loan", "owner", 2, DIGEST)
    assert code_of(pull, link, request_for(2), [1, 2], time.monotonic() + 0.2) is (
        LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    )
    assert not link.stands
    deadline = soon()
    while links_to_decoders(side.service):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert side.loans.take_renewed() == set()


def test_news_renew_and_release(sides):
    side, link = sides
    side.lend([1, 2])
    side.lend([3], "other")
    side.loans.offer("awaited", "owner", 1, DIGEST)
    assert link.update_loans(["loan", "gone", "awaited"], [], soon()) == LoanReport(["gone"], ["loan"])
    assert side.loans.take_renewed() == {"owner"}
    released = ["loan", "other", "gone", "awaited"]
    assert link.update_loans(["loan"], released, soon()) == LoanReport(["loan"], [])
    assert side.loans.take_released() == {"owner"}
    assert side.loans.is_empty


def digest_of(block: int) -> bytes:
    return block.to_bytes(DIGEST_BYTES, "big")


def cached_request(*blocks: int) -> PrefixRequest:
    return PrefixRequest(0, 0, b"".join(map(digest_of, blocks)), 0)


def test_cached_blocks_are_found_and_read(sides):
    side, link = sides
    for block in (3, 4, 11):
        side.cached.add(digest_of(block), block)
    assert link.find_prefix(b"".join(map(digest_of, [11, 3, 5, 4])), soon()) == 2
    assert link.find_prefix(b"", soon()) == 0
    received = pull(link, cached_request(11, 3), [7, 2])
    assert (received[[7, 2]] == side.content[[11, 3]]).all()
    assert not np.delete(received, [7, 2], axis=0).any()
    assert code_of(pull, link, cached_request(11, 5), [7, 2]) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert link.stands


@pytest.mark.parametrize("how", ["given up", "given up and cached anew"])
def test_a_cached_block_that_is_given_up_while_it_travels_is_refused_and_the_link_goes_on(
    sides, monkeypatch, how
):
    side, link = sides
    side.cached.add(digest_of(1), 1)
    side.cached.add(digest_of(2), 2)
    [link_to_decoder] = links_to_decoders(side.service)
    end = link_to_decoder.source_end
    send = end.send

    def send_and_give_up(*arguments) -> None:
        send(*arguments)
        side.cached.remove(digest_of(2))
        if how == "given up and cached anew":
            side.cached.add(digest_of(2), 2)

    monkeypatch.setattr(end, "send", send_and_give_up)
    assert code_of(pull, link, cached_request(1, 2), [1, 2]) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    monkeypatch.undo()
    assert (pull(link, cached_request(1), [5])[5] == side.content[1]).all()


@pytest.mark.parametrize("ask", [DecoderLink.find_prefix, pull], ids=["find", "read"])
def test_who_sends_malformed_digests_loses_its_link(sides, ask):
    _, link = sides
    malformed = b"x" * (DIGEST_BYTES + 1)
    arguments = (malformed, soon()) if ask is not pull else (PrefixRequest(0, 0, malformed, 0), [0])
    assert code_of(ask, link, *arguments) is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    assert not link.stands


@pytest.mark.parametrize("identity", [{}, IDENTITY | {"block size": "32"}, IDENTITY | {"more": "x"}])
def test_only_equal_kv_is_linked(identity):
    side = LendingSide("tcp")
    try:
        with pytest.raises(ConnectionError, match="the KV differs in"), linked_to(side, "tcp", identity):
            pass
    finally:
        side.close()


def test_several_links_may_go_to_one_session(sides):
    side, link = sides
    side.lend([1, 2])
    with linked_to(side, link.transport) as another:
        assert len(side.service.transports) == 2
        for one in (link, another):
            assert (pull(one, request_for(2), [1, 2])[[1, 2]] == side.content[[1, 2]]).all()


@pytest.mark.parametrize("source", [NumberedBlocksSource, BlocksSource])
def test_shared_blocks_are_no_cache_that_can_be_pulled(sides, source):
    side, link = sides
    side.lend([1, 2])
    for number in range(3):
        run = encode_runs(np.array([1]), np.array([1]))
        request = PullRequest(
            0, 0, source(number, BLOCK_BYTES, run), DataType.DT_INT8, 1, None, 0, BLOCK_BYTES, False, 0
        )
        spans = part_spans(np.array([0]), BLOCK_BYTES, 0, BLOCK_BYTES)
        code = code_of(link.pull, request, HostMemory(DESC), spans, soon())
        assert code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_an_llm_datadist_lends_nothing():
    with started(LLMRole.PROMPT, 1) as prompt, started(LLMRole.DECODER, 2) as decoder:
        decoder.link_clusters([address_of(prompt)], timeout=20_000)
        link = link_of(decoder)
        assert code_of(pull, link, request_for(1), [0]) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        assert link.update_loans(["loan"], ["loan"], soon()) == LoanReport(["loan"], [])
        prompt.kv_cache_manager.allocate_cache(DESC, [CacheKey(1, 5)])


class Scribbler(DestinationEnd):
    """Fills all that it is told to receive."""

    def receive(self, transfer_id, memory, spans, deadline) -> None:
        for offset, length in zip(spans.offsets.tolist(), spans.lengths.tolist(), strict=True):
            memory.tensor_bytes[0][offset : offset + length] = 9

    def forget_source(self) -> None:
        pass

    def shut_down(self) -> None:
        pass

    def close(self) -> None:
        pass


@contextlib.contextmanager
def link_with_a_liar():
    mine, theirs = socket.socketpair()
    for one in (mine, theirs):
        one.setblocking(False)
    offer = LinkOffer(5, 1, True, TransportOffer("tcp", b""), 16, False)
    terms = LinkTerms(1, ("127.0.0.1", 0), b"", use_checksum=True)
    channel = decoder_channel(mine)
    channel.has_something = lambda seconds=0.0: False  # what came early is an answer
    link = DecoderLink(0, channel, Scribbler(), offer, terms)
    try:
        yield link, prompt_channel(theirs)
    finally:
        link.drop()
        theirs.close()


WHOLE = PartReady(1, 2, 2, 0, BLOCK_BYTES)


@pytest.mark.parametrize(
    "answers",
    [
        [PartReady(1, 0, 1, 0, BLOCK_BYTES)],
        [PartReady(1, 2, 3, 0, BLOCK_BYTES)],
        [PartReady(1, 2**32 - 1, 2**32 - 1, 0, BLOCK_BYTES)],
        [PartReady(1, 2, 1, 0, 2**62)],
        [PartReady(1, 2, 1, 2**62, BLOCK_BYTES)],
        [PartReady(1, 2, 1, 0, 8), PartReady(1, 2, 1, 0, 8)],
        [PartReady(2, 2, 2, 0, BLOCK_BYTES)],
        [PullConfirmed(1)],
        [LoanReport([], [])],
        [WHOLE, WHOLE],
        [WHOLE, PullConfirmed(3)],
        [WHOLE, PullRefused(1, 255, "no such code")],
    ],
    ids=str,
)
def test_a_lender_that_lies_breaks_its_link_and_writes_nowhere_else(answers):
    memory = HostMemory(DESC)
    with link_with_a_liar() as (link, channel):
        for one in answers:
            channel.send(one, soon())
        blocks = ArrivingBlocks(np.array([[6, 7]]), 2, BLOCK_BYTES)
        code = code_of(link.pull_parts, request_for(4, first=2), memory, blocks, soon())
        assert code is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
        assert not link.stands
    written = memory.tensor_bytes[0].numpy().reshape(NUM_BLOCKS, BLOCK_BYTES)
    assert not np.delete(written, [6, 7], axis=0).any()


def test_a_lender_that_finds_more_than_it_was_asked_about_breaks_its_link():
    with link_with_a_liar() as (link, channel):
        channel.send(PrefixFound(3), soon())
        code = code_of(link.find_prefix, digest_of(1) * 2, soon())
        assert code is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
        assert not link.stands
