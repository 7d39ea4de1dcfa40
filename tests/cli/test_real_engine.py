"""The commands in processes of their own, on the built-in model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from typing import BinaryIO

import psutil
import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from quire.models.checkpoints.hub import resolve_model
from subprocesses import run, started

pytestmark = pytest.mark.processes

QUIRE = [sys.executable, "-m", "quire.cli.main"]
LONG_ANSWER = ["generate", "Hello", "--ignore-eos", "--max-tokens", "4000"]


def quire(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run([*QUIRE, *arguments], stdin=stdin, preload=True)


def started_long_answer() -> AbstractContextManager[subprocess.Popen]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return started([*QUIRE, *LONG_ANSWER], preload=True, **pipes)


@pytest.mark.representative
def test_generate_answers_the_same_every_time_and_as_json():
    text = quire("generate", "What is a KV block?")
    lines = quire("generate", "What is a KV block?", "What is a KV block?", "--output", "-")
    assert (text.returncode, lines.returncode) == (0, 0), text.stderr + lines.stderr
    records = [json.loads(line) for line in lines.stdout.splitlines()]
    answers = [record["outputs"][0]["text"] for record in records]
    assert answers == [text.stdout.removesuffix("\n")] * 2
    assert text.stderr == ""


def test_a_model_that_cannot_be_loaded_is_one_line_and_a_file_has_the_rest(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    model = shutil.copytree(resolve_model("mini"), tmp_path / "model")
    os.truncate(model / "model.safetensors", 1_000_000)
    failed = quire("serve", str(model), "--port", "0")
    assert (failed.returncode, failed.stdout) == (1, "")
    loading, error = failed.stderr.splitlines()
    assert loading == f"Loading {model} ..."
    assert error.startswith(f"error: {model / 'model.safetensors'} cannot be read: ")
    assert "Traceback" in (tmp_path / "quire" / "engine.log").read_text()


def test_the_front_process_does_not_import_torch():
    code = (
        "import sys, typer; from quire.cli.main import app\n"
        "app(['generate', 'Hello', '--max-tokens', '2'], standalone_mode=False)\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'transformers', 'rich')))"
    )
    result = run([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr


def test_ctrl_c_ends_the_command_and_its_engine():
    with started_long_answer() as process:
        assert process.stdout.read(1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    assert children
    assert psutil.wait_procs(children, timeout=60)[1] == []


def test_a_reader_that_goes_away_ends_the_command_quietly():
    with started_long_answer() as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
        process.wait()
    assert process.returncode == 1


def test_chat_over_a_pipe():
    result = quire("chat", "--max-tokens", "4", stdin="Hello\nAgain\n/reset\nHello\n/quit\n")
    assert result.returncode == 0, result.stderr
    first, _, third = result.stdout.splitlines()
    assert first == third


IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
PROMPT = b"\x1b[?2004h"  # which has pasted text marked as such


def test_chat_in_a_terminal(tmp_path):
    """Pasted lines are one turn, Ctrl-C stops an answer that streams, and twice at the prompt quits."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", IN_TERMINAL, *QUIRE, "chat", "--ignore-eos"]
    variables = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(tmp_path)}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    with (
        open(ours, "r+b", buffering=0) as terminal,
        started(command, env={**os.environ, **variables}, **pipes) as process,
    ):
        os.close(theirs)
        for expected, keys in (
            (PROMPT, b"\x1b[200~What is\na KV block?\x1b[201~\r"),
            (b"fixed-size", b"\x03"),
            (b" [stopped]", b""),
            (PROMPT, b"\x03"),
            (b"Ctrl-C again quits", b""),
            (PROMPT, b"\x03"),
        ):
            read_until(terminal, expected)
            terminal.write(keys)
        assert process.wait() == 0
    assert "+What is\n+a KV block?\n" in (tmp_path / "quire" / "chat-history").read_text()


def read_until(terminal: BinaryIO, expected: bytes) -> None:
    seen = b""
    while not seen.endswith(expected):
        seen += terminal.read(1)


def test_a_configuration_that_the_engine_refuses():
    result = quire("generate", "Hello", "--num-kv-blocks", "1000000000")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: --num-kv-blocks asks for a KV cache of 32.8 TB")


def test_plan_of_the_built_in_model():
    result = CliRunner().invoke(app, ["plan", "--json", "--memory", "4"])
    plan = json.loads(result.stdout)
    assert plan["weight_bytes"] == plan["num_parameters"] * 2
    assert plan["kv_bytes"] == plan["num_blocks"] * plan["kv_bytes_per_token"] * plan["block_size"]
    assert plan["max_sequences"][str(plan["max_model_len"])] >= 1
    assert "role" not in plan


def test_plan_of_a_part_of_a_split():
    options = ["plan", "--role", "decode", "--kv-transports", "tcp"]
    plan = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)
    assert (plan["role"], plan["kv_transports"]) == ("decode", "tcp")
    shown = CliRunner().invoke(app, options).stdout
    assert "Role decode: reads the KV of prompts from peers" in shown
    of_ranks = CliRunner().invoke(app, [*options, "--tensor-parallel-size", "2"]).stdout
    assert re.findall(r"[\d.]+ MB for 1,000 tokens", of_ranks) == re.findall(
        r"[\d.]+ MB for 1,000 tokens", shown
    )
    assert "of all 2 ranks" in of_ranks.replace("\n", " ")


def test_plan_of_a_gpu_that_is_not_here():
    options = ["plan", "--device", "cuda", "--memory", "80"]
    plan = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)
    assert (plan["device"], plan["available_bytes"]) == ("cuda", 80 * 10**9)
    options += ["--tensor-parallel-size", "2"]
    of_rank = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)
    assert (of_rank["num_ranks"], of_rank["available_bytes"]) == (2, 80 * 10**9)
    assert of_rank["kv_bytes_per_token"] == plan["kv_bytes_per_token"] / 2
    refused = quire(*options, "--role", "prefill")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: --tensor-parallel-size is 2 and --role is 'prefill', but ")


@pytest.mark.parametrize("memory", ["nan", "inf", "0", "-3"])
def test_plan_refuses_memory_that_is_no_amount(memory: str):
    result = quire("plan", "--memory", memory)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: --memory is {float(memory)}; ")


def test_plan_as_tables():
    result = CliRunner().invoke(app, ["plan", "--num-kv-blocks", "100"])
    assert result.exit_code == 0
    assert "100 blocks, 1,600 tokens" in result.stdout
    assert ["512", "3", "KV", "blocks"] in [line.split() for line in result.stdout.splitlines()]


def test_eval_of_the_built_in_model():
    result = CliRunner().invoke(app, ["eval", "--limit", "1", "--task", "add", "--task", "qa", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {task: score["prompts"] for task, score in report["tasks"].items()} == {"qa": 1, "add": 1}
