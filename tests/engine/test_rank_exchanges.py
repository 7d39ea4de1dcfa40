"""What ranks exchange, through gloo and as on GPUs: a stand-in for NCCL moves bytes, and nobody waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from call_through import call_through
from descriptors import num_open, wait_until_closed
from engine_checks import core_of, wait_for_end
from nccl_stand_in import NcclStandIn
from quire import LLM
from quire.engine.ranks import nccl, starting, watch
from quire.engine.ranks.connecting import GlooCommunicator, communicator_on
from quire.engine.ranks.group import RankGroup, with_gpu
from quire.engine.ranks.leading import LeadingDecoder
from quire.engine.ranks.nccl import NcclCommunicator
from quire.engine.ranks.process_group import GroupCommunicator
from quire.engine.stepping import SerialStepper
from quire.errors import EngineDeadError, ExchangeError
from quire.kernels.attention.batch import AttentionBatch
from quire.models.shard import Shard

SIZE = 3


class LatePoint:
    made: ClassVar[list[LatePoint]] = []

    def __init__(self) -> None:
        self.is_reached = False
        self.made.append(self)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[NcclStandIn]]:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclStandIn, raising=False)
    monkeypatch.setattr(nccl, "DevicePoint", LatePoint)
    monkeypatch.setattr(nccl, "is_capturing", lambda: False)
    yield NcclStandIn
    NcclStandIn.made.clear()
    LatePoint.made.clear()
    os.environ.pop(nccl.BLOCKING_WAIT, None)  # ranks of one process undo each other's changes


def connected(kind: type[GroupCommunicator], size: int = SIZE) -> list[Any]:
    file = os.memfd_create("rendezvous-of-this-test")
    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(lambda rank: kind(Shard(rank, size), file, timeout=20.0), range(size)))
    os.close(file)
    return found


def on_all(communicators: list[Any], call: Callable[[int, Any], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(communicators)) as threads:
        return list(threads.map(call, range(len(communicators)), communicators))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("kind", [GlooCommunicator, NcclCommunicator])
def test_parts_come_in_the_order_of_the_ranks_with_all_their_bits(kind: type[GroupCommunicator]) -> None:
    communicators = connected(kind)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        generator = torch.Generator().manual_seed(1)
        parts = [(torch.randn(4, 6, generator=generator) * 100).to(dtype) for _ in range(SIZE)]
        strided = [torch.cat([part, part], dim=1)[:, :6] for part in parts]  # not contiguous
        for found in on_all(
            communicators, lambda rank, each, strided=strided: each.all_gather(strided[rank])
        ):
            assert len(found) == SIZE
            assert all(torch.equal(one, part) for one, part in zip(found, parts, strict=True))
        gathered = on_all(communicators, lambda rank, each, strided=strided: each.gather(strided[rank]))
        assert all(torch.equal(one, part) for one, part in zip(gathered[0], parts, strict=True))
        assert gathered[1:] == [[]] * (SIZE - 1)
        told = [part.clone() for part in parts]
        on_all(communicators, lambda rank, each, told=told: each.broadcast(told[rank]))
        assert all(torch.equal(each, parts[0]) for each in told)


def test_exchanges_on_a_device_are_timed_on_rank_0(
    stand_in: type[NcclStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    communicators = connected(NcclCommunicator, 2)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    leader = communicators[0]
    assert leader.seconds_waiting() == 0.0
    for _ in range(2):
        on_all(communicators, lambda rank, each: each.broadcast(torch.zeros(3)))
        now[0] += 5
    assert len(LatePoint.made) == 2  # none of rank 1, where nobody asks for them
    assert leader.seconds_waiting() == 10.0
    LatePoint.made[0].is_reached = True
    assert leader.seconds_waiting() == 5.0
    LatePoint.made[1].is_reached = True
    assert leader.seconds_waiting() == 0.0
    monkeypatch.setattr(nccl, "is_capturing", lambda: True)
    on_all(communicators, lambda rank, each: each.all_gather(torch.zeros(3)))
    assert len(LatePoint.made) == 2  # what is only captured does not take place


def test_a_call_that_does_not_return_is_timed(
    stand_in: type[NcclStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While steps are captured, ranks may wait for each other on the host."""
    [leader] = connected(NcclCommunicator, 1)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found = []

    def wait(group: NcclStandIn, exchange: Callable[[], None]) -> None:
        now[0] += 7
        found.append(leader.seconds_waiting())
        raise RuntimeError("NCCL communicator was aborted")

    monkeypatch.setattr(NcclStandIn, "do", wait)
    monkeypatch.setattr(nccl, "is_capturing", lambda: True)
    with pytest.raises(ExchangeError, match="was aborted"):
        leader.broadcast(torch.zeros(3))
    assert [*found, leader.seconds_waiting()] == [7.0, 0.0]


@pytest.mark.usefixtures("stand_in")
def test_exchanges_of_replayed_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    [communicator] = connected(NcclCommunicator, 1)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    model = LeadingDecoder(Mock(), communicator, Mock(size=2))
    with model.whole_step(AttentionBatch.build(np.zeros(1), np.ones(1), np.zeros((1, 1)), 16), None):
        assert not LatePoint.made
    now[0] += 5
    assert communicator.seconds_waiting() == 5.0
    LatePoint.made[0].is_reached = True
    assert communicator.seconds_waiting() == 0.0


