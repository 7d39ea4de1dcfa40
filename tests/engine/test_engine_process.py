"""Life and death of the engine process: no orphan, no zombie, no file is left on any path."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

import preloaded
from call_through import call_through
from descriptors import num_open, wait_until_closed
from engine_checks import TINY, engine_pid, is_zombie, requests_of, tiny_config, wait_for_end
from insides import supervised, supervised_pid
from quire import LLM, AsyncLLM, SamplingParams
from quire.config import SpeculationConfig, SupervisionConfig
from quire.engine.messages import GetStats, Ready, StepOutputs, encode, input_address, output_address
from quire.engine.process import main as process
from quire.engine.process.main import Connection
from quire.errors import ConfigError, EngineDeadError, ModelError
from quire.front.process import standby, supervision
from quire.front.process.client import EngineProcess
from quire.structured_outputs import StructuredOutputsParams
from subprocesses import python_output, started

pytestmark = pytest.mark.processes

LONG = SamplingParams(max_tokens=450, temperature=0.0, ignore_eos=True)

FRONT = """
import sys, asyncio, dataclasses, os, signal
import preloaded
from quire import LLM, AsyncLLM, SamplingParams, EngineConfig, SchedulerConfig
from quire.config import SupervisionConfig
from insides import supervised_pid
from quire.front.process import standby
from engine_checks import engine_pid, tiny_config
model, how = sys.argv[1:]
long = SamplingParams(max_tokens=450, ignore_eos=True)
standby.START_DELAY = 0.0
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
    supervision = SupervisionConfig(standby_engine=how.endswith("standby"))
    llm = AsyncLLM(dataclasses.replace(tiny_config(model), supervision=supervision))
    stream = llm.generate("the", long)
    await anext(stream)
    if how.endswith("standby"):
        engine = supervised_pid(llm)
        async for output in llm.generate("endless", long):
            standbys = [child.pid for child in preloaded.other_children() if child.pid != engine]
            if standbys:
                break
        print(*standbys, flush=True)  # while it imports
        if how == "forked standby" and not os.fork():
            signal.pause()
    else:
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
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
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
        ("standby", signal.SIGKILL),
        ("forked standby", signal.SIGKILL),
        ("exception", None),
        ("exit", None),
    ],
)
def test_the_engine_and_its_standby_end_with_their_front(checkpoint, sockets, how, number):
    with started_front(checkpoint, how) as (front, engine):
        if number is not None:
            os.kill(front.pid, number)
        assert wait_for_end(engine)
        front.wait()


KINDS = {
    "memory tier": {"kv_tier": "memory", "kv_tier_size": 0.01},
    "disk tier": {"kv_tier": "disk", "kv_tier_size": 0.01},
    "lender": {"role": "prefill", "kv_transfer_host": "127.0.0.1", "kv_transfer_token": "of all"},
}

