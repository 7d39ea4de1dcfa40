"""What a server prints at its start: the command that tries it, as a shell takes it, and of its template."""

import os
import subprocess
from types import SimpleNamespace

import msgspec
import pytest

from quire.engine.messages import EngineInfo
from quire.errors import InvalidRequestError, QueueFullError, QuireError, RequestTimeoutError
from quire.pooling_params import PoolingParams
from quire.server.serve import _announce, _try_chat_template

INFO = EngineInfo(
    model="mini",
    max_model_len=512,
    vocab_size=1536,
    num_blocks=1,
    block_size=16,
    kv_cache_bytes=1,
    dtype="bfloat16",
    load_seconds=1.0,
)
SHOW_ARGUMENTS = """curl() { printf '%s\\n' "$@"; }\n"""


def hint(capsys, *, needs_key: bool) -> str:
    context = SimpleNamespace(
        llm=SimpleNamespace(info=INFO), model_name="mini", tenants=SimpleNamespace(needs_key=needs_key)
    )
    _announce([context], SimpleNamespace(url="http://localhost:8000", curl="http://localhost:8000"))
    return capsys.readouterr().out.splitlines()[1]


def arguments_of(command: str, **variables: str) -> list[str]:
    environment = {"PATH": os.environ["PATH"], **variables}
    script = SHOW_ARGUMENTS + command
    return subprocess.run(
        ["sh", "-c", script], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.parametrize("keys", ["secret", "secret another"])
def test_the_command_sends_one_key(capsys, monkeypatch, keys):
    monkeypatch.setenv("QUIRE_API_KEY", keys)
    said, _, command = hint(capsys, needs_key=True).partition(": ")
    assert said == "Try"
    assert "secret" not in command
    sent = arguments_of(command, QUIRE_API_KEY=keys)
    assert sent[0] == "http://localhost:8000/v1/chat/completions"
    assert [one for one in sent if one.startswith("Authorization")] == ["Authorization: Bearer secret"]


def test_a_key_that_shells_do_not_have_is_asked_for(capsys, monkeypatch):
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    assert hint(capsys, needs_key=True).startswith("Try, with QUIRE_API_KEY set to the key: curl ")


def test_without_a_key_none_is_sent(capsys, monkeypatch):
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    said, _, command = hint(capsys, needs_key=False).partition(": ")
    assert said == "Try"
    assert not any("Authorization" in one for one in arguments_of(command))


@pytest.mark.parametrize("device", ["cpu", "cuda: A GPU"])
def test_the_first_line_says_what_the_model_runs_on(capsys, device: str) -> None:
    context = SimpleNamespace(
        llm=SimpleNamespace(info=msgspec.structs.replace(INFO, device=device)),
        model_name="mini",
        tenants=SimpleNamespace(needs_key=False),
    )
    _announce([context], SimpleNamespace(url="http://localhost:8000", curl="http://localhost:8000"))
    ready = capsys.readouterr().out.splitlines()[0]
    assert ready == f"Ready: http://localhost:8000 (mini, bfloat16 on {device}, loaded in 1.0 s)"


def test_of_a_model_for_embeddings_these_are_asked_for(capsys) -> None:
    context = SimpleNamespace(
        llm=SimpleNamespace(info=msgspec.structs.replace(INFO, pooling=PoolingParams(pooling_type="cls"))),
        model_name="mini",
        tenants=SimpleNamespace(needs_key=False),
    )
    _announce([context], SimpleNamespace(url="http://localhost:8000", curl="http://localhost:8000"))
    sent = arguments_of(capsys.readouterr().out.splitlines()[1].partition(": ")[2])
    assert sent[0] == "http://localhost:8000/v1/embeddings"
    assert sent[-1] == '{"model": "mini", "input": "Hello"}'


@pytest.mark.parametrize(
    ("error", "warning"),
    [
        (InvalidRequestError("line 3"), "chat requests will be refused: line 3"),
        (RequestTimeoutError("20 s"), "the chat template has not been tried: 20 s"),
        (QueueFullError("no process"), "the chat template has not been tried: no process"),
    ],
)
def test_only_a_template_that_is_wrong_refuses_chats(
    error: QuireError, warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    _try_chat_template(SimpleNamespace(has_chat_template=True, check_chat_template=fail))
    assert capsys.readouterr().err == f"Warning: {warning}\n"
