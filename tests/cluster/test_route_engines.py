"""`quire route` in front of real engines, asked by the real openai client."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest

import subprocesses

ENGINE = """
import sys
from quire.config import EngineConfig, SchedulerConfig, ServerConfig
from quire.server.serve import serve

sys.path += sys.argv[2:]
serve(
    EngineConfig(num_threads=1, kv_connector=sys.argv[1], scheduler=SchedulerConfig(num_kv_blocks=256)),
    ServerConfig(port=0),
)
"""
HELPERS = (str(Path(__file__).parent), str(Path(__file__).parent.parent))
PROMPT = "KV blocks are what the engine keeps. " * 3
SAMPLING = {"temperature": 0.8, "seed": 7, "max_tokens": 12, "logprobs": 2, "n": 2}
QUESTION = [{"role": "user", "content": "What is a KV block?"}]


@pytest.fixture(scope="module")
def cluster():
    """A prefill engine, a decode engine, and a router in front of them: three processes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "limit": 200}
    with contextlib.ExitStack() as stack:

        def start(*command, preload=True):
            return stack.enter_context(
                subprocesses.started([sys.executable, *command], preload=preload, **pipes)
            )

        engines = [
            start("-c", ENGINE, connector, *HELPERS)
            for connector in ("telling_connector.TellingConnector", "")
        ]
        prefill, decode = (engine.stdout.readline().split()[1] for engine in engines)
        router = start(
            "-m", "quire.cli.main", "route", "--prefill", prefill, "--decode", decode,
            "--port", "0", "--min-prefill-bytes", "30", preload=False,
        )  # fmt: skip
        ready = router.stdout.readline()
        assert "(2 of 2 engines are up)" in ready
        yield SimpleNamespace(decode=decode, router=ready.split()[1], process=router)


def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def completion(url, **fields):
    answer = client(url).completions.create(model="mini", prompt=PROMPT, **{**SAMPLING, **fields})
    return [(choice.text, choice.logprobs, choice.finish_reason) for choice in answer.choices]


def test_a_router_answers_as_one_engine_does(cluster):
    assert completion(cluster.router) == completion(cluster.decode)
    chats = [
        client(url).chat.completions.create(model="mini", messages=QUESTION, temperature=0, logprobs=True)
        for url in (cluster.router, cluster.decode)
    ]
    assert chats[0].choices == chats[1].choices
    assert [model.id for model in client(cluster.router).models.list()] == ["mini"]
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client(cluster.router).completions.create(model="other", prompt=PROMPT)


def test_a_stream_adds_up_to_the_same(cluster):
    def streamed(url):
        stream = client(url).completions.create(model="mini", prompt=PROMPT, stream=True, **SAMPLING)
        whole = {0: ["", []], 1: ["", []]}
        for [choice] in (chunk.choices for chunk in stream):
            whole[choice.index][0] += choice.text
            whole[choice.index][1] += choice.logprobs.token_logprobs
        return whole

    assert streamed(cluster.router) == streamed(cluster.decode)


def test_the_prefill_engine_has_computed_the_prompts(cluster):
    completion(cluster.router, max_tokens=1)
    metrics = openai.OpenAI(base_url=cluster.router, api_key="none").get("/metrics", cast_to=str)
    assert "quire_route_prefill_fallbacks_total 0.0" in metrics
    assert 'purpose="prefill"' in metrics


def test_sigterm_ends_it_cleanly(cluster):
    cluster.process.send_signal(signal.SIGTERM)
    _, errors = cluster.process.communicate()
    assert cluster.process.returncode == 0
    assert "Traceback" not in errors