FRONT_OF_KIND = """
import sys, asyncio, json, psutil
from quire import AsyncLLM, SamplingParams
from quire.front.arguments import engine_config
from quire.structured_outputs import StructuredOutputsParams
async def main():
    options = json.loads(sys.argv[2])
    llm = AsyncLLM(engine_config(sys.argv[1], {"num_threads": 1, "num_kv_blocks": 64, **options}))
    regex = StructuredOutputsParams(regex="[a-z ]{400,450}")
    stream = llm.generate("the", SamplingParams(max_tokens=450, structured_outputs=regex))
    await anext(stream)
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_an_engine_has_started_ends_with_its_front(checkpoint, sockets, tmp_path, kind):
    """Engine and grammar process; the fixture sees sockets and temporary files."""
    options = dict(KINDS[kind])
    if options.get("kv_tier") == "disk":
        options["kv_tier_path"] = str(tmp_path / "tier")
    with started(
        [sys.executable, "-c", FRONT_OF_KIND, checkpoint, json.dumps(options)],
        stdout=subprocess.PIPE,
        text=True,
        preload=True,
    ) as front:
        children = list(map(int, front.stdout.readline().split()))
        front.kill()
        assert len(children) >= 2
        assert all(map(wait_for_end, children))


def test_ctrl_c_in_the_terminal_reaches_the_front_alone(checkpoint, sockets):
    """The whole process group gets SIGINT; the engine leaves it to the front what to do."""
    with started_front(checkpoint, "running") as (front, engine):
        os.killpg(front.pid, signal.SIGINT)
        assert wait_for_end(engine)
        assert front.wait() != 0


@pytest.mark.parametrize(
    ("recovery", "reason"),
    [
        ("off", "SIGBUS: a file that it had mapped into memory, .* was truncated"),
        ("on", r"model\.safetensors cannot be read"),  # by the engine that is to replace it
    ],
)
def test_a_model_that_is_truncated_under_its_engine_is_named_as_the_cause(
    checkpoint, sockets, preloaded_engines, tmp_path, recovery, reason
):
    model = shutil.copytree(checkpoint, tmp_path / "model")
    with LLM(str(model), engine_process=True, recovery=recovery, max_engine_crashes=3, **TINY) as llm:
        llm.generate(["the"], SamplingParams(max_tokens=1))
        os.truncate(model / "model.safetensors", 0)
        with pytest.raises(EngineDeadError, match=reason):
            llm.generate(["the"], LONG)


def slow_config(checkpoint, **scheduler):
    """Return a configuration with which requests last for as long as `slow_steps` is there."""
    config = tiny_config(checkpoint, **scheduler)
    return dataclasses.replace(config, scheduler_cls="engine_schedulers.SlowScheduler")


async def test_without_recovery_requests_of_a_killed_engine_fail(
    checkpoint, sockets, preloaded_engines, slow_steps
):
    slow_steps.touch()
    config = slow_config(checkpoint)
    llm = AsyncLLM(dataclasses.replace(config, supervision=SupervisionConfig(recovery="off")))
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


MIXED = [
    SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=60, seed=1, n=3, ignore_eos=True),
    SamplingParams(max_tokens=60, seed=2, n=2, best_of=3, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(max_tokens=60, seed=3, structured_outputs=StructuredOutputsParams(regex="[ab]{40,50}")),
    SamplingParams(max_tokens=30, beam_width=3, n=2, ignore_eos=True),
]


@pytest.mark.representative
async def test_a_crash_and_a_hang_are_pauses(checkpoint, sockets, preloaded_engines, slow_steps, capfd):
    """Same texts, tokens and log-probabilities as without; a hang leaves stacks in the log."""
    prompts = [f"the cache holds {name} " * 5 for name in "abcde"]
    slow_steps.touch()
    config = slow_config(checkpoint, max_num_batched_tokens=48)
    with LLM(checkpoint, **TINY) as undisturbed:
        expected = undisturbed.generate(prompts, MIXED)
    llm = AsyncLLM(
        dataclasses.replace(
            config,
            speculation=SpeculationConfig(speculative_method="ngram"),
            supervision=SupervisionConfig(watchdog_timeout=2.0, max_request_crashes=3),
        )
    )
    await llm.wait_until_ready()
    num_descriptors = num_open()
    some_output = asyncio.Event()

    async def last_of(stream):
        async for output in stream:
            some_output.set()
            last = output
        return last

    async with asyncio.timeout(90):
        tasks = [
            asyncio.create_task(last_of(llm.generate(prompt, params)))
            for prompt, params in zip(prompts, MIXED, strict=True)
        ]
        for num_restarts, number in enumerate((signal.SIGKILL, signal.SIGSTOP)):
            while llm.recovery_stats.num_restarts < num_restarts or not requests_of(llm).is_ready:
                await asyncio.sleep(0.01)  # until then, what comes may be of the engine before
            some_output.clear()
            await some_output.wait()
            pid = engine_pid()
            os.kill(pid, number)
            assert not all(task.done() for task in tasks)
            await asyncio.to_thread(wait_for_end, pid)
        slow_steps.unlink()
        outputs = await asyncio.gather(*tasks)
        await llm.stats()
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.outputs == wanted.outputs
        assert output.prompt_logprobs == wanted.prompt_logprobs
    assert llm.recovery_stats.num_restarts == 2
    assert llm.recovery_stats.num_hangs == 1
    assert llm.recovery_stats.num_quarantined_requests == 0
    await asyncio.to_thread(wait_until_closed, num_descriptors)
    llm.check_health()
    stats = await llm.stats()
    assert stats.num_free_blocks == stats.num_blocks
    await llm.shutdown()


async def test_the_standby_becomes_the_engine(
    checkpoint, sockets, preloaded_engines, slow_steps, monkeypatch
):
    monkeypatch.setattr(standby, "START_DELAY", 0.0)
    with LLM(checkpoint, **TINY) as undisturbed:
        [expected] = undisturbed.generate(["the"], LONG)
    config = slow_config(checkpoint)
    llm = AsyncLLM(dataclasses.replace(config, supervision=SupervisionConfig(standby_engine=True)))
    await llm.wait_until_ready()
    pid = supervised_pid(llm)
    num_descriptors = []
    async with asyncio.timeout(220):  # the standby imports at idle priority
        for _ in range(2):
            await until_standby_is_ready(llm)
            num_descriptors.append(num_open())
            [next_pid] = {child.pid for child in preloaded.other_children()} - {pid}
            slow_steps.touch()
            stream = llm.generate("the", LONG)
            await anext(stream)
            os.kill(pid, signal.SIGKILL)
            slow_steps.unlink()
            *_, output = [output async for output in stream]
            assert output.outputs == expected.outputs
            assert not is_zombie(pid)
            pid = next_pid
            assert supervised_pid(llm) == pid
            while scheduling_policies(pid) != {os.SCHED_OTHER}:  # the kernel ends its thread at idle priority
                await asyncio.sleep(0.01)
    assert llm.recovery_stats.num_restarts == 2
    assert num_descriptors[1] <= num_descriptors[0]  # those of earlier tests may have been collected
    await llm.shutdown()
    assert preloaded.other_children() == []


def scheduling_policies(pid: int) -> set[int]:
    """Return the policies of a process's threads."""
    policies = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended in the meantime
            policies.add(os.sched_getscheduler(int(thread)))
    return policies


