"""`quire route` in front of real engines, asked by the real openai client."""

import contextlib
import signal
import subprocess
import sys
from types import SimpleNamespace

import openai
import pytest

import subprocesses

ENGINE = """
import sys
from quire.config import EngineConfig, SchedulerConfig, ServerConfig
from quire.server.serve import serve

serve(
    EngineConfig(num_threads=1, role=sys.argv[1], scheduler=SchedulerConfig(num_kv_blocks=256)),
    ServerConfig(port=0),
)
"""
PROMPT = "KV blocks are what the engine keeps. " * 3
SAMPLING = {"temperature": 0.8, "seed": 7, "max_tokens": 12, "logprobs": 2, "n": 2}
QUESTION = [{"role": "user", "content": "What is a KV block?"}]


@pytest.fixture(scope="module")
def cluster():
    """A prefill engine, a decode engine, and a router in front of them for each way of transferring KV."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "limit": 200}
    with contextlib.ExitStack() as stack:

        def start(*command, preload):
            command = [sys.executable, *command]
            return stack.enter_context(subprocesses.started(command, preload=preload, **pipes))

        engines = [start("-c", ENGINE, role, preload=True) for role in ("prefill", "decode")]
        prefill, decode = (engine.stdout.readline().split()[1] for engine in engines)
        command = ("-m", "quire.cli.main", "route", "--prefill", prefill, "--decode", decode, "--port", "0")
        command += ("--min-prefill-bytes", "30")
        routers = {
            mode: start(*command, "--kv-transfer", mode, preload=False)
            for mode in ("overlapped", "sequential")
        }
        ready = {mode: router.stdout.readline() for mode, router in routers.items()}
        assert all("(2 of 2 engines are up)" in line for line in ready.values())
        urls = {mode: line.split()[1] for mode, line in ready.items()}
        yield SimpleNamespace(
            decode=decode, urls=urls, prefill_process=engines[0], router_processes=routers.values()
        )


def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def completion(url, prompt, **fields):
    answer = client(url).completions.create(model="mini", prompt=prompt, **SAMPLING, **fields)
    return [(choice.text, choice.logprobs, choice.finish_reason) for choice in answer.choices]


def streamed(url, prompt):
    whole = {0: ["", []], 1: ["", []]}
    for [choice] in (
        chunk.choices
        for chunk in client(url).completions.create(model="mini", prompt=prompt, stream=True, **SAMPLING)
    ):
        whole[choice.index][0] += choice.text
        whole[choice.index][1] += choice.logprobs.token_logprobs
    return whole


def metric(url, name):
    text = openai.OpenAI(base_url=url, api_key="none").get("/metrics", cast_to=str)
    [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split(" ")[1])


@pytest.mark.parametrize("ask", [completion, streamed])
@pytest.mark.parametrize("mode", ["overlapped", "sequential"])
def test_two_engines_behind_a_router_answer_as_one_does(cluster, mode, ask):
    prompt = f"{mode} {ask.__name__}: {PROMPT}"
    loaded = metric(cluster.decode, "quire_loaded_kv_tokens_total")
    answer = ask(cluster.urls[mode], prompt)
    assert metric(cluster.decode, "quire_loaded_kv_tokens_total") >= loaded + 16
    assert metric(cluster.urls[mode], "quire_route_prefill_fallbacks_total") == 0
    assert answer == ask(cluster.decode, prompt)


def test_chats_errors_and_models_are_those_of_an_engine(cluster):
    url = cluster.urls["overlapped"]
    chats = [
        client(one).chat.completions.create(model="mini", messages=QUESTION, temperature=0, logprobs=True)
        for one in (url, cluster.decode)
    ]
    assert chats[0].choices == chats[1].choices
    assert [model.id for model in client(url).models.list()] == ["mini"]
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client(url).completions.create(model="other", prompt=PROMPT)


@pytest.mark.processes
def test_a_killed_prefill_engine_costs_no_answer(cluster):
    cluster.prefill_process.kill()
    for mode, url in cluster.urls.items():
        prompt = f"{mode} alone: {PROMPT}"
        assert completion(url, prompt) == completion(cluster.decode, prompt)


@pytest.mark.processes
def test_sigterm_ends_a_router_cleanly(cluster):
    for process in cluster.router_processes:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
        assert process.returncode == 0
        assert "Traceback" not in errors
