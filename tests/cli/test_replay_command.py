"""`quire replay` from the outside: tables, JSON, traces, and exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_scheduler import SmallScheduler
from typer.testing import CliRunner

from quire.cli.main import app
from quire.config import SchedulerConfig
from quire.recording.recorder import RecordingScheduler
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.step import ModelRunnerOutput


def quire(*arguments: object):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": "100"})


@pytest.fixture
def recorded(tmp_path) -> Path:
    path = tmp_path / "run.quire"
    scheduler = RecordingScheduler(
        SchedulerConfig(block_size=4),
        num_blocks=60,
        max_model_len=64,
        scheduler_cls=SmallScheduler,
        path=path,
    )
    scheduler.add_request(Request("one", [1, 2, 3], SamplingParams(max_tokens=2)))
    for token in (5, 6):
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, ModelRunnerOutput(["one"], np.array([[token]], dtype=np.int32)))
    scheduler.shutdown()
    return path


def changed(recorded: Path) -> Path:
    data = recorded.read_bytes()
    place = data.index(b"block_size") + len(b"block_size")
    recorded.write_bytes(data[:place] + b"\x02" + data[place + 1 :])
    return recorded


def test_the_same_again(recorded):
    result = quire(recorded)
    assert result.exit_code == 0, result.output
    assert "identical, call by call" in result.output
    assert "small_scheduler.SmallScheduler" in result.output


def test_a_difference_is_shown_and_is_a_failure(recorded):
    result = quire(changed(recorded))
    assert result.exit_code == 1
    assert "differs at call 1, schedule" in result.output
    assert "result.plan.scheduled_new_reqs[0].block_ids" in result.output


def test_json(recorded):
    report = json.loads(quire(recorded, "--json").output)
    assert report["same"] is True
    assert (report["num_calls"], report["num_steps"], report["num_requests"]) == (6, 2, 1)
    assert report["num_tokens"] == 4
    report = json.loads(quire(changed(recorded), "--json").output)
    assert report["same"] is False
    assert report["difference"]["name"] == "schedule"


def test_a_trace(recorded, tmp_path):
    result = quire(recorded, "--perfetto", tmp_path / "trace.json")
    assert result.exit_code == 0
    assert "ui.perfetto.dev" in result.output
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"prefill one", "decode one", "waiting", "running", "step 0", "free blocks"} <= names


@pytest.mark.parametrize("content", [None, b"something else"])
def test_errors_are_one_line(tmp_path, content: bytes | None):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    result = quire(path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


def test_help():
    page = CliRunner().invoke(app, ["replay", "--help"], env={"COLUMNS": "80"}).output
    assert "Examples:\n  quire serve --record-path" in page
    assert all(len(line) <= 80 for line in page.splitlines())
