"""A batch of a real server that is killed in the middle, and of the one after it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

import engine_schedulers
import subprocesses

pytestmark = pytest.mark.processes

PROGRAM = """
import sys
from quire.config import BatchConfig, EngineConfig, SchedulerConfig, ServerConfig
from quire.server.serve import serve

serve(
    EngineConfig(num_threads=1, scheduler=SchedulerConfig(num_kv_blocks=256), scheduler_cls=sys.argv[2]),
    ServerConfig(port=0, batches=BatchConfig(batch_dir=sys.argv[1], max_batch_requests=3)),
)
"""
NUM_LINES = 60


@contextlib.contextmanager
def server(directory, scheduler_cls="quire.scheduling.Scheduler"):
    command = [sys.executable, "-c", PROGRAM, str(directory), scheduler_cls]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(Path(engine_schedulers.__file__).parent)}
    with subprocesses.started(command, preload=True, env=environment, **pipes) as process:
        url = process.stdout.readline().split()[1]
        yield process, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def question(number):
    return {
        "model": "mini",
        "messages": [{"role": "user", "content": f"What is {number} + {number}?"}],
        "max_tokens": 12,
        "temperature": 0,
    }


def test_a_server_that_is_killed_leaves_a_batch_that_the_next_one_completes(tmp_path):
    lines = [
        {"custom_id": f"{one}", "method": "POST", "url": "/v1/chat/completions", "body": question(one)}
        for one in range(NUM_LINES)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    with server(tmp_path, "engine_schedulers.HaltingScheduler") as (process, client):
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        output = tmp_path / "files" / f"file-{batch.id.removeprefix('batch_')}-output"
        while not output.exists() or output.read_bytes().count(b"\n") < 3:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = output.read_bytes()
    num_left = left.count(b"\n")
    assert 3 <= num_left < NUM_LINES
    output.write_bytes(left + b'{"id": "batch_req_')  # a line that was torn
    with server(tmp_path) as (process, client):
        while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
            time.sleep(0.01)
        assert batch.request_counts.to_dict() == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        assert client.files.content(file.id).content == content
        answers = client.files.content(batch.output_file_id).content
        assert answers.startswith(left[: left.rindex(b"\n") + 1])
        results = [json.loads(line) for line in answers.splitlines()]
        assert sorted(int(one["custom_id"]) for one in results) == list(range(NUM_LINES))
        by_id = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"] for one in results}
        for number in (0, NUM_LINES - 1):
            asked = client.chat.completions.create(**question(number))
            assert by_id[f"{number}"]["content"] == asked.choices[0].message.content
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
