"""Engines on Ray Serve, on one machine: routing, failures, draining, prefill and decode apart."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from quire import LLM, SamplingParams
from quire.server.http.listening import bound_socket

pytest.importorskip("ray.serve", reason="Ray is not installed; make test-ray installs it")

import ray
from ray import serve
from ray.util.placement_group import placement_group_table

from quire.ray import build_app
from quire.ray.replica import _share_gpus

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

PROMPTS = [f"Count to {number}, then tell a story about it." for number in range(2, 10)]
LENGTH = 200  # tokens
OPTIONS: dict[str, Any] = {"model": "mini", "max_num_seqs": 16, "cache_size": 0.05, "replica_cpus": 1}
PATIENCE = 120.0  # seconds


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens of one engine without a server."""
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    outputs = LLM("mini", cache_size=0.05).generate(PROMPTS, params)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of Ray Serve's proxy on a cluster of this machine alone."""
    port = free_port()
    resources = {"num_cpus": 8, "num_gpus": 3}
    ray.init("local", **resources, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        serve.start(http_options={"port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def ingress_port() -> int:
    """The ingress's own port."""
    return free_port()


@pytest.fixture(scope="module")
def engines(url: str, ingress_port: int, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of an application with two engines."""
    batch_dir = tmp_path_factory.mktemp("batches")
    app = build_app(**OPTIONS, num_replicas=2, ingress_port=ingress_port, batch_dir=str(batch_dir))
    serve.run(app, name="engines", route_prefix="/")
    wait_until(lambda: len(states(url)) == 2 and set(states(url).values()) == {"up"})
    return url


class Stream:
    """A completion that is read in a thread: counts its pieces, and collects its tokens."""

    def __init__(self, url: str, prompt: str) -> None:
        self.tokens: list[int] = []
        self.has_begun = threading.Event()
        self._url = url
        self._prompt = prompt

    def read(self) -> list[int]:
        try:
            return self._read()
        finally:
            self.has_begun.set()

    def _read(self) -> list[int]:
        body = {
            "model": "mini",
            "prompt": self._prompt,
            "max_tokens": LENGTH,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data and data != "[DONE]":
                    event = json.loads(data)
                    assert "error" not in event, event
                    self.tokens += event["choices"][0].get("token_ids", [])
                    self.has_begun.set()
        return self.tokens


@contextlib.contextmanager
def streams(url: str) -> Iterator[list[Future[list[int]]]]:
    """All prompts at once; entered when each stream has begun."""
    reading = [Stream(url, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = [threads.submit(stream.read) for stream in reading]
        for stream in reading:
            assert stream.has_begun.wait(PATIENCE)
        yield answers


def states(url: str) -> dict[str, str]:
    """The ingress's engines: their states by URL."""
    answer = httpx.get(f"{url}/route/engines", timeout=PATIENCE)
    return {engine["url"]: engine["state"] for engine in answer.json()["data"]}


def free_port() -> int:
    with contextlib.closing(bound_socket("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def replicas_of(deployment: str) -> list[psutil.Process]:
    """The processes of a deployment's replicas."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if (process.cmdline() or [""])[0].endswith(f":{deployment}")
    ]


def test_streams_through_the_ingress_are_those_of_an_engine(engines: str, expected: list[list[int]]) -> None:
    with streams(engines) as answers:
        assert [answer.result() for answer in answers] == expected
    used = httpx.get(f"{engines}/metrics").text
    assert used.count('purpose="answer"} 4.0') == 2, used


def test_the_ingress_listens_itself_too(engines: str, ingress_port: int, expected: list[list[int]]) -> None:
    with streams(f"http://{ray.util.get_node_ip_address()}:{ingress_port}") as answers:
        assert [answer.result() for answer in answers] == expected


def test_prompts_go_to_the_engine_that_has_their_blocks(engines: str) -> None:
    """The ingress follows the KV events of all engines."""
    lines = httpx.get(f"{engines}/metrics").text.splitlines()
    followed = [line for line in lines if line.startswith("quire_route_engine_followed{")]
    assert [line.rpartition(" ")[2] for line in followed] == ["1.0", "1.0"]


def test_replicas_say_what_routers_and_autoscaling_read(engines: str) -> None:
    handle = serve.get_deployment_handle("Engine", "engines")
    [metadata, _] = handle.broadcast("record_replica_metadata").results()
    url, key = metadata.pop("url"), metadata.pop("key")
    assert metadata == {"role": "both", "model": "mini"}
    with_key = {"Authorization": f"Bearer {key}"}
    statuses = [httpx.get(f"{url}/v1/models", headers=headers).status_code for headers in ({}, with_key)]
    assert statuses == [401, 200]  # only the ingress reaches an engine
    stats = handle.record_routing_stats.remote().result()
    events = stats.pop("kv_event_metadata")
    assert stats.keys() == {"num_running", "num_waiting", "kv_cache_usage"}
    assert events.pop("endpoint").startswith("tcp://")
    assert events.pop("replay_endpoint").startswith("tcp://")
    assert events == {"block_size": 16, "max_num_batched_tokens": 512, "dp_rank": 0}
    load = handle.record_autoscaling_stats.remote().result()
    assert load == {"queued_prompt_tokens": 0.0, "oldest_wait_seconds": 0.0, "kv_cache_usage": 0.0}


def test_an_engine_process_that_dies_is_replaced_within_its_replica(
    engines: str, expected: list[list[int]]
) -> None:
    before = states(engines)
    with streams(engines) as answers:
        for process in replicas_of("Engine")[0].children():
            process.kill()
        assert [answer.result() for answer in answers] == expected
    assert states(engines).keys() == before.keys()


def test_a_pause_keeps_requests_where_they_are(engines: str, expected: list[list[int]]) -> None:
    handle = serve.get_deployment_handle("Engine", "engines")

    def reconfigure(**user_config: Any) -> None:
        handle.broadcast("reconfigure", user_config).results()

    def num_queued() -> float:
        loads = handle.broadcast("record_autoscaling_stats").results()
        return sum(load["queued_prompt_tokens"] for load in loads)

    reconfigure(paused=True)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = [threads.submit(Stream(engines, prompt).read) for prompt in PROMPTS]
        wait_until(lambda: num_queued() > 0)
        reconfigure()
        assert [answer.result() for answer in answers] == expected
    assert num_queued() == 0


def test_a_client_that_leaves_frees_the_engine(engines: str) -> None:
    body = {"model": "mini", "prompt": "hi", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{engines}/v1/completions", json=body, timeout=PATIENCE) as answer:
        next(answer.iter_lines())
    handle = serve.get_deployment_handle("Engine", "engines")
    wait_until(
        lambda: not any(stats["num_running"] for stats in handle.broadcast("record_routing_stats").results())
    )
    wait_until(lambda: 'quire_route_answers_total{status="499"}' in httpx.get(f"{engines}/metrics").text)


def test_clients_do_not_change_engines(engines: str) -> None:
    answer = httpx.post(f"{engines}/route/engines", json={"url": "http://127.0.0.1:1", "role": "both"})
    assert answer.status_code == 405


def test_a_replica_that_dies_is_replaced_by_ray(engines: str) -> None:
    before = set(states(engines))
    files = [uploaded(engines) for _ in range(2)]  # with an engine each
    replicas_of("Engine")[0].kill()
    seen = {status_of(engines, file_id) for file_id in files}
    while len(states(engines).keys() - before) < 1 or set(states(engines).values()) != {"up"}:
        seen |= {status_of(engines, file_id) for file_id in files}
    assert seen <= {200, 502, 503}
    assert len(states(engines)) == 2
    assert [status_of(engines, file_id) for file_id in files] == [200, 200]


def uploaded(url: str) -> str:
    """Upload a file; return its id."""
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": bytes(1 << 20)}}
    file_id: str = httpx.post(f"{url}/v1/files", **form, timeout=PATIENCE).json()["id"]
    return file_id


def status_of(url: str, file_id: str) -> int:
    """Return the status of the answer about a file."""
    return httpx.get(f"{url}/v1/files/{file_id}", timeout=PATIENCE).status_code


def test_scaling_down_loses_nothing(engines: str, ingress_port: int, expected: list[list[int]]) -> None:
    app = build_app(**OPTIONS, num_replicas=1, ingress_port=ingress_port)
    with streams(engines) as answers:
        serve.run(app, name="engines", route_prefix="/")
        assert [answer.result() for answer in answers] == expected
    wait_until(lambda: len(states(engines)) == 1)
    with streams(engines) as answers:
        assert [answer.result() for answer in answers] == expected


def test_a_new_ingress_loses_nothing(engines: str, ingress_port: int, expected: list[list[int]]) -> None:
    app = build_app(**OPTIONS, num_replicas=1, ingress_port=ingress_port, max_in_flight=99)
    own = f"http://{ray.util.get_node_ip_address()}:{ingress_port}"
    with streams(engines) as answers, streams(own) as others:
        serve.run(app, name="engines", route_prefix="/")
        assert [answer.result() for answer in answers] == expected
        assert [answer.result() for answer in others] == expected
    wait_until(lambda: len(states(engines)) == 1)
    with streams(engines) as answers:
        assert [answer.result() for answer in answers] == expected


def test_prompts_are_handed_over_below_a_prefix(url: str, expected: list[list[int]]) -> None:
    app = build_app(**OPTIONS, prefill_replicas=1, decode_replicas=1, min_prefill_bytes=10)
    serve.run(app, name="split", route_prefix="/split")
    split = f"{url}/split"
    wait_until(lambda: len(states(split)) == 2 and set(states(split).values()) == {"up"})
    with streams(split) as answers:
        assert [answer.result() for answer in answers] == expected
    assert 'purpose="prefill"} 8.0' in httpx.get(f"{split}/metrics").text


def test_an_ingress_serves_several_models(url: str, expected: list[list[int]]) -> None:
    models = [{}, {"served_model_name": ["short"], "max_model_len": 96}]
    serve.run(build_app(**OPTIONS, models=models), name="models", route_prefix="/models")
    several = f"{url}/models"
    wait_until(lambda: list(states(several).values()) == ["up", "up"])
    listed = httpx.get(f"{several}/v1/models").json()["data"]
    assert {card["id"]: card["max_model_len"] for card in listed}.items() >= {("short", 96)}
    with streams(several) as answers:
        assert [answer.result() for answer in answers] == expected
    body = {"model": "short", "prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{several}/v1/completions", json={**body, "return_token_ids": True}).json()
    assert (answer["model"], answer["choices"][0]["token_ids"]) == ("short", expected[0][:20])
    unknown = httpx.post(f"{several}/v1/completions", json={**body, "model": "long"})
    assert unknown.status_code == 404
    message = unknown.json()["error"]["message"]
    assert message == "the model 'long' is not served here; the engines have 'mini', 'short'"
    serve.delete("models")


def test_ranks_have_bundles_of_their_own(url: str, expected: list[list[int]]) -> None:
    options = {**OPTIONS, "replica_cpus": 2, "tensor_parallel_size": 2, "device": "cpu"}
    serve.run(build_app(**options), name="ranks", route_prefix="/ranks")
    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    assert [(group["strategy"], group["bundles"]) for group in groups] == [
        ("STRICT_PACK", {0: {"CPU": 1.0}, 1: {"CPU": 1.0}})
    ]
    ranks = f"{url}/ranks"
    wait_until(lambda: list(states(ranks).values()) == ["up"])
    with streams(ranks) as answers:
        assert [len(answer.result()) for answer in answers] == [LENGTH] * len(PROMPTS)
    serve.delete("ranks")


def test_ranks_see_the_gpus_of_all_bundles(url: str) -> None:
    """Ray only counts these GPUs."""

    class Ranks:
        async def __call__(self) -> str:
            await _share_gpus()
            return os.environ["CUDA_VISIBLE_DEVICES"]

    deployment = serve.deployment(Ranks).options(
        ray_actor_options={"num_cpus": 0.1, "num_gpus": 1},
        placement_group_bundles=[{"CPU": 0.1, "GPU": 1}] * 3,
        placement_group_strategy="STRICT_PACK",
    )
    handle = serve.run(deployment.bind(), name="gpus", route_prefix=None)
    assert sorted(handle.remote().result().split(",")) == ["0", "1", "2"]
    serve.delete("gpus")


def test_an_engine_without_an_ingress_answers_itself(url: str, expected: list[list[int]]) -> None:
    serve.run(build_app(**OPTIONS, ingress_replicas=0), name="alone", route_prefix="/alone")
    with streams(f"{url}/alone") as answers:
        assert [answer.result() for answer in answers] == expected
