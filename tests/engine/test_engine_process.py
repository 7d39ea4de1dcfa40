"""Life and death of the engine process: no orphan, no zombie, no file is left on any path."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_checks import TINY, engine_pid, is_zombie, requests_of, tiny_config, wait_for_end
from quire import LLM, AsyncLLM, SamplingParams
from quire.errors import EngineDeadError
from subprocesses import python_output, started

LONG = SamplingParams(max_tokens=450, temperature=0.0, ignore_eos=True)

FRONT = """
import sys, asyncio, os, signal
from quire import LLM, AsyncLLM, SamplingParams, EngineConfig, SchedulerConfig
from engine_checks import engine_pid, tiny_config
model, how = sys.argv[1:]
long = SamplingParams(max_tokens=450, ignore_eos=True)
if how == "launching":
    import zmq
    def pause(socket, address):  # the engine runs, and has not been told what to do
        print(engine_pid(), flush=True)
        signal.pause()
    zmq.Socket.bind = pause
if how in ("launching", "starting"):
    llm = AsyncLLM(tiny_config(model))
    print(engine_pid(), flush=True)
    signal.pause()
async def main():
    llm = AsyncLLM(tiny_config(model))
    stream = llm.generate("the", long)
    await anext(stream)
    print(engine_pid(), flush=True)
    if how == "forked" and not os.fork():
        signal.pause()  # holds the lifeline open
    if how == "exception":
        raise RuntimeError("the front fails")
    if how == "exit":
        sys.exit(0)
    async for output in llm.generate("endless", long):
        pass
    while True:
        async for output in llm.generate("endless", long):
            pass
asyncio.run(main())
"""


@pytest.fixture
def sockets(tmp_path, monkeypatch) -> Path:
    """Where socket directories are made; empty again after the test."""
    directory = tmp_path / "t"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    assert list(directory.iterdir()) == []


@contextlib.contextmanager
def started_front(checkpoint: str, how: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """Start a front process; yields it with the process id of its engine."""
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent.parent}"}
    with started(
        [sys.executable, "-c", FRONT, checkpoint, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
        preload=True,
    ) as front:
        yield front, int(front.stdout.readline())


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("running", signal.SIGKILL),
        ("running", signal.SIGTERM),
        ("running", signal.SIGINT),
        ("launching", signal.SIGKILL),
        ("starting", signal.SIGKILL),
        ("forked", signal.SIGKILL),
        ("exception", None),
        ("exit", None),
    ],
)
def test_the_engine_ends_with_its_front(checkpoint, sockets, how, number):
    with started_front(checkpoint, how) as (front, engine):
        if number is not None:
            os.kill(front.pid, number)
        assert wait_for_end(engine)
        front.wait()


def test_ctrl_c_in_the_terminal_reaches_the_front_alone(checkpoint, sockets):
    """The whole process group gets SIGINT; the engine leaves it to the front what to do."""
    with started_front(checkpoint, "running") as (front, engine):
        os.killpg(front.pid, signal.SIGINT)
        assert wait_for_end(engine)
        assert front.wait() != 0


async def test_requests_of_a_killed_engine_are_answered(checkpoint, sockets, preloaded_engines):
    llm = AsyncLLM(tiny_config(checkpoint))
    streams = [
        llm.generate("the", LONG),
        llm.generate("a", SamplingParams(n=2, max_tokens=450, ignore_eos=True)),
    ]
    for stream in streams:
        await anext(stream)
    pid = engine_pid()
    os.kill(pid, signal.SIGKILL)

    async def outcome(stream):
        async for _ in stream:
            pass

    async with asyncio.timeout(60):
        results = await asyncio.gather(*map(outcome, streams), llm.stats(), return_exceptions=True)
    assert [type(result) for result in results] == [EngineDeadError] * 3
    assert "SIGKILL" in str(results[0])
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        llm.check_health()
    with pytest.raises(EngineDeadError):
        await anext(llm.generate("the"))
    assert not is_zombie(pid)
    await llm.shutdown()


async def test_an_engine_killed_at_start_is_noticed(checkpoint, sockets):
    llm = AsyncLLM(tiny_config(checkpoint))
    pid = engine_pid()
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await llm.wait_until_ready()
    assert not is_zombie(pid)
    await llm.shutdown()


def test_an_engine_process_for_batches(checkpoint, sockets, preloaded_engines):
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    with LLM(checkpoint, **TINY) as here:
        expected = here.generate(["the", "a cache"], params)
    with LLM(checkpoint, engine_process=True, **TINY) as there:
        outputs = there.generate(["the", "a cache"], params)
        assert [one.outputs for one in outputs] == [one.outputs for one in expected]
        with pytest.raises(KeyboardInterrupt):
            interrupt_during(there)
        assert there.generate("the", params)[0].outputs == expected[0].outputs
        assert there.stats().num_free_blocks == there.info.num_blocks
        pid = engine_pid()
        os.kill(pid, signal.SIGTERM)  # meant for the front
        assert there.generate("the", params)[0].outputs == expected[0].outputs
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            there.generate("the", LONG)
    assert not is_zombie(pid)


def interrupt_during(llm: LLM) -> None:
    front = requests_of(llm)
    receive = front.receive

    def interrupted(timeout):
        front.receive = receive
        signal.raise_signal(signal.SIGINT)

    front.receive = interrupted
    llm.generate(["the"] * 3, LONG)


def test_leaving_without_shutdown_ends_the_engine(checkpoint, sockets):
    llm = LLM(checkpoint, engine_process=True, **TINY)
    pid = engine_pid()
    del llm
    assert wait_for_end(pid)
    assert not is_zombie(pid)


def test_an_engine_that_the_garbage_collector_finds_ends(checkpoint):
    program = """
import gc, sys
import psutil
from quire import LLM
cycle = [LLM(sys.argv[1], engine_process=True, num_kv_blocks=32, num_threads=1)]
cycle.append(cycle)
[engine] = psutil.Process().children()
del cycle
gc.collect()
print(engine.is_running())
"""
    assert python_output(program, checkpoint) == "False\n"


def test_the_socket_directory_is_private_and_gone_once_connected(checkpoint, sockets, preloaded_engines):
    llm = LLM(checkpoint, engine_process=True, **TINY)
    (directory,) = sockets.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    llm.wait_until_ready()
    assert list(sockets.iterdir()) == []
    llm.shutdown()
