"""The transport over NIXL, with a stand-in for the library that may raise, hang or lie in every call."""

from __future__ import annotations

import contextlib
import gc
import socket
import time

import numpy as np
import pytest
import sides
from failing import fails_with
from fake_nixl import FakeNixl
from sides import byte_desc, link_of, pattern, read_cache, write_new_blocks, write_new_cache

from quire.datadist import (
    BlocksCacheKey,
    CacheKey,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from quire.datadist.caches.memory import HostMemory
from quire.datadist.caches.spans import block_spans
from quire.datadist.transports import nixl, nixl_agent
from quire.datadist.wire.protocol import ControlChannel, ProtocolError, encode_runs

KEY = BlocksCacheKey(1)
SUCCESS = LLMStatusCode.LLM_SUCCESS
OPENING = ("open_agent", "get_reg_descs", "get_partial_agent_metadata", "add_remote_agent")
PULLING = (
    "register_memory",
    "get_partial_agent_metadata",
    "add_remote_agent",
    "prep_xfer_dlist",
    "make_prepped_xfer",
    "transfer",
    "check_xfer_state",
    "release_xfer_handle",
    "release_dlist_handle",
)


@pytest.fixture
def fake(monkeypatch):
    made = FakeNixl()
    monkeypatch.setattr(nixl_agent, "open_agent", made.open_agent)
    monkeypatch.setattr(nixl_agent, "is_installed", lambda: True)
    monkeypatch.setattr(nixl_agent, "GRACE", 0.05)
    monkeypatch.setattr(nixl_agent, "CLOSE_LIMIT", 0.05)
    monkeypatch.setattr(nixl, "OPEN_LIMIT", 0.3)
    monkeypatch.setattr(nixl, "READ_BYTES", 100)  # several reads for a pull
    yield made
    made.released.set()


class NixlPair:
    def __init__(self, stack, transports="nixl", timeout=sides.PATIENT, checksum="1"):
        self.prompt, self.decoder = LLMDataDist(LLMRole.PROMPT, 1), LLMDataDist(LLMRole.DECODER, 2)
        extra = {"quire.transports": transports, "quire.checksum": checksum}
        for side, listen in ((self.prompt, "127.0.0.1:0"), (self.decoder, None)):
            side.init(sides.options(listen=listen, timeout=timeout) | extra)
            stack.callback(side.finalize)
        self.pm, self.dm = self.prompt.kv_cache_manager, self.decoder.kv_cache_manager
        self.desc = byte_desc(6, 64, 2)
        self.source = write_new_blocks(self.pm, self.desc, KEY, seed=1)
        self.target = self.dm.allocate_blocks_cache(self.desc)

    def link(self, timeout=sides.PATIENT):
        return self.decoder.link_clusters([sides.cluster_info(1, self.prompt.listen_port)], timeout)[0]

    def relink(self):
        info = LLMClusterInfo()
        info.remote_cluster_id = 1
        self.decoder.unlink_clusters([info], 5000)
        assert self.link() is SUCCESS

    def pull(self):
        self.dm.pull_blocks(KEY, self.target, [4, 5, 1, 0], [0, 1, 2, 4])

    def has_arrived(self):
        expected = pattern(self.desc, 1)[:, [4, 5, 1, 0]]
        return bool((read_cache(self.dm, self.target)[:, [0, 1, 2, 4]] == expected).all())

    @property
    def transport(self):
        return link_of(self.decoder).transport


@pytest.fixture
def new_pair(fake):
    with contextlib.ExitStack() as stack:
        yield lambda **settings: NixlPair(stack, **settings)


@pytest.fixture
def pair(new_pair):
    made = new_pair()
    assert made.link() is SUCCESS
    return made


def fail(*_):
    raise RuntimeError("no such device")


@pytest.mark.parametrize("checksum", ["0", "1"])
@pytest.mark.parametrize("is_slow", [False, True])
def test_pulls_over_nixl(fake, new_pair, is_slow, checksum):
    fake.is_slow = is_slow
    pair = new_pair(checksum=checksum)
    assert pair.link() is SUCCESS
    assert pair.transport == "nixl"
    for _ in range(2):
        pair.pull()
        assert pair.has_arrived()
        write = np.zeros(read_cache(pair.dm, pair.target).shape, dtype=np.uint8)
        sides.byte_view(pair.dm, pair.target, 0).copy_(sides.torch.from_numpy(write[0]))
    assert all(not agent.handles for agent in fake.agents.values())


def test_memory_is_registered_once_and_until_it_is_released(fake, pair):
    keys = [CacheKey(1, 5), CacheKey(1, 6)]
    cache = write_new_cache(pair.pm, byte_desc(), keys, seed=2)
    target = pair.dm.allocate_cache(byte_desc(1))
    assert fake.num_regions == 0
    for key in keys:
        pair.dm.pull_cache(key, target)
        assert fake.num_regions == 2
    pair.pm.deallocate_cache(cache)
    del cache
    gc.collect()
    pair.pull()  # after the calls that deregister
    assert fake.num_regions == 3
    pair.decoder.finalize()
    assert fake.num_regions == 1
    pair.prompt.finalize()
    assert fake.num_regions == 0


def test_memory_at_the_address_of_a_released_cache_is_another_region(pair):
    target = pair.dm.allocate_cache(byte_desc())
    for number in range(5):
        key = CacheKey(1, number)
        pair.pm.deallocate_cache(write_new_cache(pair.pm, byte_desc(), [key], seed=number))
        pair.dm.pull_cache(key, target)
        np.testing.assert_array_equal(read_cache(pair.dm, target)[:, 0], pattern(byte_desc(), number)[:, 0])
        gc.collect()


def test_memory_that_cannot_be_deregistered_is_reported(fake, pair, caplog):
    target = pair.dm.allocate_cache(byte_desc())
    with fake.fault("deregister_memory", fail):
        pair.pm.deallocate_cache(write_new_cache(pair.pm, byte_desc(), [CacheKey(1, 5)], seed=2))
        pair.dm.pull_cache(CacheKey(1, 5), target)
        gc.collect()
        pair.pull()  # after the call that deregisters
    assert "cannot deregister a cache: no such device" in caplog.text


@pytest.mark.parametrize("method", OPENING)
def test_tcp_is_used_where_nixl_raises_while_linking(fake, new_pair, method):
    pair = new_pair(transports="nixl,tcp")
    with fake.fault(method, fail):
        assert pair.link() is SUCCESS
    assert pair.transport == "tcp"
    pair.pull()
    assert pair.has_arrived()
    pair.relink()
    assert pair.transport == "nixl"


@pytest.mark.parametrize("method", OPENING[:-1])
def test_tcp_is_used_where_nixl_hangs_on_the_prompt(fake, new_pair, method):
    pair = new_pair(transports="nixl,tcp")
    with fake.fault(method, fake.hang):
        assert pair.link() is SUCCESS
    assert pair.transport == "tcp"


def test_linking_keeps_its_deadline_where_nixl_hangs_on_the_decoder(fake, new_pair):
    pair = new_pair()
    with fake.fault("add_remote_agent", fake.hang):
        assert pair.link(300) in (LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)


@pytest.mark.parametrize("method", PULLING)
def test_a_pull_in_which_nixl_raises_fails_and_the_next_link_works(fake, pair, method):
    fake.is_slow = True
    with fake.fault(method, fail), fails_with(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT):
        pair.pull()
    with fails_with(LLMStatusCode.LLM_NOT_YET_LINK):
        pair.pull()
    pair.relink()
    pair.pull()
    assert pair.has_arrived()


@pytest.mark.parametrize("method", ["prep_xfer_dlist", "transfer", "check_xfer_state", "release_xfer_handle"])
def test_a_destination_to_which_nixl_may_still_write_is_refused(fake, new_pair, method):
    fake.is_slow = True
    pair = new_pair(timeout=500)
    assert pair.link() is SUCCESS
    with fake.fault(method, fake.hang), fails_with(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT):
        pair.pull()
    pair.relink()
    with fails_with(LLMStatusCode.LLM_FAILED):
        pair.pull()
    pair.target = pair.dm.allocate_blocks_cache(pair.desc)
    pair.pull()
    assert pair.has_arrived()


def test_a_hang_of_the_prompt_s_agent_ends_its_links_and_tcp_takes_over(fake, new_pair):
    pair = new_pair(transports="nixl,tcp", timeout=1000)
    assert pair.link() is SUCCESS
    with fake.fault("get_new_notifs", fake.hang), fake.fault("prep_xfer_dlist", fail):
        with fails_with(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT):
            pair.pull()
        assert fake.hangs.wait(sides.PATIENT / 1000)
        pair.relink()
    pair.pull()
    assert pair.has_arrived()


def test_nothing_is_written_after_a_read_that_did_not_end_in_time(fake, new_pair):
    pair = new_pair(timeout=300)
    assert pair.link() is SUCCESS
    fake.is_slow = True
    with (
        fake.fault("check_xfer_state", lambda *_: "PROC"),
        fails_with(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT),
    ):
        pair.pull()
    assert len(fake.agents) == 1  # the DECODER's has ended, and its reads with it
    pair.relink()
    pair.pull()
    assert pair.has_arrived()


@pytest.mark.parametrize("answer", ["ERR", None, "done"])
def test_only_done_is_success(fake, pair, answer):
    with (
        fake.fault("transfer", lambda *_: answer),
        fails_with(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT),
    ):
        pair.pull()


def test_a_read_that_nixl_only_claims_is_found_by_its_checksum(fake, pair):
    with fake.fault("transfer", lambda *_: "DONE"), pytest.raises(LLMException, match="wrong checksum"):
        pair.pull()


def test_a_region_of_another_agent_is_refused(fake, pair):
    with (
        fake.fault("add_remote_agent", lambda *_: "somebody"),
        pytest.raises(LLMException, match="belongs to the agent 'somebody'"),
    ):
        pair.pull()


def test_init_says_that_nixl_is_not_installed(monkeypatch):
    monkeypatch.setattr(nixl_agent, "is_installed", lambda: False)
    side = LLMDataDist(LLMRole.DECODER, 1)
    with pytest.raises(LLMException, match=r"quire\[cluster\]"):
        side.init(sides.options(transport="nixl"))


BLOCK = 64
TARGET = block_spans(range(2), np.array([1]), np.array([2]), BLOCK)


def read_source(**changes):
    fields = {
        "transfer_id": 7,
        "region": 1,
        "metadata": b"",
        "kind": "DRAM",
        "device": 0,
        "addresses": [1 << 20, 1 << 21],
        "tensor_bytes": 4 * BLOCK,
        "spans": encode_runs(np.array([BLOCK]), np.array([2 * BLOCK])),
    }
    return nixl.ReadSource(**(fields | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer_id": 8},
        {"tensor_bytes": 3 * BLOCK - 1},
        {"addresses": [1 << 20]},
        {"addresses": [2**64 - 1, 0]},
        {"spans": b""},
        {"spans": encode_runs(np.array([-1]), np.array([2 * BLOCK]))},
        {"spans": encode_runs(np.array([0]), np.array([BLOCK]))},
        {"spans": encode_runs(np.array([0, 0]), np.array([3 * BLOCK, -BLOCK]))},
        {"spans": encode_runs(np.array([2**62]), np.array([2**62])), "tensor_bytes": 2**63 - 1},
        {
            "spans": encode_runs(np.zeros(5), np.array([2**62, 2**62, 2**62, 2**62, 2 * BLOCK])),
            "tensor_bytes": 2**63 - 1,
        },
    ],
)
def test_a_source_that_cannot_be_is_refused(fake, changes):
    with _destination_end() as (end, prompt, _):
        prompt.send(read_source(**changes), time.monotonic() + 5)
        with pytest.raises(ProtocolError):
            end.receive(7, HostMemory(byte_desc(4, BLOCK, 2)), TARGET, time.monotonic() + 5)
    assert not any(agent.known for agent in fake.agents.values())


def test_what_was_read_does_not_count_unless_it_was_held(fake):
    memory, target = HostMemory(byte_desc(4, BLOCK, 2)), HostMemory(byte_desc(4, BLOCK, 2))
    with _destination_end() as (end, prompt, theirs):
        agent = nixl_agent.NixlAgent(time.monotonic() + 5)
        theirs.connect(agent.connection(time.monotonic() + 5), time.monotonic() + 5)
        region = agent.register(memory, time.monotonic() + 5)
        source = read_source(region=region.number, metadata=region.data, addresses=memory.addresses())
        prompt.send(source, time.monotonic() + 5)
        prompt.send(nixl.SourceHeld(8, 0), time.monotonic() + 5)
        with pytest.raises(ProtocolError, match="transfer 8"):
            end.receive(7, target, TARGET, time.monotonic() + 5)
        agent.close()


@contextlib.contextmanager
def _destination_end():
    mine, theirs = socket.socketpair()
    for one in (mine, theirs):
        one.setblocking(False)
    agent = nixl_agent.NixlAgent(time.monotonic() + 5)
    end = nixl.NixlDestinationEnd(agent, mine, use_checksum=True)
    prompt = ControlChannel(theirs, None)  # it does not receive
    yield end, prompt, agent
    prompt.close()
    end.close()


def test_registered_memory_is_forgotten_before_it_is_given_back(fake, pair):
    target = sides.register_new(pair.dm, pair.desc, seed=3)
    pair.dm.pull_blocks(KEY, target, [4, 5], [0, 1])
    np.testing.assert_array_equal(sides.owned_bytes(target)[:, :2], pattern(pair.desc, 1)[:, 4:])
    before = fake.num_regions
    pair.dm.unregister_cache(target.cache_id)
    assert fake.num_regions == before - 1
    target = sides.register_new(pair.dm, pair.desc, seed=3)
    pair.dm.pull_blocks(KEY, target, [4, 5], [0, 1])
    with fake.fault("deregister_memory", fail), fails_with(LLMStatusCode.LLM_FAILED):
        pair.dm.unregister_cache(target.cache_id)
    target = sides.register_new(pair.dm, pair.desc, seed=3)
    pair.dm.pull_blocks(KEY, target, [4, 5], [0, 1])
    pair.decoder.unlink_clusters([sides.cluster_info(1, 0)], 5000)
    pair.dm.unregister_cache(target.cache_id)
    assert fake.num_regions == 1  # the source


def test_a_push_is_read_by_the_decoder(fake, pair):
    target = sides.register_new(pair.dm, pair.desc, BlocksCacheKey(2), seed=3)
    pair.pm.push_blocks(BlocksCacheKey(2), pair.source, [4, 1], [0, 5])
    np.testing.assert_array_equal(sides.owned_bytes(target)[:, [0, 5]], pattern(pair.desc, 1)[:, [4, 1]])
    pair.pull()
    assert pair.has_arrived()
    with fake.fault("transfer", fail), fails_with(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT):
        pair.pm.push_blocks(BlocksCacheKey(2), pair.source, [4, 1], [0, 5])
    with fails_with(LLMStatusCode.LLM_NOT_YET_LINK):
        pair.pm.push_blocks(BlocksCacheKey(2), pair.source, [4, 1], [0, 5])
    pair.relink()
    pair.pm.push_blocks(BlocksCacheKey(2), pair.source, [2], [2])
    np.testing.assert_array_equal(sides.owned_bytes(target)[:, 2], pattern(pair.desc, 1)[:, 2])
