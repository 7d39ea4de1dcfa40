"""Ray's `KVAwareRouter` chooses the replica that has a prompt's blocks, by the KV events of replicas."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed; make test-ray installs it")
pytest.importorskip("dynamo.llm", reason="Dynamo's library is not installed; make test-ray installs it")
pytest.importorskip("pyarrow", reason="Ray's router imports pyarrow; make test-ray installs it")

import ray
from ray import serve
from ray.llm._internal.serve.routing_policies.kv_aware.constants import REQUEST_TOKEN_IDS_KWARG
from ray.llm._internal.serve.routing_policies.kv_aware.kv_aware_router import KVAwareRouter
from ray.llm._internal.serve.routing_policies.kv_aware.kv_token_tracker import (
    KVTokenTracker,
    get_worker_id,
    set_kv_token_tracker,
)
from ray.serve._private.common import DeploymentID
from ray.serve.config import RequestRouterConfig

from quire.cli.options import configs_of
from quire.config import EngineConfig, ServerConfig
from quire.ray.replica import QuireServer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

BLOCK = 16  # tokens
PROMPT_BLOCKS = 6
PROMPTS = [list(range(10 + 100 * i, 14 + 100 * i + PROMPT_BLOCKS * BLOCK)) for i in range(8)]
PATIENCE = 120.0  # seconds


@pytest.fixture(scope="module")
def deployment() -> Iterator[DeploymentID]:
    """Two engines behind Ray's router, without an ingress of ours."""
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        serve.start(proxy_location="Disabled")
        options = {"model": "mini", "num_kv_blocks": 256, "num_threads": 1, "standby_engine": False}
        router = RequestRouterConfig(request_router_class=KVAwareRouter, request_routing_stats_period_s=0.2)
        engines = serve.deployment(serve.ingress()(QuireServer)).options(
            name="Engine", num_replicas=2, request_router_config=router, ray_actor_options={"num_cpus": 1}
        )
        serve.run(engines.bind(*configs_of(options, EngineConfig, ServerConfig)), name="kv")
        yield DeploymentID("Engine", "kv")
    finally:
        serve.shutdown()
        ray.shutdown()


class Routed:
    """The deployment's handle with Ray's router, and the tracker that it asks, as in Ray's `LLMRouter`."""

    def __init__(self, deployment: DeploymentID) -> None:
        self.tracker = KVTokenTracker(serve_deployment_id=deployment)
        set_kv_token_tracker(self.tracker)
        self._handle = serve.get_deployment_handle(deployment.name, deployment.app_name)

    async def urls(self) -> dict[int, str]:
        """The engines by the numbers that the tracker gives them, once it has registered both."""
        replicas = await self._handle.broadcast("record_replica_metadata").results_async()
        await until(lambda: asyncio.sleep(0, len(self.tracker._replica_id_by_worker) == len(replicas)))
        found: dict[int, str] = {}
        while len(found) < len(replicas):
            async with self._handle.choose_replica() as chosen:
                found[get_worker_id(chosen.replica_id)] = chosen.replica_metadata["url"]
        return found

    async def choose(self, prompt: list[int]) -> str:
        """The URL of the engine that Ray's router chooses."""
        async with self._handle.choose_replica(**{REQUEST_TOKEN_IDS_KWARG: prompt}) as chosen:
            await self.tracker.on_request_completed(next(reversed(self.tracker._requests)))
            url: str = chosen.replica_metadata["url"]
            return url

    async def overlap(self, prompt: list[int], worker: int) -> int:
        """The prompt's tokens that the tracker knows to be cached by an engine."""
        request = uuid.uuid4().hex
        selection = await self.tracker.select_worker(request, prompt, [worker])
        await self.tracker.on_request_completed(request)
        return selection["overlap_tokens"]


@asynccontextmanager
async def routed(deployment: DeploymentID) -> AsyncIterator[tuple[Routed, dict[int, str]]]:
    one = Routed(deployment)
    try:
        yield one, await one.urls()
    finally:
        one.tracker._svc.shutdown()


async def until(condition: Callable[[], Awaitable[Any]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition():
            await asyncio.sleep(0.02)


async def compute(url: str, prompt: list[int]) -> None:
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        body = {"model": "mini", "prompt": prompt, "max_tokens": 1}
        (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()


def test_prompts_go_where_their_blocks_are(deployment: DeploymentID) -> None:
    async def run() -> None:
        async with routed(deployment) as (ray_router, urls):
            owners = dict(zip(range(len(PROMPTS)), list(urls) * 4, strict=True))
            for number, worker in owners.items():
                assert await ray_router.overlap(PROMPTS[number], worker) == 0
                await compute(urls[worker], PROMPTS[number])
            for number, worker in owners.items():
                prompt = PROMPTS[number]
                await until(lambda prompt=prompt, worker=worker: ray_router.overlap(prompt, worker))
                assert await ray_router.overlap(prompt, worker) == PROMPT_BLOCKS * BLOCK
                assert await ray_router.choose(prompt) == urls[worker]

    asyncio.run(run())


def test_blocks_of_an_engine_process_that_died_are_forgotten(deployment: DeploymentID) -> None:
    """The replica goes on with another engine process, at the same address and with the next numbers."""

    async def run() -> None:
        async with routed(deployment) as (ray_router, urls):
            prompt = PROMPTS[0]
            for worker, url in urls.items():
                await compute(url, prompt)
                await compute(url, [5 + worker % 2, *prompt])  # there is an event that follows
                await until(lambda worker=worker: ray_router.overlap(prompt, worker))
            for process in psutil.Process().children(recursive=True):
                if "quire.engine.process.main" in process.cmdline():
                    process.kill()
            for worker, url in urls.items():
                await until(lambda worker=worker: forgotten(ray_router, worker))
                await compute(url, prompt)
                await until(lambda worker=worker: ray_router.overlap(prompt, worker))

    async def forgotten(ray_router: Routed, worker: int) -> bool:
        return not await ray_router.overlap(PROMPTS[0], worker)

    asyncio.run(run())
