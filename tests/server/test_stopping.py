"""A server whose event loop is blocked: it ends by signals all the same, and its monitoring port answers."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import httpx
import psutil
import pytest

import subprocesses
from free_ports import free_port
from quire.server.http import stopping

pytestmark = pytest.mark.processes

SERVER = """
import dataclasses, sys, time
from quire.config import EdgeConfig, EngineConfig, SchedulerConfig, ServerConfig
from quire.server import app
from quire.server.serve import serve

def block(request):
    print("blocked", flush=True)
    while True:
        time.sleep(1000)

async def version(request):
    block(request)

app.ENDPOINTS = tuple(
    dataclasses.replace(endpoint, handler=version) if endpoint.path == "/version" else endpoint
    for endpoint in app.ENDPOINTS
)
serve(
    EngineConfig(num_threads=1, scheduler=SchedulerConfig(num_kv_blocks=64)),
    ServerConfig(
        port=0,
        drain_timeout=float(sys.argv[2]),
        edge=EdgeConfig(monitoring_port=int(sys.argv[1])),
    ),
)
"""


@contextlib.contextmanager
def blocked_server(drain_timeout):
    """Yield a server whose event loop is blocked, with the URL of its monitoring port."""
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port), str(drain_timeout)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocesses.started(command, preload=True, **pipes) as process:
        url = process.stdout.readline().split()[1]
        process.stdout.readline()
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.get(f"{url}/version", timeout=0.5)
        assert process.stdout.readline() == "blocked\n"
        yield process, f"http://127.0.0.1:{port}"


def assert_ends_with_its_stacks(process, children=()):
    _, err = process.communicate()
    assert process.returncode == 1
    assert "in block" in err, "the log says where the event loop was"
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_a_signal_ends_a_server_whose_event_loop_is_blocked():
    with blocked_server(drain_timeout=0) as (process, monitoring):
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        for path in ("/health", "/live", "/metrics"):
            assert httpx.get(monitoring + path).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert_ends_with_its_stacks(process, children)


LOOP = """
import asyncio, sys, time
from quire.server.http import stopping

stopping.STOP_GRACE = stopping.IMMEDIATE_GRACE = float(sys.argv[2])

def block():
    while True:
        time.sleep(1000)

async def main():
    stop = stopping.StopSignals(drain_timeout=float(sys.argv[1]))
    with stop.installed():
        print("ready", flush=True)
        if sys.argv[3] == "blocked":
            block()
        await stop.graceful.wait()
        print("graceful", flush=True)
        await stop.immediate.wait()
        print("immediate", flush=True)
    print("done", flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


@contextlib.contextmanager
def event_loop(drain_timeout, grace, state):
    command = [sys.executable, "-c", LOOP, str(drain_timeout), str(grace), state]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocesses.started(command, preload=True, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        yield process


def test_a_second_signal_does_not_wait_for_the_drain_time():
    with event_loop(100_000, 0.1, "blocked") as process:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # two of one kind may arrive as one
        assert_ends_with_its_stacks(process)


@pytest.mark.representative
def test_an_event_loop_that_turns_ends_by_itself():
    with event_loop(100_000, 100_000, "turning") as process:
        for number, word in ((signal.SIGTERM, "graceful"), (signal.SIGTERM, "immediate")):
            process.send_signal(number)
            assert process.stdout.readline() == f"{word}\n"
        _, err = process.communicate()
        assert (process.returncode, err) == (0, "")


@pytest.mark.representative
def test_signals_are_as_before_afterwards():
    with event_loop(0, 100_000, "turning") as process:
        for number, word in ((signal.SIGTERM, "graceful"), (signal.SIGTERM, "immediate")):
            process.send_signal(number)
            assert process.stdout.readline() == f"{word}\n"
        assert process.stdout.readline() == "done\n"
        process.send_signal(signal.SIGTERM)
        process.communicate()
        assert process.returncode == -signal.SIGTERM


async def test_a_hangup_stops_nothing():
    stop = stopping.StopSignals(drain_timeout=5.0, takes_hangup=True)
    before = signal.getsignal(signal.SIGHUP)
    with stop.installed():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.wait_for(stop.hangup.wait(), 60)
            stop.hangup.clear()
        assert not stop.graceful.is_set()
    assert signal.getsignal(signal.SIGHUP) is before
