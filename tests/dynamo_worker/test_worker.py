"""Workers of Dynamo with its own front end and KV router, on one machine without etcd and NATS."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.server.http.listening import bound_socket

pytest.importorskip("dynamo.common.backend", reason="Dynamo is not installed; make test-dynamo installs it")

from dynamo.common.constants import DisaggregationMode
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from quire.dynamo import QuireEngine

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

OPTIONS = ("model=mini", "cache_size=0.05", "num_threads=1", "standby_engine=false")
PATIENCE = 120.0  # seconds
PROMPT = "Tell me a long story about a fox, a hound and a farmer. " * 6
LENGTH = 24  # tokens


class Context:
    """Stands in for Dynamo's context of a request."""

    def __init__(self, name: str = "one") -> None:
        self._name = name

    def id(self) -> str:
        return self._name


@contextlib.asynccontextmanager
async def started(*options: str) -> AsyncIterator[QuireEngine]:
    engine, _ = await QuireEngine.from_args([*OPTIONS, *options])
    try:
        await engine.start(1)
        yield engine
    finally:
        await engine.cleanup()
        await engine.cleanup()


def test_options_become_the_place_of_the_worker_in_dynamo() -> None:
    arguments = ["--model=mini", "role=prefill", "namespace=here", "discovery-backend=file"]
    _, worker = asyncio.run(QuireEngine.from_args(arguments))
    assert (worker.namespace, worker.component, worker.discovery_backend) == ("here", "prefill", "file")
    assert worker.disaggregation_mode is DisaggregationMode.PREFILL
    assert worker.served_model_name == "mini"
    assert Path(worker.model_name).is_dir()


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("kv_events_endpoint=tcp://*:5557", "passes KV events on"),
        ("chat-template=x", "custom_jinja_template"),
        ("nme=x", "namespace"),
        ("mini", "NAME=VALUE"),
        ("request_plane=http", "tcp"),
    ],
)
def test_options_without_meaning_are_refused(argument: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        asyncio.run(QuireEngine.from_args([argument]))


def test_an_engine_that_has_not_started_can_be_cleaned_up() -> None:
    async def run() -> None:
        engine, _ = await QuireEngine.from_args(list(OPTIONS))
        await engine.cleanup()
        await engine.abort(Context())
        assert await engine.is_quiescent()

    asyncio.run(run())


def test_a_priority_that_the_policy_does_not_read_is_ignored_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run(*options: str) -> None:
        async with started(*options) as engine:
            for _ in range(2):
                request = {"token_ids": [5], "stop_conditions": {"max_tokens": 1}, "routing": {"priority": 3}}
                assert [chunk async for chunk in engine.generate(request, Context())]

    asyncio.run(run("policy=priority"))
    assert "priority" not in caplog.text
    asyncio.run(run("policy=fcfs"))
    assert caplog.text.count("start the worker with policy=priority") == 1


def test_an_engine_generates_refuses_and_aborts() -> None:
    async def run() -> None:
        async with started() as engine:
            probe = await engine.health_check_payload()
            chunks = [chunk async for chunk in engine.generate(probe, Context())]
            assert chunks[-1]["finish_reason"] == "length"
            with pytest.raises(InvalidArgument, match=r"sampling_options\.n is 2"):
                await anext(engine.generate({"token_ids": [5], "sampling_options": {"n": 2}}, Context()))
            with pytest.raises(InvalidArgument, match="max_model_len"):
                await anext(engine.generate({"token_ids": [5] * 5000}, Context()))
            endless = {"token_ids": [5], "stop_conditions": {"ignore_eos": True}}
            kept = engine.generate(endless, Context("other"))
            aborted = engine.generate(endless, Context())
            await anext(kept)
            await anext(aborted)
            await engine.abort(Context())
            assert [chunk async for chunk in aborted][-1]["finish_reason"] == "cancelled"
            assert (await anext(kept))["token_ids"]
            await kept.aclose()
            assert not engine._request_ids
            left = engine.generate(endless, Context())
            await anext(left)
        with pytest.raises(EngineShutdown):
            [chunk async for chunk in left]

    asyncio.run(run())


def test_a_prompt_is_handed_over_with_its_tokens() -> None:
    async def run() -> None:
        tokens = list(range(10, 90))
        request: dict[str, Any] = {
            "token_ids": tokens,
            "stop_conditions": {"max_tokens": 8},
            "sampling_options": {"temperature": 0.0},
        }
        async with started() as both, started("role=prefill") as first, started("role=decode") as second:
            whole = [chunk async for chunk in both.generate(request, Context())]
            [computed] = [chunk async for chunk in first.generate(dict(request), Context())]
            assert not await first.is_quiescent()
            handed = {**request, "prefill_result": {"disaggregated_params": computed["disaggregated_params"]}}
            continued = [chunk async for chunk in second.generate(handed, Context())]
            assert _tokens(continued) == _tokens(whole)
            assert continued[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
            while not await first.is_quiescent():
                await asyncio.sleep(0.01)

    asyncio.run(run())


def _tokens(chunks: list[dict[str, Any]]) -> list[int]:
    return list(itertools.chain.from_iterable(chunk["token_ids"] for chunk in chunks))


class Deployment:
    """Dynamo's front end with its KV router, and workers, in a directory by which they find each other."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._environment = {
            **os.environ,
            "DYN_FILE_KV": str(directory / "kv"),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_LOG": "info,dynamo_llm::kv_router=debug",
            "DYN_LOGGING_JSONL": "0",
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        with contextlib.closing(bound_socket("127.0.0.1", 0)) as bound:
            port = bound.getsockname()[1]
        self._start("front", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port),
                    "--router-mode", "kv")  # fmt: skip
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=PATIENCE)

    def start_workers(self, *roles: str) -> None:
        for number, role in enumerate(roles):
            self._start(f"worker-{number}", "quire.dynamo", *OPTIONS, f"role={role}")
        for number in range(len(roles)):
            _wait_for(lambda number=number: self._serves(number))
        _wait_for(lambda: self._client.get("/models").json().get("data"))

    def _serves(self, worker: int) -> bool:
        log = self.log(f"worker-{worker}")
        assert self._processes[worker + 1].poll() is None, log
        return "Serving mini" in log

    def log(self, name: str) -> str:
        return (self._directory / name).read_text()

    def overlaps(self) -> list[str]:
        """What the router has logged of its choices."""
        return [line for line in self.log("front").splitlines() if "[ROUTING] Best" in line]

    def ask(self, text: str, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        body = {"model": "mini", "messages": messages, "max_tokens": LENGTH, "temperature": 0, **fields}
        answer = self._client.post("/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def kill_engine(self) -> None:
        """Kill the engine process of the last worker."""
        [engine] = [
            child
            for child in psutil.Process(self._processes[-1].pid).children(recursive=True)
            if "quire.engine.process.main" in child.cmdline()
        ]
        engine.kill()

    def close(self) -> None:
        self._client.close()
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(PATIENCE)

    def _start(self, name: str, module: str, *arguments: str) -> None:
        with (self._directory / name).open("wb") as log:
            command = [sys.executable, "-m", module, *arguments]
            self._processes.append(
                subprocess.Popen(command, env=self._environment, stdout=log, stderr=subprocess.STDOUT)
            )


def _wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with contextlib.closing(Deployment(tmp_path)) as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> str:
    """The answer of one engine without Dynamo."""
    llm = LLM("mini", cache_size=0.05)
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0)
    [output] = llm.chat([{"role": "user", "content": PROMPT}], params)
    return output.outputs[0].text


def test_the_kv_router_chooses_the_worker_that_has_the_prefix(deployment: Deployment, expected: str) -> None:
    deployment.start_workers("both", "both")
    answers = [deployment.ask(PROMPT)]
    _wait_for(lambda: _cached(answers[-1]) or answers.append(deployment.ask(PROMPT)))
    for number in range(4):  # others go to the worker that is free of them, or has theirs
        deployment.ask(f"{number}: {PROMPT}", max_tokens=1)
        answers.append(deployment.ask(PROMPT))
    assert {answer["choices"][0]["message"]["content"].strip() for answer in answers} == {expected.strip()}
    assert all(_cached(answer) for answer in answers[-4:])
    assert any("blocks overlap" in line and "with 0/" not in line for line in deployment.overlaps())


def test_a_worker_whose_engine_dies_goes_on_without_its_blocks(deployment: Deployment, expected: str) -> None:
    """Dynamo's router forgets them."""
    deployment.start_workers("both")
    deployment.ask(PROMPT, max_tokens=1)
    _wait_for(lambda: deployment.ask(PROMPT, max_tokens=1) and "with 0/" not in deployment.overlaps()[-1])
    deployment.kill_engine()
    answer = deployment.ask(f"Another one: {PROMPT}")  # answered by the next engine
    assert not _cached(answer)
    answer = deployment.ask(PROMPT)
    assert answer["choices"][0]["message"]["content"].strip() == expected.strip()
    assert "with 0/" in deployment.overlaps()[-1]


def test_prefill_and_decode_workers_share_a_request(deployment: Deployment, expected: str) -> None:
    deployment.start_workers("prefill", "decode")
    _wait_for(lambda: "Prefill router target activated" in deployment.log("front"))
    answer = deployment.ask(PROMPT)
    assert answer["choices"][0]["message"]["content"].strip() == expected.strip()
    assert _cached(answer) > 64  # the decode worker has loaded what it did not compute


def _cached(answer: dict[str, Any]) -> int:
    count: int = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return count