async def until_standby_is_ready(llm):
    """Keep the engine busy until its standby has imported everything; then nothing else happens."""
    while not supervised(llm)._standby.is_ready():
        async for _ in llm.generate("the", LONG):
            pass


async def test_an_engine_killed_at_start_is_noticed(checkpoint, sockets):
    llm = AsyncLLM(tiny_config(checkpoint))
    pid = engine_pid()
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await llm.wait_until_ready()
    assert not is_zombie(pid)
    await llm.shutdown()


@pytest.mark.parametrize("kind", [Ready, StepOutputs])
def test_ctrl_c_while_a_message_is_taken_loses_none(checkpoint, preloaded_engines, monkeypatch, kind):
    to_interrupt = [kind]

    def interrupted(drain, self):
        messages = drain(self)
        if to_interrupt and any(isinstance(message, to_interrupt[0]) for message in messages):
            to_interrupt.clear()
            signal.raise_signal(signal.SIGINT)
        return messages

    call_through(monkeypatch, EngineProcess, "_drain", interrupted)
    with LLM(checkpoint, engine_process=True, **TINY) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate("the cache", SamplingParams(max_tokens=50, ignore_eos=True))
        assert llm.generate("the cache", SamplingParams(max_tokens=2, ignore_eos=True))
        assert not llm.stats().num_running


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
        assert there.generate("the", params)[0].outputs == expected[0].outputs, "of another engine"
        assert not is_zombie(pid)
    with LLM(checkpoint, engine_process=True, recovery="off", **TINY) as there:
        there.wait_until_ready()
        pid = engine_pid()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            there.generate("the", LONG)
    assert not is_zombie(pid)


def test_a_signal_handler_may_shut_the_engine_down(checkpoint, sockets, preloaded_engines, monkeypatch):
    with LLM(checkpoint, engine_process=True, **TINY) as llm:
        llm.wait_until_ready()

        def interrupted(receive, engine, timeout):
            llm.shutdown()
            return receive(engine, timeout)

        call_through(monkeypatch, EngineProcess, "receive", interrupted)
        with pytest.raises(EngineDeadError, match="shut down"):
            llm.generate("the", LONG)


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


