"""Tensor parallelism with real processes: the tokens of one rank, and an end with a reason whatever fails."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import preloaded
from engine_checks import check_after_every_step, core_of, engine_pid, is_zombie, wait_for_end
from quire import LLM, AsyncLLM, EngineConfig, SamplingParams, SchedulerConfig
from quire.config import SupervisionConfig
from quire.engine.core import EngineCore
from quire.engine.ranks import group
from quire.engine.ranks.connecting import GlooCommunicator
from quire.engine.ranks.group import RankGroup
from quire.engine.ranks.leading import LeadingDecoder
from quire.engine.ranks.messages import CopyBlocks, Forward
from quire.engine.ranks.rank_decoder import RankDecoder
from quire.errors import ConfigError, EngineDeadError
from quire.front.arguments import engine_config
from quire.kernels.attention.batch import AttentionBatch
from quire.models.shard import Shard
from subprocesses import python_output, started

pytestmark = pytest.mark.processes

LONG = SamplingParams(max_tokens=450, temperature=0.0, ignore_eos=True)
PROMPTS = ["the cache holds keys", "a", [5, 6, 7] * 20, "of the tokens that were computed before"]


def _params(**others) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "temperature": 0.0, **others})


# What touches the runner in different ways: siblings and beams copy blocks, log-probabilities take several
# calls for logits.
MIXED = [
    _params(logprobs=2),
    _params(prompt_logprobs=1),
    _params(n=3, temperature=1.0, seed=7),
    _params(beam_width=3, n=2, max_tokens=8),
]


@pytest.mark.representative
def test_two_ranks_give_the_tokens_of_one_until_one_is_killed(checkpoint, preloaded_engines):
    # chunks, preemption, drafts, and steps that another thread computes
    settings = {"num_kv_blocks": 14, "max_num_batched_tokens": 16, "num_threads": 1, "overlap_steps": True}
    settings |= {"speculative_method": "ngram"}
    with LLM(checkpoint, **settings) as alone:
        expected = alone.generate(PROMPTS, MIXED)
    with LLM(checkpoint, tensor_parallel_size=2, **settings) as together:
        core = check_after_every_step(core_of(together))
        outputs = together.generate(PROMPTS, MIXED)
        for output, wanted in zip(outputs, expected, strict=True):
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in wanted.outputs]
        again = together.generate(PROMPTS[:1], MIXED[:1])  # from a cached prefix, and in no company
        assert again[0].outputs == outputs[0].outputs
        assert core.stats().num_preemptions
        assert core.stats().num_free_blocks == together.info.num_blocks
        [pid] = core.ranks.pids
        kill_in_step(core, pid, number=3)
        with pytest.raises(EngineDeadError, match=rf"rank 1, the process {pid}, was killed by SIGKILL"):
            together.generate("the", _params(max_tokens=200))
    assert not psutil.pid_exists(pid)


def kill_in_step(core: EngineCore, pid: int, *, number: int) -> None:
    """Kill a rank after it has been told to compute step `number` from now on, and before it has."""
    send, forwards = core.ranks.send, itertools.count(1)

    def send_and_kill(message):
        os.kill(pid, signal.SIGSTOP)
        send(message)
        if isinstance(message, Forward) and next(forwards) == number:
            os.kill(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGCONT)

    core.ranks.send = send_and_kill


def test_an_error_on_another_rank_ends_the_engine_with_its_reason(checkpoint, preloaded_engines):
    with LLM(checkpoint, tensor_parallel_size=2, num_kv_blocks=64, num_threads=1) as llm:
        ranks = core_of(llm).ranks
        ranks.send(CopyBlocks(np.array([[0, 64]], dtype=np.int32), 0))
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=r"rank 1 failed: IndexError.*64"):
                llm.generate("the", LONG)
    assert not any(psutil.pid_exists(pid) for pid in ranks.pids)


def test_an_error_on_rank_0_within_a_step_ends_the_engine(monkeypatch):
    class Decoder:
        def forward(self, *args, **options):
            raise MemoryError("no room")

    class Alone:
        def broadcast(self, tensor):
            pass

    monkeypatch.setattr(group, "CAUSE_WAIT", 0.0)
    ranks = RankGroup(2, timeout=5.0)
    batch = AttentionBatch.build(np.array([0]), np.array([1]), np.array([[0]]), 16)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"rank 0 failed.*MemoryError: no room"):
            LeadingDecoder(Decoder(), Alone(), ranks).forward(torch.tensor([1]), None, batch)
    ranks.close()


def test_a_rank_whose_parent_ended_before_it_looked_ends_though_a_fork_keeps_its_socket_open():
    ours, theirs = socket.socketpair()
    ended = subprocess.Popen(["true"])
    ended.wait()
    command = [sys.executable, "-P", "-m", "quire.engine.ranks.process", str(theirs.fileno()), str(ended.pid)]
    with ours, theirs:
        rank = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        try:
            assert rank.wait(60) == 0
        finally:
            rank.kill()
            rank.wait()


def test_only_rank_0_has_logits_so_that_recordings_keep_none_of_the_others():
    class Halves:
        def logits(self, hidden):
            return hidden @ torch.ones(4, 10)

        def output(self, hidden):
            asked.append(len(hidden))
            return hidden @ torch.ones(4, 5)

    class Alone:
        def broadcast(self, tensor):
            pass

    asked: list[int] = []
    first, second = (
        RankDecoder(Halves(), Alone(), Shard(rank, 2)).logits(torch.ones(3, 4)) for rank in range(2)
    )
    assert first.shape == (3, 10)
    assert second.nbytes == second.untyped_storage().nbytes() == 0
    assert asked == [3]


def test_other_ranks_are_told_all_of_a_step():
    sent = {field.name for field in dataclasses.fields(Forward)}
    assert {"state_numbers", "num_state_tokens"} < sent
    assert {field.name for field in dataclasses.fields(AttentionBatch)} - sent == {
        "is_two_sided",  # refused beside ranks
        "key_scores",
        "others",  # its arrays are in those of the first group
        "plans",
        "sizes",
        "states",  # its arrays are sent, and each rank has states of its own
        "step_arrays",
        "token_types",  # of encoders, which are two-sided
    }


def test_a_rank_that_hangs_ends_the_engine(checkpoint, preloaded_engines):
    settings = {"tensor_parallel_size": 2, "tensor_parallel_timeout": 4.0}  # the start keeps within it, too
    with LLM(checkpoint, num_kv_blocks=64, num_threads=1, **settings) as llm:
        [pid] = core_of(llm).ranks.pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(
            EngineDeadError, match=r"tensor_parallel_timeout, 4 seconds|no sign of life for 4"
        ):
            llm.generate("the", LONG)
    assert not psutil.pid_exists(pid)


async def engine_of_two_ranks(checkpoint) -> tuple[AsyncLLM, int]:
    """An engine that is not recovered, and its process id.

    It has threads by the time that it starts the other rank, which is therefore a real start.
    """
    llm = AsyncLLM(
        EngineConfig(
            model=checkpoint,
            num_threads=1,
            tensor_parallel_size=2,
            scheduler=SchedulerConfig(num_kv_blocks=64),
            supervision=SupervisionConfig(recovery="off"),
        )
    )
    await llm.wait_until_ready()
    return llm, engine_pid()


async def test_an_idle_engine_process_ends_with_a_rank(checkpoint, preloaded_engines):
    llm, engine = await engine_of_two_ranks(checkpoint)
    [rank] = [child.pid for child in psutil.Process(engine).children()]
    os.kill(rank, signal.SIGKILL)
    assert wait_for_end(engine)
    with pytest.raises(EngineDeadError, match=rf"rank 1, the process {rank}, was killed by SIGKILL"):
        await anext(llm.generate("the", LONG))
    with pytest.raises(EngineDeadError, match="rank 1"):
        llm.check_health()
    await llm.shutdown()
    assert not is_zombie(engine)


def wait_until_stopped(pid: int) -> None:
    """Return when all threads of a process are stopped."""
    threads = Path(f"/proc/{pid}/task")
    while not all("(stopped)" in (thread / "status").read_text() for thread in threads.iterdir()):
        time.sleep(0.01)


async def test_a_stopped_rank_ends_with_its_engine(checkpoint, preloaded_engines):
    llm, engine = await engine_of_two_ranks(checkpoint)
    [rank] = [child.pid for child in psutil.Process(engine).children()]
    os.kill(rank, signal.SIGSTOP)
    os.kill(engine, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=rf"{engine} was killed by SIGKILL"):
        await anext(llm.generate("the", LONG))
    assert wait_for_end(rank)
    await llm.shutdown()


FRONT = """
import asyncio, sys
import psutil
from quire import AsyncLLM, EngineConfig, SamplingParams, SchedulerConfig
async def main():
    settings = {"num_threads": 1, "tensor_parallel_size": 2, "scheduler": SchedulerConfig(num_kv_blocks=64)}
    llm = AsyncLLM(EngineConfig(model=sys.argv[1], **settings))
    outputs = llm.generate("the", SamplingParams(max_tokens=450, ignore_eos=True))
    await anext(outputs)
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    async for _ in outputs:
        pass
    await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_neither_engine_nor_rank_outlives_the_front(checkpoint, is_stopped):
    """If one is stopped, the kernel ends both: their process group has nobody who could continue it."""
    command = [sys.executable, "-c", FRONT, checkpoint]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with started(command, preload=True, **pipes) as front:
        pids = [int(pid) for pid in front.stdout.readline().split()]
        assert len(pids) == 2  # engine and rank 1
        if is_stopped:
            os.kill(pids[0], signal.SIGSTOP)
            wait_until_stopped(pids[0])
        os.kill(front.pid, signal.SIGKILL)
        assert all(map(wait_for_end, pids))