def test_exchanges_that_are_aborted_raise(stand_in: type[NcclStandIn]) -> None:
    [communicator] = connected(NcclCommunicator, 1)
    assert nccl.BLOCKING_WAIT not in os.environ
    for _ in range(2):
        communicator.abort()
    assert stand_in.made[0].is_aborted.wait(20)
    with pytest.raises(ExchangeError, match="was aborted"):
        communicator.broadcast(torch.zeros(3))


def test_a_communicator_that_ends_aborts_and_closes_its_file(stand_in: type[NcclStandIn]) -> None:
    before = num_open()
    [communicator] = connected(NcclCommunicator, 1)
    group = stand_in.made.pop()
    del communicator
    assert group.is_aborted.wait(20)
    del group
    wait_until_closed(before)


def test_a_communicator_may_end_with_the_interpreter(
    stand_in: type[NcclStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    [communicator] = connected(NcclCommunicator, 1)
    file, group = communicator._file, stand_in.made.pop()

    def refuse(thread):
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    communicator.abort()
    assert group.is_aborted.is_set()
    del communicator, group
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_ranks_that_do_not_come_are_an_error(stand_in: type[NcclStandIn]) -> None:
    file = os.memfd_create("of-this-test")
    with pytest.raises(ExchangeError):
        communicator_on(torch.device("cuda"), Shard(0, 2), file, timeout=0.2)
    os.close(file)


class StalledExchanges:
    def __init__(self, seconds: float | Exception = 0.0) -> None:
        self.seconds = seconds
        self.num_aborts = 0
        self.aborted = threading.Event()

    def seconds_waiting(self) -> float:
        if isinstance(self.seconds, Exception):
            raise self.seconds
        return self.seconds

    def abort(self) -> None:
        self.num_aborts += 1
        self.aborted.set()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    monkeypatch.setattr(watch, "LAP", 0.05)
    group = RankGroup(2, timeout=60.0)
    yield group
    group.close()


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [
        (60.5, "longer than tensor_parallel_timeout, 60 seconds"),
        (RuntimeError("CUDA error: 700"), "the device of rank 0 failed: CUDA error: 700"),
    ],
)
def test_an_exchange_that_does_not_end_is_a_failure(
    ranks: RankGroup, seconds: float | Exception, reason: str
) -> None:
    exchanges = StalledExchanges(59.0)
    ranks.watch_exchanges(exchanges)
    assert not exchanges.aborted.wait(0.2)
    ranks.raise_failure()
    exchanges.seconds = seconds
    assert exchanges.aborted.wait(20)
    with pytest.raises(EngineDeadError, match=reason):
        ranks.raise_failure()


def test_exchanges_with_a_rank_that_has_ended_are_aborted(ranks: RankGroup) -> None:
    exchanges, later = StalledExchanges(), StalledExchanges()
    ranks.watch_exchanges(exchanges)
    os.kill(ranks.pids[0], signal.SIGKILL)
    assert exchanges.aborted.wait(20)
    ranks.watch_exchanges(later)  # connected too late
    assert later.num_aborts == 1
    with pytest.raises(EngineDeadError, match=r"rank 1, the process .*, was killed by SIGKILL"):
        ranks.raise_failure()


def test_exchanges_end_with_their_ranks() -> None:
    ranks, exchanges = RankGroup(2, timeout=60.0), StalledExchanges()
    ranks.watch_exchanges(exchanges)
    ranks.close()
    assert exchanges.num_aborts == 1


def test_a_rank_that_ends_while_the_others_connect_is_why_they_do_not(
    ranks: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL may wait for it for ever."""
    never = threading.Event()
    monkeypatch.setattr(
        "quire.engine.ranks.connecting.communicator_on", lambda *args, **options: never.wait()
    )
    os.kill(ranks.pids[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
        starting._communicator(torch.device("cuda"), Shard(0, 2), ranks)
    never.set()
    assert wait_for_end(ranks.pids[0])


def test_what_a_step_gives_after_a_failure_is_nobody_s(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs a step goes on after its exchanges were aborted, with numbers that mean nothing."""
    with LLM(checkpoint, num_kv_blocks=64, num_threads=1) as llm:
        core = core_of(llm)
        failures = []

        def fails_late(step: Callable[[SerialStepper], Any], stepper: SerialStepper) -> Any:
            outputs = step(stepper)
            failures.append(outputs)
            return outputs

        def raise_failure():
            if failures:
                raise EngineDeadError("rank 1 failed")

        call_through(monkeypatch, SerialStepper, "step", fails_late)
        core.ranks = Mock(raise_failure=raise_failure)
        with pytest.raises(EngineDeadError, match="rank 1 failed"):
            llm.generate("the")
        assert len(failures) == 1


@pytest.mark.parametrize(
    ("shown", "number", "expected"),
    [(None, 1, "1"), ("2,3", 1, "3"), ("GPU-ab, GPU-cd", 1, "GPU-cd"), ("5", 0, "5")],
)
def test_a_rank_sees_its_gpu_only(shown: str | None, number: int, expected: str) -> None:
    environment = {"HOME": "/", **({} if shown is None else {"CUDA_VISIBLE_DEVICES": shown})}
    assert with_gpu(number, environment) == {"HOME": "/", "CUDA_VISIBLE_DEVICES": expected}
