"""An engine's process: what it answers, and why it fails, with a worker that needs no engine."""

from __future__ import annotations

import pytest
from peers_engines import HERE, EngineKind
from peers_process import EngineError, EngineProcess
from peers_workload import Workload

WORKER = """
import os, sys
from peers_worker import serve

class Echo:
    def __init__(self, model, precision, shape):
        os.write(1, b"not for the talk\\n")
        {init}
    def prepare(self, num_requests, prefix):
        self.offset = len(prefix)
    def generate(self, prompts, output_tokens):
        {generate}
        return [prompt[self.offset:][:output_tokens] for prompt in prompts]

serve(Echo, ("pytest",))
"""
WORKLOAD = Workload("2x4/3", 2, prompt_tokens=4, output_tokens=3, shared_tokens=2)


@pytest.fixture
def start(tmp_path):
    processes = []

    def started(init: str = "pass", generate: str = "pass") -> EngineProcess:
        script = tmp_path / "worker.py"
        script.write_text(WORKER.format(init=init, generate=generate))
        kind = EngineKind("Echo", str(script), {"bf16": "none"}, variables={"PYTHONPATH": str(HERE)})
        processes.append(EngineProcess(kind, "bf16", "0.6b", tmp_path / "log"))
        return processes[-1]

    yield started
    for process in processes:
        process.kill()


def test_a_worker_runs_workloads_whatever_its_libraries_print(start):
    process = start()
    assert process.versions == {"pytest": pytest.__version__}
    assert process.seconds_to_ready > 0
    prompts = WORKLOAD.prompts("1")
    seconds, outputs = process.run(WORKLOAD, prompts)
    assert seconds >= 0
    assert outputs == [prompt[2:5] for prompt in prompts]
    process.close()


def test_a_stopped_worker_goes_on_where_it_was(start):
    process = start()
    process.pause()
    with process.awake():
        _, outputs = process.run(WORKLOAD, WORKLOAD.prompts("1"))
    assert len(outputs) == WORKLOAD.num_requests
    assert process.peak_memory() > 2**20


def test_a_worker_that_cannot_load_says_why(start):
    with pytest.raises(EngineError, match=r"ended with status 3(.|\n)*no such weights"):
        start(init="print('no such weights', file=sys.stderr); sys.exit(3)")


def test_a_worker_is_ready_when_it_has_answered_a_token(start):
    with pytest.raises(EngineError, match="no token yet"):
        start(generate="raise ValueError('no token yet')")


def test_a_worker_that_ends_amid_its_work_says_why(start):
    process = start(generate="if output_tokens > 1: raise ValueError('cannot decode')")
    with pytest.raises(EngineError, match="cannot decode"):
        process.run(WORKLOAD, WORKLOAD.prompts("1"))
    with pytest.raises(EngineError, match="ended with status 1"):
        process.run(WORKLOAD, WORKLOAD.prompts("2"))


def test_outputs_of_another_length_are_an_error(start):
    process = start(generate="output_tokens -= 1")
    with pytest.raises(EngineError, match=r"should give 3 tokens each, not \[2, 2\]"):
        process.run(WORKLOAD, WORKLOAD.prompts("1"))


def test_an_environment_that_is_not_there_is_an_error(tmp_path):
    kind = EngineKind("Nobody", "peers_quire.py", {"bf16": "none"}, "nobody")
    with pytest.raises(EngineError, match="make bench-peers"):
        EngineProcess(kind, "bf16", "0.6b", tmp_path / "log")
