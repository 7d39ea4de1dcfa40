"""`quire bench` in whole: each command on the built-in model, its help, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner, Result

from quire.cli.bench_options import ArrivalConfig, LatencyConfig, TargetConfig, WorkloadConfig
from quire.cli.console import flag_name, in_flags, parameter_name
from quire.cli.main import app
from quire.cli.options import config_fields
from quire.config import EngineConfig
from subprocesses import started

QUIRE = [sys.executable, "-m", "quire.cli.main"]
SMALL = ("--num-kv-blocks", "256", "--num-threads", "1")
COMMANDS = {
    "throughput": (WorkloadConfig, EngineConfig),
    "latency": (LatencyConfig, EngineConfig),
    "serve": (WorkloadConfig, ArrivalConfig, TargetConfig, EngineConfig),
}


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_throughput_of_the_built_in_model(tmp_path: Path):
    file = tmp_path / "figures.json"
    result = bench(
        "throughput",
        *("--num-prompts", "4", "--input-len", "8", "--prefix-len", "32", "--output-len", "5"),
        *("--rounds", "2", "--json", str(file), *SMALL),
    )
    assert result.exit_code == 0, result.output
    results = json.loads(file.read_text())["results"]
    assert (results["input_tokens"], results["output_tokens"]) == (4 * 40, 4 * 5)
    assert results["cached_tokens"] < 4 * 40
    assert results["seconds"] == min(results["rounds_seconds"])
    assert results["output_tokens_per_second"] == 20 / results["seconds"]
    assert f"{results['output_tokens_per_second']:,.1f}" in result.stdout
    assert f"{results['ttft_seconds']['p90'] * 1000:,.2f}" in result.stdout


def test_latency_of_the_built_in_model():
    result = bench(
        "latency",
        *("--batch-size", "2", "--input-len", "20", "--output-len", "4", "--repeats", "3", "--warmup", "1"),
        *("--json", "-", *SMALL),
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    runs = data["results"]["runs_seconds"]
    assert len(runs) == 3
    assert data["results"]["batch_seconds"]["mean"] == pytest.approx(sum(runs) / 3)
    assert data["results"]["per_token_seconds"]["mean"] == pytest.approx(sum(runs) / 12)
    assert data["results"]["fastest_seconds"] == min(runs)
    assert data["settings"]["engine"]["scheduler"]["num_kv_blocks"] == 256


@pytest.mark.processes
def test_serving_of_the_built_in_model(tmp_path: Path, preloaded_engines):
    plot, file = tmp_path / "latencies.svg", tmp_path / "figures.json"
    result = bench(
        "serve",
        *("--dataset", "alpaca", "--scale", "0.2", "--num-prompts", "5", "--request-rate", "200"),
        *("--max-concurrency", "2", "--goodput", "latency:100000", "--per-request", "--json", str(file)),
        *("--plot", str(plot), *SMALL),
    )
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    results, requests = data["results"], data["requests"]
    assert (results["completed"], results["failed"], results["ended_early"]) == (5, 0, 0)
    assert results["goodput_requests_per_second"] == results["requests_per_second"]
    assert results["output_tokens"] == sum(request["output_len"] for request in requests)
    assert results["workload"]["mean_output_len"] == results["output_tokens"] / 5
    arrivals = [request["arrived"] for request in requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0 < arrivals[1]
    assert plot.stat().st_size
    assert "time to first token" in result.stdout


@pytest.fixture(scope="module")
def server_url():
    command = [*QUIRE, "serve", "--port", "0", "--served-model-name", "small", "--api-key", "key", *SMALL]
    limit = 600  # of all tests that use it
    with started(
        command, limit=limit, preload=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        yield process.stdout.readline().split()[1]


def test_serving_by_a_server_that_runs(server_url: str):
    result = bench(
        "serve",
        *("--base-url", f"{server_url}/v1", "--api-key", "key", "--json", "-"),
        *("--num-prompts", "4", "--input-len", "6", "--prefix-len", "48", "--output-len", "5"),
        *("--max-concurrency", "1"),
    )
    assert result.exit_code == 0, result.output
    results = json.loads(result.stdout)["results"]
    assert (results["completed"], results["failed"], results["ended_early"]) == (4, 0, 0)
    assert (results["input_tokens"], results["output_tokens"]) == (4 * 54, 4 * 5)
    assert results["cached_tokens"] == 3 * 48
    assert results["ttft_seconds"]["mean"] <= results["latency_seconds"]["mean"]


def test_the_length_of_a_server_is_known(server_url: str):
    arguments = ("--base-url", f"{server_url}/v1", "--api-key", "key", "--input-len", "1000000")
    result = bench("serve", *arguments)
    assert result.exit_code == 2
    assert "tokens make 1,000,128; the limit is" in result.stderr


def test_a_server_that_refuses_the_key(server_url: str):
    result = bench("serve", "--base-url", f"{server_url}/v1", "--api-key", "wrong")
    assert result.exit_code == 1
    assert "answered 401 without a list of models" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_server_that_is_not_there():
    result = bench("serve", "--base-url", "http://127.0.0.1:1/v1")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cannot reach http://127.0.0.1:1/v1/models: ")


def test_requests_that_fail_are_counted_and_end_with_a_status(preloaded_engines):
    result = bench(
        "serve",
        *("--num-prompts", "6", "--input-len", "8", "--output-len", "4", "--warmup", "0"),
        *("--max-num-queued-reqs", "1", "--max-num-seqs", "1", *SMALL),
    )
    assert result.exit_code == 1
    assert "requests failed; the first error: " in result.stdout
    assert "--max-num-queued-reqs" in " ".join(result.stdout.split())


@pytest.mark.processes
def test_ctrl_c_ends_the_benchmark_and_its_engine():
    command = [*QUIRE, "bench", "serve", "--input-len", "8", "--output-len", "3000", "--warmup", "0", *SMALL]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        quire = psutil.Process(process.pid)
        while not (children := quire.children(recursive=True)) and process.poll() is None:
            pass
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert b"Traceback" not in stderr
    assert psutil.wait_procs(children, timeout=60)[1] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("serve", "--request-rate", "-1"),
            "--request-rate is -1.0; it must be above 0",
        ),
        (("serve", "--request-rate", "nan"), "--request-rate is nan; it must be above 0"),
        (("serve", "--burstiness", "0"), "--burstiness is 0.0; it must be above 0"),
        (("serve", "--max-concurrency", "-2"), "--max-concurrency is -2; it must be at least 0"),
        (("serve", "--goodput", "tftt:3"), "--goodput names 'tftt'; did you mean 'ttft'?"),
        (("serve", "--goodput", "ttft:x"), "--goodput ttft:x: 'x' must be milliseconds above 0"),
        (("serve", "--base-url", "host"), "--base-url is 'host'; it must begin with http://"),
        (("serve", "--api-key", "k"), "--api-key is for a server, so it needs --base-url"),
        (("serve", "--per-request"), "--per-request adds to the JSON, so it needs --json FILE"),
        (("serve", "--plot", "x.txt"), "--plot is x.txt; it must end in one of"),
        (("throughput", "--dataset", "sharegtp"), "--dataset is 'sharegtp'; did you mean 'sharegpt'?"),
        (("throughput", "--num-prompts", "0"), "--num-prompts is 0; it must be at least 1"),
        (("throughput", "--input-len", "0"), "--input-len is 0; it must be at least 1"),
        (("throughput", "--scale", "2"), "--scale is 2.0, but --dataset is random; leave it out or use"),
        (
            ("throughput", "--dataset", "alpaca", "--output-len", "3"),
            "--output-len is 3, but --dataset is alpaca; leave it out or use --dataset random",
        ),
        (("throughput", "--dataset", "alpaca", "--scale", "nan"), "--scale is nan; it must be above 0"),
        (("throughput", "--json", "/no/such/place.json"), "cannot write --json /no/such/place.json"),
        (("latency", "--repeats", "0"), "--repeats is 0; it must be at least 1"),
    ],
)
def test_what_is_refused_before_anything_runs(arguments: tuple[str, ...], message: str):
    result = bench(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_lengths_that_do_not_fit_the_model_are_refused():
    result = bench("latency", "--input-len", "90000", "--output-len", "10", *SMALL)
    assert result.exit_code == 2
    assert "a prompt of 90,000 and an output of 10 tokens make 90,010; the limit is " in result.stderr
    assert "lower --input-len or --output-len" in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_field_is_a_flag_with_help(command: str):
    group = typer.main.get_command(app).get_command(None, "bench")
    params = {param.name: param for param in group.commands[command].params}
    fields = [(owner, field) for cls in COMMANDS[command] for owner, field, _ in config_fields(cls)]
    names = [parameter_name(owner.__name__, field.name) for owner, field in fields]
    assert len(set(names)) == len(names)
    for name, (_, field) in zip(names, fields, strict=True):
        assert params[name].help.startswith(in_flags(field.metadata["help"]))
        assert flag_name(name) in params[name].opts or name == "model"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_page_has_a_purpose_examples_and_groups(command: str):
    page = bench(command, "--help").stdout
    assert page.startswith("Usage: ")
    assert f"Examples:\n  quire bench {command}" in page
    assert all(f"\n{title}\n" in page for title in ("Options", "Engine", "Scheduling and KV cache"))


def test_the_first_page_lists_the_benchmarks():
    page = bench("--help").stdout
    assert all(f"\n  {command} " in page for command in COMMANDS)
