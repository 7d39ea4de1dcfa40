"""What prefill and decode apart cost and gain: time to the first token, time between tokens beside prompts.

The model has Qwen3-0.6B's shape and random weights. All engines run on this machine.

- First token of a prompt that nobody has seen: one engine; the split with one call after the other; the split
  with both calls at once, where layers travel while they are computed. The engine that does both and the one
  that prefills have the same core, the one that decodes another. The answer is one token, and its
  log-probability must be the same either way. Rounds alternate.
- First token of a prompt that another engine has cached: two engines that do everything, one core each, ask
  each other. In turns, one computes a prompt and the other reads it.
- Mixed load: some streams decode without pause while long prompts arrive one after another. Two engines with
  one core each: both take streams and prompts by turns, or one prefills and the other decodes. The figure is
  the 99th percentile of the time between two tokens of the steady streams.

    python benchmarks/serving_split.py [--prompt-len 1024] [--rounds 5] [--seconds 40] [--transports tcp]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from random_model import random_model

FIRST_ID, END_ID = 10, 250  # token ids of prompts, which every model has
START_LIMIT = 300  # seconds
KV_BLOCKS = 1024

Body = dict[str, Any]


class Server:
    """`quire serve` in a process of its own.

    Args:
        model: directory.
        cpus: numbers of the cores that it may use.
        options: of the command.
    """

    def __init__(self, model: str, cpus: list[int], *options: str) -> None:
        pinned = ["taskset", "--cpu-list", ",".join(map(str, cpus))]
        command = [*pinned, sys.executable, "-m", "quire.cli.main", "serve", model, "--port", "0", *options]
        command += ["--num-threads", str(len(cpus)), "--num-kv-blocks", str(KV_BLOCKS)]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, text=True)
        self.port = self._wait_until_ready()

    def _wait_until_ready(self) -> int:
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline and self.process.poll() is None:
            self.log.seek(0)
            for line in self.log:
                if line.startswith("Ready: http://"):
                    return int(line.split("//")[1].split()[0].rsplit(":", 1)[1])
            time.sleep(0.1)
        self.log.seek(0)
        raise SystemExit(f"an engine did not start:\n{self.log.read()}")

    def get(self, path: str) -> Any:
        """Return the JSON at a path."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())

    def complete(self, body: Body) -> Body:
        """Return the whole answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer: Body = json.loads(connection.getresponse().read())
        if "error" in answer:
            raise SystemExit(f"an engine answered {answer['error']}")
        return answer

    def stream(self, body: Body) -> Iterator[tuple[float, str]]:
        """Yield the time of each event of an answer (seconds), and its text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        text = json.dumps(body | {"stream": True})
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                yield time.perf_counter(), json.loads(line[6:])["choices"][0]["text"]

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait()


def prompt_of(length: int, seed: int) -> list[int]:
    """Return random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_ID, END_ID) for _ in range(length)]


def body_of(prompt: list[int], max_tokens: int) -> Body:
    """Return a request."""
    options = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"model": "model", "prompt": prompt, **options}


def after_each_other(prefill: Server, decode: Server, body: Body) -> Body:
    """Return an answer of the split, first one call and then the other."""
    lent = prefill.complete(body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})
    return decode.complete(body | {"kv_transfer_params": lent["kv_transfer_params"]})


def at_once(prefill: Server, decode: Server, body: Body) -> Body:
    """Return an answer of the split, with both calls at once."""
    where = prefill.get("/engine")["kv_transfer"]
    transfer_id = random.randbytes(16).hex()
    lend = {"do_remote_decode": True, "transfer_id": transfer_id}
    read = {
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_host": where["host"],
        "remote_port": where["port"],
    }
    request = body | {"max_tokens": 1, "kv_transfer_params": lend}
    computing = threading.Thread(target=prefill.complete, args=(request,))
    computing.start()
    answer = decode.complete(body | {"kv_transfer_params": read})
    computing.join()
    return answer


def measure_first_token(model: str, arguments: argparse.Namespace) -> None:
    """Print the times to the first token, and their ratios."""
    first_cpu, second_cpu, *_ = sorted(os.sched_getaffinity(0))
    options = ["--served-model-name", "model", "--kv-transports", arguments.transports]
    with contextlib.ExitStack() as stack:
        servers = [
            Server(model, [first_cpu], *options),
            Server(model, [first_cpu], *options, "--role", "prefill"),
            Server(model, [second_cpu], *options, "--role", "decode"),
        ]
        for one in servers:
            stack.callback(one.close)
        alone, prefill, decode = servers
        ways: dict[str, Callable[[Body], Body]] = {
            "one engine": alone.complete,
            "one call after the other": lambda body: after_each_other(prefill, decode, body),
            "both calls at once": lambda body: at_once(prefill, decode, body),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(arguments.rounds + 1):
            for way, (name, complete) in enumerate(ways.items()):
                # of the two ways of the split, each has prompts of its own: the other's would be cached
                body = body_of(prompt_of(arguments.prompt_len, seed=2 * number + way % 2), 1) | {
                    "logprobs": 1
                }
                began = time.perf_counter()
                answer = complete(body)
                if number:  # the first round warms up
                    times[name].append(time.perf_counter() - began)
                check_equal(answer, alone.complete(body))
    best = min(times["one engine"])
    for name, values in times.items():
        print(
            f"{name:26} best {min(values):.3f} s, median {statistics.median(values):.3f} s, "
            f"{min(values) / best:.3f} of one engine's best, "
            f"{statistics.median(values) / statistics.median(times['one engine']):.3f} of its median"
        )


def measure_shared_prefixes(model: str, arguments: argparse.Namespace) -> None:
    """Print the time to the first token of a prompt that an equal has cached, beside that to compute it."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    ports = free_ports(2)
    peers = ",".join(f"127.0.0.1:{port}" for port in ports)
    options = ["--served-model-name", "model", "--kv-transports", arguments.transports, "--kv-peers", peers]
    with contextlib.ExitStack() as stack:
        servers = []
        for cpu, port in zip(cpus, ports, strict=True):
            servers.append(Server(model, [cpu], *options, "--kv-transfer-port", str(port)))
            stack.callback(servers[-1].close)
        times: dict[str, list[float]] = {"computed": [], "read from the equal": []}
        for number in range(arguments.rounds + 1):
            body = body_of(prompt_of(arguments.prompt_len, seed=5000 + number), 1) | {"logprobs": 1}
            answers = []
            for name, server in zip(times, servers, strict=True):
                began = time.perf_counter()
                answers.append(server.complete(body))
                if number:  # the first round warms up
                    times[name].append(time.perf_counter() - began)
            check_equal(*answers)
            servers.reverse()
    computed, read = (statistics.median(values) for values in times.values())
    print(
        f"a prompt that an equal has cached: computed {computed:.3f} s, read {read:.3f} s (medians), "
        f"{read / computed:.3f} times"
    )


