"""Pushes of a MIX over the link that it has made, when the link ends, breaks, or is with a hostile peer."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading

import msgspec
import numpy as np
import pytest
import sides
from failing import fails_with
from forwarder import Forwarder
from raw_peers import RawDecoder, connection_to, soon, started
from sides import byte_desc, link_of, owned_bytes, pattern, register_new, write_new_blocks

from call_through import call_through
from quire.datadist import BlocksCacheKey, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from quire.datadist.links import push_receiver
from quire.datadist.links.decoder_link import DecoderLink
from quire.datadist.links.push_sender import FIRST_TRANSFER
from quire.datadist.wire.handshake import ConnectionKind, greet, new_greeting
from quire.datadist.wire.protocol import (
    BlocksSource,
    CheckLink,
    ControlChannel,
    LinkChecked,
    LinkOffer,
    encode_runs,
)
from quire.datadist.wire.push_protocol import (
    FromPushReceiver,
    PushAccepted,
    PushesReady,
    PushRefused,
    PushRequest,
)

NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
SUCCESS = LLMStatusCode.LLM_SUCCESS
TIMEOUT = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
DESC = byte_desc(2, 20_000)
TO = BlocksCacheKey(2)


@dataclasses.dataclass
class Both:
    """A MIX that has linked, and one that listens, with a registered cache; a forwarder lies between."""

    client: LLMDataDist
    server: LLMDataDist
    forwarder: Forwarder

    def __post_init__(self) -> None:
        self.link()
        self.source = write_new_blocks(self.client.cache_manager, DESC, seed=1)
        self.target = register_new(self.server.cache_manager, DESC, TO, seed=2)
        self.expected = pattern(DESC, 2)

    def link(self) -> None:
        peer = sides.cluster_info(2, self.forwarder.port)
        assert self.client.link_clusters([peer], sides.PATIENT)[0] is SUCCESS

    def unlink(self, side: LLMDataDist, **given) -> LLMStatusCode:
        other = self.server if side is self.client else self.client
        return side.unlink_clusters([sides.cluster_info(other.cluster_id, 0)], sides.PATIENT, **given)[0]

    def push(self, source: int = 0, target: int = 1) -> None:
        self.client.cache_manager.push_blocks(TO, self.source, [source], [target])
        self.expected[:, target] = pattern(DESC, 1)[:, source]

    def assert_pushed(self) -> None:
        np.testing.assert_array_equal(owned_bytes(self.target), self.expected)


@pytest.fixture
def new_both(new_datadist):
    with contextlib.ExitStack() as stack:

        def new(timeout: int = sides.PATIENT, checksums: str = "11") -> Both:
            client, server = (new_datadist(LLMRole.MIX, number) for number in (1, 2))
            here, there = ({"quire.checksum": one} for one in checksums)
            client.init(sides.options(pool=1 << 20, timeout=timeout) | here)
            server.init(sides.options(pool=1 << 20, listen="127.0.0.1:0") | there)
            forwarder = Forwarder(server.listen_port)
            stack.callback(forwarder.close)
            return Both(client, server, forwarder)

        yield new


@pytest.fixture
def both(new_both):
    return new_both()


def of_pushes() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "datadist-pushes"]


def end_threads() -> None:
    for one in of_pushes():
        one.join(20)
    assert not of_pushes()


@pytest.mark.parametrize("how", ["unlink", "force", "peer", "finalize", "peer finalizes"])
def test_a_link_that_ends_takes_its_pushes_with_it(both, how, caplog):
    both.push()
    both.assert_pushed()
    assert len(of_pushes()) == 2  # one at each end
    if how in {"unlink", "force"}:
        assert both.unlink(both.client, force=how == "force") is SUCCESS
    elif how == "peer":
        assert both.unlink(both.server) is SUCCESS
    else:
        (both.client if how == "finalize" else both.server).finalize()
    end_threads()
    code = LLMStatusCode.LLM_ENGINE_FINALIZED if how == "finalize" else NOT_LINKED
    with fails_with(code):
        both.push()
    if how == "unlink":
        assert not caplog.records
    if "finalize" not in how:
        both.unlink(both.client)
        both.link()
        both.push(1, 0)
        both.assert_pushed()


@pytest.mark.parametrize("checksums", ["00", "01", "10"])
def test_both_ends_agree_on_checksums(new_both, checksums):
    both = new_both(checksums=checksums)
    both.push()
    both.assert_pushed()


def push_twice(both: Both) -> None:
    for _ in range(2):
        both.push()


@pytest.mark.parametrize("num_bytes", [0, 60, 130, 230, 20_000, 90_000])
def test_a_push_that_is_cut_breaks_the_link_and_no_more(both, num_bytes):
    both.forwarder.cut_after(num_bytes, "requests")
    with pytest.raises(LLMException) as caught:
        push_twice(both)
    assert caught.value.status_code in {TIMEOUT, NOT_LINKED}
    with fails_with(NOT_LINKED):
        both.push()
    assert both.unlink(both.client) is LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED
    both.link()
    both.push(1, 0)
    both.push(1, 1)
    both.assert_pushed()


def test_a_peer_that_is_silent_fails_the_push_in_time(new_both):
    both = new_both(timeout=300)
    both.forwarder.hold()
    with fails_with(TIMEOUT):
        both.push()
    with fails_with(NOT_LINKED):
        both.push()
    both.forwarder.release()
    assert both.unlink(both.client) is LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED


def test_a_link_that_is_dropped_while_a_push_opens_its_connection(both, monkeypatch):
    def drop_and_open(new, link, deadline):
        link.drop()
        return new(link, deadline)

    call_through(monkeypatch, DecoderLink, "_new_back_pushes", drop_and_open)
    with pytest.raises(LLMException) as caught:
        both.push()
    assert caught.value.status_code in {TIMEOUT, NOT_LINKED}
    end_threads()
    np.testing.assert_array_equal(owned_bytes(both.target), pattern(DESC, 2))


def test_both_push_over_one_link_at_a_time(both):
    manager = both.server.cache_manager
    taken = register_new(both.client.cache_manager, DESC, BlocksCacheKey(1), seed=3)
    source = write_new_blocks(manager, DESC, seed=4)
    errors = []

    def push_there() -> None:
        try:
            for number in range(10):
                manager.push_blocks(BlocksCacheKey(1), source, [0, 1], [number % 2, 1 - number % 2])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=push_there)
    thread.start()
    for number in range(10):
        both.push(number % 2, number % 2)
    thread.join()
    assert not errors
    both.assert_pushed()
    np.testing.assert_array_equal(owned_bytes(taken)[:, ::-1], pattern(DESC, 4))


def test_a_push_that_is_running_keeps_its_link_busy(both):
    both.push()
    link = link_of(both.client, 2)
    back_pushes, states = link._back_pushes, []
    push = back_pushes.push

    def push_and_look(*arguments):
        with fails_with(LLMStatusCode.LLM_LINK_BUSY):
            both.client.check_link_status(2)
        states.append(link.unlink(0))
        push(*arguments)

    back_pushes.push = push_and_look
    both.push(1, 1)
    both.assert_pushed()
    assert states == [LLMStatusCode.LLM_LINK_BUSY]
    del back_pushes.push


def test_a_role_that_has_changed_counts_for_the_next_link(both):
    assert both.unlink(both.client) is SUCCESS
    listen = {"llm.listenIpInfo": f"127.0.0.1:{both.server.listen_port}"}
    both.server.switch_role(LLMRole.PROMPT, listen)
    both.link()
    with fails_with(LLMStatusCode.LLM_PARAM_INVALID):
        both.push()
    both.client.check_link_status(2)
    assert both.unlink(both.client) is SUCCESS
    both.server.switch_role(LLMRole.MIX, listen)
    both.link()
    both.push()
    both.assert_pushed()


# -- a side that has linked, and need not keep to the protocol ---------------------------------------------


@pytest.fixture(params=[LLMRole.PROMPT, LLMRole.MIX])
def server(request):
    with started(request.param, 1, transports="tcp") as side:
        cache = register_new(side.cache_manager, byte_desc(), BlocksCacheKey(1), seed=1)
        yield side
        side.cache_manager.unregister_cache(cache.cache_id)


def open_back_pushes(link: RawDecoder, link_id: int | None = None, key: bytes | None = None):
    connection: socket.socket = connection_to(link.prompt)
    link.streams.append(connection)
    chosen = link.offer.link_id if link_id is None else link_id
    greeting = new_greeting(ConnectionKind.BACK_PUSHES, 0, chosen)
    greet(connection, link.key if key is None else key, greeting, soon())
    return ControlChannel(connection, msgspec.msgpack.Decoder(FromPushReceiver))


def request(model_id: int = 0, block: int = 0) -> PushRequest:
    runs = encode_runs(np.array([block]), np.array([1]))
    return PushRequest(FIRST_TRANSFER, BlocksSource(model_id, 64, runs), 4, 4, None, 64, 5000)


def is_answered(link: RawDecoder) -> bool:
    link.channel.send(CheckLink(), soon())
    return isinstance(link.channel.receive(soon()), LinkChecked)


def test_only_a_mix_lets_those_that_link_push_over_one_connection(server):
    with RawDecoder(server) as link:
        link.request()
        link.offer = link.channel.expect(LinkOffer, soon())
        assert link.offer.takes_pushes is (server.role is LLMRole.MIX)
        with pytest.raises(OSError, match=r"\w"):
            open_back_pushes(link).receive(soon())  # it is not established
    with RawDecoder(server).link() as link:
        for link_id, key in ((link.offer.link_id ^ 1, None), (None, b"x" * 32)):
            with pytest.raises(OSError, match=r"\w"):
                open_back_pushes(link, link_id, key).receive(soon())
        channel = open_back_pushes(link)
        if server.role is LLMRole.MIX:
            with pytest.raises(OSError, match=r"\w"):
                open_back_pushes(link).receive(soon())
            channel.send(request(), soon())
            assert channel.expect(PushAccepted, soon()).transfer_id == FIRST_TRANSFER
        else:
            with pytest.raises(OSError, match=r"\w"):
                channel.receive(soon())
            assert is_answered(link)


@pytest.mark.parametrize("server", [LLMRole.MIX], indirect=True)
@pytest.mark.parametrize("message", [PushesReady(), PushAccepted(1), b"\xff" * 8, None])
def test_a_peer_that_breaks_the_protocol_loses_the_link(server, message):
    with RawDecoder(server).link() as link:
        channel = open_back_pushes(link)
        for wrong in (request(model_id=9), request(block=2), request(block=2**40)):
            channel.send(wrong, soon())
            assert channel.expect(PushRefused, soon()).transfer_id == FIRST_TRANSFER
        assert is_answered(link)
        if message is None:
            channel.shut_down()
        elif isinstance(message, bytes):
            link.streams[-1].send(message)
        else:
            channel.send(message, soon())
        with pytest.raises(OSError, match=r"\w"):
            link.channel.receive(soon())
    end_threads()


@pytest.mark.parametrize("server", [LLMRole.MIX], indirect=True)
def test_a_listener_without_threads_refuses_pushes_and_keeps_the_link(server, monkeypatch):
    class NoThread:
        def __init__(self, **_):
            pass

        def start(self):
            raise RuntimeError("can't start new thread")

    with RawDecoder(server).link() as link:
        with monkeypatch.context() as patch:
            patch.setattr(push_receiver.threading, "Thread", NoThread)
            with pytest.raises(OSError, match=r"\w"):
                open_back_pushes(link).receive(soon())
        assert is_answered(link)
        channel = open_back_pushes(link)
        channel.send(request(model_id=9), soon())
        channel.expect(PushRefused, soon())
