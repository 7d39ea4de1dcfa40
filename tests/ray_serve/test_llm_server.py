"""Engines in applications of `ray.serve.llm`, built and called by Ray's own code.

Ray's package imports the objects of bodies from vLLM or SGLang. Neither is installed here: the folder
`import_stub` has the names, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.server.http.listening import bound_socket

pytest.importorskip("ray.serve", reason="Ray is not installed; make test-ray installs it")
pytest.importorskip("pyarrow", reason="ray.serve.llm needs pyarrow; make test-ray installs it")

import ray
from ray import serve
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig

from quire.ray import QuireLLMServer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

STUB = str(Path(__file__).parent / "import_stub")
PATIENCE = 120.0  # seconds
BODY = {"model": "tiny", "prompt": "Tell a story.", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Tell a story."}]


def configuration(**options: Any) -> LLMConfig:
    """An `LLMConfig` as users write it."""
    loading = {"model_id": "tiny", "model_source": "mini"}
    engine = {"max_num_seqs": 8, "cache_size": 0.05, **options.pop("engine_kwargs", {})}
    return LLMConfig(
        model_loading_config=loading,
        server_cls="quire.ray:QuireLLMServer",
        engine_kwargs=engine,
        deployment_config={"num_replicas": 1, **options.pop("deployment_config", {})},
        **options,
    )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of an application of `build_openai_app`, at /llm, and of replicas alone, at /direct."""
    if tuple(map(int, version("fastapi").split(".")[:2])) >= (0, 137):
        pytest.skip("Ray 2.60 does not find the methods of its ingress with this FastAPI")
    with contextlib.closing(bound_socket("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([STUB, os.environ.get("PYTHONPATH", "")]))
        patch.setattr(sys, "path", [STUB, *sys.path])
        ray.init("local", num_cpus=6, include_dashboard=False, log_to_driver=False, logging_level="error")
        try:
            serve.start(http_options={"port": port})
            from ray.llm._internal.serve.core.ingress import builder

            app = builder.build_openai_app({"llm_configs": [configuration()]})
            serve.run(app, name="llm", route_prefix="/llm")
            app = builder._build_direct_streaming_llm_deployment(configuration())
            serve.run(app, name="direct", route_prefix="/direct")
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which ends with one [DONE]."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


def test_completions_are_those_of_an_engine(url: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    [output] = LLM("mini", cache_size=0.05).generate([BODY["prompt"]], params)
    for prefix in ("llm", "direct"):
        path = f"{url}/{prefix}/v1/completions"
        answer = httpx.post(path, json=BODY, timeout=PATIENCE).json()
        assert answer["choices"][0]["text"] == output.outputs[0].text
        assert answer["usage"]["completion_tokens"] == 24
        streamed = httpx.post(path, json={**BODY, "stream": True}, timeout=PATIENCE)
        texts = [event["choices"][0]["text"] for event in events(streamed)]
        assert len(texts) > 1
        assert "".join(texts) == output.outputs[0].text


def test_chats_are_those_of_the_replica_itself(url: str) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    answers = [
        httpx.post(f"{url}/{prefix}/v1/chat/completions", json=body, timeout=PATIENCE).json()
        for prefix in ("llm", "direct")
    ]
    message, same = (answer["choices"][0]["message"] for answer in answers)
    assert message == same
    streamed = httpx.post(f"{url}/llm/v1/chat/completions", json={**body, "stream": True}, timeout=PATIENCE)
    deltas = [event["choices"][0]["delta"].get("content") or "" for event in events(streamed)]
    assert "".join(deltas) == message["content"]


def test_tokens_and_models(url: str) -> None:
    listed = httpx.get(f"{url}/llm/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["tiny"]
    tokens = httpx.post(f"{url}/llm/tokenize", json={"model": "tiny", "prompt": "a b"}).json()["tokens"]
    text = httpx.post(f"{url}/llm/detokenize", json={"model": "tiny", "tokens": tokens}).json()["prompt"]
    assert text == "a b"
    assert httpx.post(f"{url}/direct/v1/responses", json={"model": "tiny", "input": "a"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_refused_with_its_reason(url: str, stream: bool) -> None:
    body = {**BODY, "temperature": -1, "stream": stream}
    answer = httpx.post(f"{url}/llm/v1/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 400
    assert "temperature" in answer.json()["error"]["message"]


def test_a_client_that_leaves_frees_the_engine(url: str) -> None:
    body = {**BODY, "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{url}/llm/v1/completions", json=body, timeout=PATIENCE) as answer:
        next(answer.iter_lines())
    handle = serve.get_deployment_handle("QuireLLMServer:tiny", "llm")
    deadline = time.monotonic() + PATIENCE
    while handle.record_routing_stats.remote().result()["num_running"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_replica_can_be_paused_and_put_to_sleep(url: str) -> None:
    handle = serve.get_deployment_handle("QuireLLMServer:tiny", "llm")

    def states() -> tuple[bool, bool]:
        return handle.is_paused.remote().result(), handle.is_sleeping.remote().result()

    handle.pause.remote(mode="keep").result()
    assert states() == (True, False)
    handle.resume.remote().result()
    handle.sleep.remote(level=2).result()
    assert states() == (False, True)
    handle.wakeup.remote().result()
    assert states() == (False, False)
    handle.reset_prefix_cache.remote().result()
    assert handle.llm_config.remote().result().model_id == "tiny"


def test_a_deployment_has_what_its_engine_needs() -> None:
    given = {"max_ongoing_requests": 5, "ray_actor_options": {"num_cpus": 3, "memory": 9}}
    environment = {"env_vars": {"A": "b"}}
    config = configuration(deployment_config=given, runtime_env=environment)
    options = QuireLLMServer.get_deployment_options(config)
    assert options["ray_actor_options"] == {
        "num_cpus": 3, "num_gpus": 0, "memory": 9, "runtime_env": environment
    }  # fmt: skip
    assert (options["max_ongoing_requests"], options["num_replicas"]) == (5, 1)
    assert options["health_check_timeout_s"] == 30
    assert "placement_group_bundles" not in options
    assert config.deployment_config["ray_actor_options"] == given["ray_actor_options"]


def test_ranks_have_bundles() -> None:
    ranks = {"tensor_parallel_size": 2}
    config = configuration(engine_kwargs=ranks, accelerator_type="A10G")
    options = QuireLLMServer.get_deployment_options(config)
    actor = {"num_cpus": 1.0, "num_gpus": 1, "accelerator_type": "A10G"}
    assert options["ray_actor_options"] == actor
    bundle = {"CPU": 1.0, "GPU": 1, "accelerator_type:A10G": 0.001}
    assert options["placement_group_bundles"] == [bundle, bundle]
    assert options["placement_group_strategy"] == "STRICT_PACK"
    for placement in ({"bundle_per_worker": {"CPU": 2}}, {"bundles": [{"CPU": 2}, {"CPU": 2}]}):
        config = configuration(engine_kwargs=ranks, placement_group_config=placement)
        options = QuireLLMServer.get_deployment_options(config)
        assert options["placement_group_bundles"] == [{"CPU": 2}, {"CPU": 2}]
        assert options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine_kwargs": {"max_num_seq": 4}}, "no option has the name 'max_num_seq'; did you mean"),
        ({"engine_kwargs": {"port": 4}}, "the option port cannot be set on Ray Serve"),
        ({"lora_config": {}}, "LLMConfig.lora_config is set, which Quire does not support"),
        ({"experimental_configs": {"stream_batching_interval_ms": 0}}, "stream_batching_interval_ms is set"),
        (
            {"placement_group_config": {"bundle_per_worker": {"CPU": 1}, "strategy": "SPREAD"}},
            "strategy is 'SPREAD', but the ranks of an engine are processes of one machine",
        ),
        (
            {"callback_config": {"callback_class": "quire.ray:QuireLLMServer"}},
            "LLMConfig.callback_config is set",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        QuireLLMServer.get_deployment_options(configuration(**options))
    assert message in str(refusal.value)
