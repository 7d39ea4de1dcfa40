"""`quire serve` with a generator and an encoder, in processes of their own, with the real openai client."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest

import subprocesses
from encoders import hidden_states, make_encoder, save_encoder

pytestmark = pytest.mark.processes

QUIRE = [sys.executable, "-m", "quire.cli.main", "serve"]
SMALL = ["--port", "0", "--num-threads", "1", "--max-num-seqs", "4"]
QUESTION = [{"role": "user", "content": "What is a KV block?"}]
MODEL = make_encoder("bert")
IDS = [2, 57, 61, 58, 3]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "bert"
    return save_encoder(MODEL, path, {"Pooling": {"pooling_mode_mean_tokens": True}, "Normalize": {}})


class Server:
    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.process = process
        self.ready_line = process.stdout.readline()
        assert self.ready_line.startswith("Ready: "), process.stderr.read()
        self.url = self.ready_line.split()[1]
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def engines(self) -> list[psutil.Process]:
        """Return the engine processes in the order of their start."""
        children = psutil.Process(self.process.pid).children()
        return sorted(
            (one for one in children if "quire.models.text.template_process" not in one.cmdline()),
            key=lambda one: (one.create_time(), one.pid),
        )

    def embedding(self, model: str) -> np.ndarray:
        [answer] = self.client.embeddings.create(model=model, input="Hello, world").data
        return np.array(answer.embedding)


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[Server]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocesses.started([*QUIRE, *arguments, *SMALL], preload=True, **pipes) as process:
        yield Server(process)


def expected() -> np.ndarray:
    row = hidden_states(MODEL, IDS).double().mean(0).numpy()
    return np.asarray(row / np.linalg.norm(row))


@pytest.mark.representative
def test_one_engine_is_killed_while_the_other_goes_on(encoder: Path) -> None:
    path = str(encoder)
    with started("mini", "--model", path, "--no-standby-engine") as server:
        assert "(mini, bfloat16 on cpu" in server.ready_line
        assert f"; {path}, float32 on cpu" in server.ready_line
        assert [one.id for one in server.client.models.list().data] == ["mini", path]
        np.testing.assert_allclose(server.embedding(path), expected(), atol=1e-5)
        whole = server.client.chat.completions.create(
            model="mini", messages=QUESTION, temperature=0, max_tokens=200, extra_body={"ignore_eos": True}
        )
        stream = server.client.chat.completions.create(
            model="mini",
            messages=QUESTION,
            temperature=0,
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        pieces = [next(stream).choices[0].delta.content or ""]
        generator, of_encoder = server.engines()
        of_encoder.kill()
        # The request waits for the next engine.
        np.testing.assert_allclose(server.embedding(path), expected(), atol=1e-5)
        pieces += [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces) == whole.choices[0].message.content
        assert generator.is_running()
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 200, health.text
        metrics = httpx.get(f"{server.url}/metrics").text
        assert f'quire_engine_restarts_total{{model_name="{path}"}} 1.0' in metrics
        assert 'quire_engine_restarts_total{model_name="mini"} 0.0' in metrics
        for model in ("mini", path):
            answer = httpx.post(f"{server.url}/v1/embeddings", json={"model": model, "input": "a"})
            assert answer.status_code == (400 if model == "mini" else 200)
        server.process.send_signal(signal.SIGTERM)
        _, errors = server.process.communicate()
        assert server.process.returncode == 0, errors
        assert not generator.is_running()


def test_models_of_a_file_with_names(encoder: Path, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "standby-engine: false\n"
        f"models:\n- {{model: mini, served-model-name: chat}}\n"
        f"- {{model: {encoder}, served-model-name: [embed, bert], dtype: bfloat16}}\n"
    )
    with started("--config", str(file)) as server:
        assert "(chat, bfloat16 on cpu" in server.ready_line
        assert "; embed, bfloat16 on cpu" in server.ready_line
        assert np.dot(server.embedding("bert"), expected()) > 0.99
        answer = server.client.completions.create(model="chat", prompt="A block", max_tokens=3)
        assert answer.usage.completion_tokens == 3
        with pytest.raises(openai.BadRequestError, match="the model embed makes embeddings"):
            server.client.completions.create(model="embed", prompt="A block")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 0


def test_a_model_that_keeps_crashing_ends_the_server_after_the_streams_of_others(encoder: Path) -> None:
    path = str(encoder)
    with started("mini", "--model", path, "--no-standby-engine", "--max-engine-crashes", "1") as server:
        stream = server.client.completions.create(
            model="mini", prompt="Once", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        server.engines()[1].kill()
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        _, errors = server.process.communicate()
        assert server.process.returncode == 1
        assert f"error: {path}: the engine has died 1 times" in errors


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--model", "/no/such/model"], 1, "error: no model '/no/such/model'"),
        (
            ["--model", "{encoder}", "--speculative-method", "ngram"],
            2,
            "error: {encoder}: --speculative-method",
        ),
        (["--model", "{encoder}", "--max-model-len", "513"], 2, "error: {encoder}: --max-model-len is 513"),
    ],
)
def test_a_bad_model_ends_the_start(encoder: Path, arguments: list[str], status: int, message: str) -> None:
    command = [*QUIRE, "mini", *(one.format(encoder=encoder) for one in arguments), *SMALL]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocesses.started(command, preload=True, **pipes) as process:
        out, errors = process.communicate()
    assert (process.returncode, out) == (status, ""), errors
    assert message.format(encoder=encoder) in errors
