"""Pulls between two machines whose network is cut, silent, lossy and slow, and what is left behind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import sides
from failing import fails_with
from fault_split import BYSTANDER, DECODER, OPERATIONS, PROMPT, Split
from faults import KINDS, Fault, plan
from network_namespaces import NAMESPACES, Network, enter, network_of, why_not_permitted
from network_switch import resets
from remote_objects import RemoteProcess, remote_process
from remote_sides import notice_soon, wait_for_links_to_end
from sides import byte_desc, pattern, read_cache, write_new_cache

from quire.datadist import CacheKey, LLMStatusCode

pytestmark = pytest.mark.processes

TIMEOUT = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
SUCCESS = LLMStatusCode.LLM_SUCCESS
NOT_TOLD = LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED

PORT = 26000
POOL = 1 << 24
SHORT = 1000  # milliseconds: a time limit that a test waits for
SLACK = 10.0  # seconds that a busy machine may need beyond a time limit
DESC, KEY = byte_desc(1, 1 << 17), CacheKey(1, 5)

needs_namespaces = pytest.mark.skipif(why_not_permitted() is not None, reason=str(why_not_permitted()))


class Sides:
    """A PROMPT and a DECODER that are linked, each in a process on a machine of its own."""

    def __init__(self, network: Network, stack: contextlib.ExitStack, timeout: int) -> None:
        self.network, self.switch = network, network.switch
        self.prompt_process, self.decoder_process = (self._process(name, stack) for name in (PROMPT, DECODER))
        ip = network.machines[PROMPT].address
        self.prompt = self.prompt_process.call(sides.start_prompt, ip=ip, port=PORT, pool=POOL)
        self.decoder = self.decoder_process.call(sides.start_decoder, timeout=timeout, pool=POOL)
        self.pm, self.dm = self.prompt.kv_cache_manager, self.decoder.kv_cache_manager
        self.peer = sides.cluster_info(1, PORT, ip)
        self.target = self.dm.allocate_cache(DESC)

    def _process(self, name: str, stack: contextlib.ExitStack) -> RemoteProcess:
        process = stack.enter_context(remote_process())
        process.call(enter, self.network.machines[name].namespace)
        return process

    def link(self) -> None:
        assert self.decoder.link_clusters([self.peer], sides.PATIENT)[1] == [SUCCESS]

    def bind(self, seed: int) -> None:
        self.prompt_process.call(write_new_cache, self.pm, DESC, [KEY], seed=seed)

    def pull(self) -> None:
        self.dm.pull_cache(KEY, self.target)

    def assert_pulled(self, seed: int) -> None:
        pulled = self.decoder_process.call(read_cache, self.dm, self.target)
        np.testing.assert_array_equal(pulled, pattern(DESC, seed))


@pytest.fixture
def network() -> Iterator[Network]:
    with network_of(PROMPT, DECODER, BYSTANDER) as made:
        yield made


@needs_namespaces
@pytest.mark.parametrize("machine", [PROMPT, DECODER, None])
def test_a_network_that_fails_in_a_pull(network, machine):
    """The link of a machine is cut, which is an error for it; or the network falls silent."""
    with contextlib.ExitStack() as stack:
        both = Sides(network, stack, SHORT)
        both.link()
        both.bind(1)
        network.switch.act_after(1 << 18, network.machines[PROMPT].port, "silence")
        failed = []

        def pull() -> None:
            start = time.monotonic()
            with fails_with(TIMEOUT):
                both.pull()
            failed.append(time.monotonic() - start)

        pulling = threading.Thread(target=pull)
        pulling.start()
        assert network.switch.limit_reached.wait(sides.PATIENT / 1000)
        if machine:
            network.machines[machine].cut()
            network.switch.release()
        pulling.join()
        (seconds,) = failed
        assert seconds < SHORT / 1000 + SLACK
        if machine:
            network.machines[machine].restore()
        network.switch.release()
        assert both.decoder.unlink_clusters([both.peer], SHORT)[1][0] in {SUCCESS, NOT_TOLD}
        both.link()
        both.pull()
        both.assert_pulled(1)


@needs_namespaces
def test_loss_and_delay_change_no_bytes(network):
    with contextlib.ExitStack() as stack:
        both = Sides(network, stack, sides.PATIENT)
        network.switch.delay, network.switch.loss = 0.02, 0.01
        both.link()
        both.bind(1)
        both.pull()
        both.assert_pulled(1)


@needs_namespaces
def test_a_decoder_whose_machine_vanishes(network):
    """It has not acknowledged what was sent to it last: TCP alone would repeat that for minutes."""
    with contextlib.ExitStack() as stack:
        both = Sides(network, stack, SHORT)
        both.prompt_process.call(notice_soon)
        both.link()
        both.bind(1)
        network.switch.act_after(1, network.machines[DECODER].port, "silence behind it")
        both.pull()
        assert network.switch.limit_reached.is_set()
        both.decoder_process.kill()
        assert both.prompt_process.call(wait_for_links_to_end, both.prompt, SLACK)


@needs_namespaces
def test_faults_leave_nothing_behind(network):
    faults = [
        Fault(0, "reset", "pull", "", "data", 0.5, 0.0, 0.0, seed=1),
        Fault(1, "kill unheard", "pull", PROMPT, "data", 0.5, 0.0, 0.0, seed=2),
        Fault(2, "wrong token", "pull", "", "", 0.0, 0.0, 0.0, seed=5),
    ]
    with contextlib.ExitStack() as stack:
        split = Split(network, stack)
        for fault in faults:
            split.run(fault)
        split.close()
    assert split.counts["pulls failed"] >= 2
    assert split.counts["right"] > len(faults)


@pytest.mark.representative
def test_a_plan_follows_from_its_seed():
    first, again, other = (
        list(plan(seed, 300, PROMPT, DECODER, operations=OPERATIONS)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert {fault.kind for fault in first} == set(KINDS)
    assert len({str(fault) for fault in first}) == 300


@needs_namespaces
def test_a_network_is_removed_whatever_happens():
    before = set(NAMESPACES.glob("*")), set(Path("/sys/class/net").iterdir())

    def fail() -> None:
        with network_of("one", "other"):
            assert len(set(NAMESPACES.glob("*")) - before[0]) == 2
            raise ValueError("whatever")

    with pytest.raises(ValueError, match="whatever"):
        fail()
    assert (set(NAMESPACES.glob("*")), set(Path("/sys/class/net").iterdir())) == before


@pytest.mark.representative
def test_the_frames_of_a_reset():
    ethernet = bytes(range(6)) + bytes(range(10, 16)) + b"\x08\x00"
    addresses = bytes([10, 83, 0, 1, 10, 83, 0, 2])
    packet = b"\x45\x00" + (40 + 3).to_bytes(2, "big") + bytes(4) + b"\x40\x06\x00\x00" + addresses
    segment = b"\x65\x90\x80\x01" + (7).to_bytes(4, "big") + (9).to_bytes(4, "big") + b"\x50\x18" + bytes(6)
    onwards, back = resets(ethernet + packet + segment + b"abc")
    for frame, ports in ((onwards, b"\x65\x90\x80\x01"), (back, b"\x80\x01\x65\x90")):
        assert frame[34:38] == ports
        assert frame[47] == 0x14  # RST and ACK
        pseudo_header = frame[26:34] + b"\x00\x06\x00\x14"
        assert folded_sum(frame[14:34]) == folded_sum(pseudo_header + frame[34:]) == 0xFFFF
    assert (onwards[38:42], back[38:42]) == (segment[4:8], segment[8:12])


def folded_sum(data: bytes) -> int:
    """Return the sum of 16-bit numbers in ones' complement, which is all ones if a checksum is right."""
    total = sum(int.from_bytes(data[index : index + 2], "big") for index in range(0, len(data), 2))
    return (total & 0xFFFF) + (total >> 16)