def test_a_rank_killed_while_it_starts_is_noticed():
    ranks = RankGroup(3, timeout=5.0)
    os.kill(ranks.pids[1], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=rf"rank 2, the process {ranks.pids[1]}, was killed by SIGKILL"):
        ranks.wait_until_ready()
    with pytest.raises(EngineDeadError, match="rank 2"):
        ranks.send(CopyBlocks(np.empty((0, 2), dtype=np.int32), 0))
    ranks.close()
    assert not any(psutil.pid_exists(pid) for pid in ranks.pids)


def test_ranks_end_with_their_group():
    ranks = RankGroup(2, timeout=5.0)
    [pid] = ranks.pids
    del ranks
    assert wait_for_end(pid)
    assert not is_zombie(pid)


def test_a_communicator_ends_when_the_number_of_its_file_is_another_ones():
    """A store of torch that cannot open its file at its end aborts the process."""
    file = os.memfd_create("of-this-test")
    communicator = GlooCommunicator(Shard(0, 1), file, timeout=5.0)
    os.close(file)
    with socket.socket() as other:
        assert other.fileno() == file
        del communicator
        assert [fd for fd in os.listdir("/proc/self/fd") if "of-this-test" in target_of(fd)] == []


@pytest.mark.parametrize("end", ["del communicator; os._exit(0)", "sys.exit()"])
def test_a_fork_of_a_rank_ends(end):
    program = f"""
import os, sys
from quire.engine.ranks.connecting import GlooCommunicator
from quire.models.shard import Shard
communicator = GlooCommunicator(Shard(0, 1), os.memfd_create("of-this-test"), timeout=5.0)
child = os.fork()
if child:
    print(os.waitpid(child, 0)[1])
else:
    {end}
"""
    assert python_output(program) == "0\n"


def target_of(descriptor: str) -> str:
    """What a descriptor of this process is of; empty: it is closed by now."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


def test_a_shard_that_cannot_be_loaded_is_the_reason(checkpoint, monkeypatch, preloaded_engines):
    start = RankGroup.start

    def with_another_path(ranks, start_of):
        start(ranks, lambda rank: dataclasses.replace(start_of(rank), model_path="/nowhere"))

    monkeypatch.setattr(RankGroup, "start", with_another_path)
    with pytest.raises(EngineDeadError, match=r"rank 1 failed: .*/nowhere"):
        LLM(checkpoint, tensor_parallel_size=2, num_kv_blocks=64, num_threads=1)
    assert not preloaded.other_children()


def test_what_does_not_go_with_several_ranks_is_refused(checkpoint):
    for name, value in (("EngineConfig.kv_connector", "mine.Connector"), ("KVTierConfig.kv_tier", "memory")):
        with pytest.raises(ConfigError, match=rf"tensor_parallel_size is 2 and {name} is '{value}'"):
            engine_config(checkpoint, {"tensor_parallel_size": 2, name.split(".")[1]: value})
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3.*query heads"):
        LLM(checkpoint, tensor_parallel_size=3)