def free_ports(count: int) -> list[int]:
    """Return numbers of TCP ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def check_equal(answer: Body, expected: Body) -> None:
    """End the program if two answers differ in any bit of their log-probabilities."""
    logprobs = [one["choices"][0]["logprobs"]["token_logprobs"] for one in (answer, expected)]
    if logprobs[0] != logprobs[1]:
        raise SystemExit(f"answers differ: {logprobs}")


def steady_gaps(
    servers: list[Server], send_prompt: Callable[[Body], object], arguments: argparse.Namespace
) -> str:
    """Return the times between tokens of steady streams while prompts arrive."""
    gaps: list[float] = []
    prompts = itertools.count(1000)
    stop = threading.Event()

    def decode(server: Server, seed: int) -> None:
        # with log-probabilities, every token is an event, whether it ends a character or not
        body = body_of(prompt_of(64, seed), arguments.steady_tokens) | {"logprobs": 1}
        while not stop.is_set():
            times = [at for at, _ in server.stream(body)]
            gaps.extend(after - before for before, after in itertools.pairwise(times))

    threads = [
        threading.Thread(target=decode, args=(servers[index % len(servers)], index))
        for index in range(arguments.streams)
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + arguments.seconds
    num_prompts = 0
    while time.monotonic() < until:
        send_prompt(body_of(prompt_of(arguments.prompt_len, next(prompts)), 4))
        num_prompts += 1
    stop.set()
    for thread in threads:
        thread.join()
    gaps.sort()
    p50, p99 = (gaps[int(len(gaps) * share)] for share in (0.5, 0.99))
    return (
        f"{num_prompts} prompts, {len(gaps)} tokens; between tokens: median {p50 * 1e3:.0f} ms, "
        f"p99 {p99 * 1e3:.0f} ms, most {gaps[-1] * 1e3:.0f} ms"
    )


def measure_mixed_load(model: str, arguments: argparse.Namespace) -> None:
    """Print the times between tokens of both arrangements."""
    first_cpu, second_cpu, *_ = sorted(os.sched_getaffinity(0))
    options = ["--served-model-name", "model", "--kv-transports", arguments.transports]
    both = [Server(model, [cpu], *options) for cpu in (first_cpu, second_cpu)]
    turns = itertools.cycle(both)
    try:
        result = steady_gaps(both, lambda body: next(turns).complete(body), arguments)
    finally:
        for one in both:
            one.close()
    print(f"two engines that do both:  {result}")
    prefill = Server(model, [first_cpu], *options, "--role", "prefill")
    decode = Server(model, [second_cpu], *options, "--role", "decode")
    try:
        result = steady_gaps([decode], lambda body: at_once(prefill, decode, body), arguments)
    finally:
        prefill.close()
        decode.close()
    print(f"prefill and decode apart:  {result}")


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="directory of a model; default: random weights")
    parser.add_argument("--prompt-len", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=40.0, help="of mixed load; 0: none")
    parser.add_argument("--streams", type=int, default=4, help="that decode without pause")
    parser.add_argument("--steady-tokens", type=int, default=128, help="of each answer of these streams")
    parser.add_argument("--transports", default="shared_memory,tcp")
    arguments = parser.parse_args()
    with random_model(arguments.model) as model:
        if arguments.rounds:
            measure_first_token(model, arguments)
            measure_shared_prefixes(model, arguments)
        if arguments.seconds:
            measure_mixed_load(model, arguments)


if __name__ == "__main__":
    main()