@pytest.mark.parametrize(
    "make",
    [lambda model: LLM(model, engine_process=True, **TINY), lambda model: AsyncLLM(tiny_config(model))],
    ids=["LLM", "AsyncLLM"],
)
def test_a_front_that_cannot_be_built_leaves_no_engine(checkpoint, tmp_path, sockets, make):
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json") as kept:
        make(str(model))
    assert kept.value.__traceback__ is not None, "as a notebook keeps it"
    assert not preloaded.other_children()


def test_a_fork_of_the_front_is_told_that_it_has_no_engine(checkpoint):
    program = """
import os, sys, time
import psutil
from quire import LLM, SamplingParams
from quire.errors import EngineDeadError
from quire.front.process.client import SHUTDOWN_TIMEOUT
llm = LLM(sys.argv[1], engine_process=True, num_kv_blocks=32, num_threads=1)
params = SamplingParams(max_tokens=4, temperature=0.0)
before = llm.generate("the", params)[0].outputs
[engine] = psutil.Process().children()
child = os.fork()
if not child:
    started = time.monotonic()
    try:
        llm.generate("the", params)
    except EngineDeadError as error:
        print(str(error).replace(str(os.getppid()), "N"), flush=True)
    llm.shutdown()
    assert time.monotonic() - started < SHUTDOWN_TIMEOUT
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert llm.generate("the", params)[0].outputs == before
assert engine.is_running()
"""
    told = "the engine belongs to process N, and this fork of it cannot use it; make another one here\n"
    assert python_output(program, checkpoint) == told


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


def test_a_temporary_directory_whose_name_is_too_long_for_sockets(checkpoint, tmp_path, monkeypatch):
    directory = tmp_path / ("d" * 100)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    with pytest.raises(ConfigError, match=r"File name too long; set TMPDIR"):
        EngineProcess(tiny_config(checkpoint), Path(checkpoint))
    assert not list(directory.iterdir())


def test_the_socket_directory_is_private_and_gone_once_connected(checkpoint, sockets, preloaded_engines):
    llm = LLM(checkpoint, engine_process=True, **TINY)
    (directory,) = sockets.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    llm.wait_until_ready()
    assert list(sockets.iterdir()) == []
    llm.shutdown()


def test_an_engine_that_hangs_leaves_its_stacks_in_the_log(
    checkpoint, sockets, preloaded_engines, monkeypatch, capfd
):
    log_stacks, log = EngineProcess.log_stacks, []

    def log_stacks_and_wait(process):
        log_stacks(process)
        end = time.monotonic() + 60
        while "engine_schedulers.py" not in "".join(log) and time.monotonic() < end:
            time.sleep(0.01)
            log.append(capfd.readouterr().err)

    monkeypatch.setattr(EngineProcess, "log_stacks", log_stacks_and_wait)
    monkeypatch.setattr(supervision, "START_PATIENCE", 300)  # so short a watchdog_timeout is none for a start
    options = {"scheduler_cls": "engine_schedulers.HangingScheduler", "recovery": "off", **TINY}
    with LLM(checkpoint, engine_process=True, watchdog_timeout=0.2, **options) as llm:
        llm.wait_until_ready()
        pid = engine_pid()
        with pytest.raises(EngineDeadError, match=r"not finished a step for 0\.2 s"):
            llm.generate("the", LONG)
    assert not is_zombie(pid)
    assert "engine_schedulers.py" in "".join(log)


def test_a_flood_of_messages_is_handled_in_turns(tmp_path, monkeypatch):
    with zmq.Context() as context, context.socket(zmq.PUSH) as front, context.socket(zmq.PULL) as output:
        front.bind(input_address(tmp_path))
        output.bind(output_address(tmp_path))
        with contextlib.closing(Connection(tmp_path)) as connection:
            for call_id in range(50):
                front.send(encode(GetStats(call_id)))
            handled = []
            monkeypatch.setattr(process, "DELIVERY_TIME", 0.0)
            connection.deliver(handled.append, wait=None)
            assert handled == [GetStats(0)], "steps have their turn"
            monkeypatch.setattr(process, "DELIVERY_TIME", 60.0)
            while len(handled) < 50:
                connection.deliver(handled.append, wait=None)
    assert handled == [GetStats(call_id) for call_id in range(50)]
