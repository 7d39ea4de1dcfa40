"""Engines on a Ray cluster of two machines under random faults: `make soak-ray`, see docs/many-machines.md.

The machines are network namespaces on this one. The first has the head of the cluster and the ingress, and is
spared; both have engines. Clients ask the ingress without pause, while engine processes, replicas and all
that runs on the second machine are killed; one engine may still be starting when the next fault strikes.
Every answer must be right, tokens and log-probabilities.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator

import psutil
from asking_clients import Clients, expected_answers
from network_namespaces import Machine, network_of, why_not_permitted

PORT = 8001
ENGINES_PER_MACHINE = 2
START_LIMIT = 180.0  # seconds until all engines are up, at first and after a fault
KINDS = ("engine process", "replica", "machine")
DEPLOY = """
import sys, ray, quire.ray
from ray import serve
ray.init(address=sys.argv[1], logging_level="ERROR")
serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1"})
app = quire.ray.build_app(
    model="mini", num_replicas=int(sys.argv[2]), replica_cpus=1, num_threads=1, num_kv_blocks=512,
    ingress_port=int(sys.argv[3]), connect_timeout=2, health_interval=0.5, first_byte_timeout=30,
)
# The ingress needs no CPU of its own, and is where no fault strikes.
on_head = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.01}}
serve.run(serve.Application(app._bound_deployment.options(ray_actor_options=on_head)))
"""


class Cluster:
    """Ray on two machines.

    Args:
        head: has the head of the cluster and the ingress.
        other: has engines only.
    """

    def __init__(self, head: Machine, other: Machine) -> None:
        self._head = head
        self._other = other

    def start(self) -> None:
        """Start Ray and the engines; returns when all are up."""
        self._ray(self._head, "--head", "--port=6379", f"--num-cpus={ENGINES_PER_MACHINE}")
        self.start_other()
        numbers = f"{2 * ENGINES_PER_MACHINE}", f"{PORT}"
        self._run(self._head, sys.executable, "-P", "-c", DEPLOY, f"{self._head.address}:6379", *numbers)
        self._wait_until_up()

    def start_other(self) -> None:
        """Let the second machine join."""
        self._ray(self._other, f"--address={self._head.address}:6379", f"--num-cpus={ENGINES_PER_MACHINE}")

    def strike(self, kind: str, rng: random.Random) -> None:
        """Let a fault happen, and wait until all engines but one are up again."""
        if kind == "machine":
            for process in self._processes(self._other):
                process.kill()
            time.sleep(rng.uniform(0.5, 3.0))
            self.start_other()
        else:
            found = self._engine_processes if kind == "engine process" else self._replicas
            if not found():  # the last faults have not been noticed yet
                self._wait_until_up()
            with contextlib.suppress(psutil.NoSuchProcess):
                rng.choice(found()).kill()
        self._wait_until_up(2 * ENGINES_PER_MACHINE - 1)

    def close(self) -> None:
        """Kill all of Ray."""
        for machine in (self._other, self._head):
            for process in self._processes(machine):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _ray(self, machine: Machine, *options: str) -> None:
        common = [f"--node-ip-address={machine.address}", "--object-store-memory=100000000"]
        program = [sys.executable, "-m", "ray.scripts.scripts", "start", *common]
        self._run(machine, *program, "--disable-usage-stats", *options)

    def _run(self, machine: Machine, *command: str) -> None:
        environment = {**os.environ, "RAY_SERVE_LOG_TO_STDERR": "0", "RAY_AUTH_MODE": "disabled"}
        with tempfile.TemporaryFile("w+") as said:  # a pipe would stay open in what Ray starts
            ran = subprocess.run(
                machine.command(command), stdout=said, stderr=subprocess.STDOUT, env=environment, check=False
            )
            if ran.returncode:
                said.seek(0)
                raise SystemExit(f"{' '.join(command[:6])} failed:\n{said.read()}")

    def _processes(self, machine: Machine) -> Iterator[psutil.Process]:
        found = subprocess.run(
            ["ip", "netns", "pids", machine.namespace], capture_output=True, text=True, check=True
        )
        for pid in found.stdout.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                yield psutil.Process(int(pid))

    def _engine_processes(self) -> list[psutil.Process]:
        """Return the process that computes of each engine: the oldest, as standbys start later."""
        oldest: dict[int, psutil.Process] = {}  # by the process that they serve
        for process in (*self._processes(self._head), *self._processes(self._other)):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "quire.engine.process.main" in process.cmdline():
                    parent = process.ppid()
                    oldest[parent] = min(process, oldest.get(parent, process), key=psutil.Process.create_time)
        return list(oldest.values())

    def _replicas(self) -> list[psutil.Process]:
        found = []
        for process in (*self._processes(self._head), *self._processes(self._other)):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.cmdline()[:1] and process.cmdline()[0].endswith(":Engine"):
                    found.append(process)
        return found

    def _wait_until_up(self, number: int = 2 * ENGINES_PER_MACHINE) -> None:
        deadline = time.monotonic() + START_LIMIT
        while self._num_up() < number:
            if time.monotonic() > deadline:
                raise SystemExit(f"{self._num_up()} of {number} engines are up after {START_LIMIT:g} s")
            time.sleep(0.3)

    def _num_up(self) -> int:
        url = f"http://{self._head.address}:{PORT}/route/engines"
        asked = subprocess.run(
            self._head.command(["curl", "-s", "-m", "5", url]), capture_output=True, text=True, check=False
        )
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return sum(engine["state"] == "up" for engine in json.loads(asked.stdout)["data"])
        return 0


def soak(num_clients: int, num_faults: int, seed: int) -> None:
    """Let faults strike; print each before, and a summary at the end."""
    rng = random.Random(seed)
    expected = expected_answers(rng)
    kinds: Counter[str] = Counter()
    with network_of("head", "other", seed=seed) as network:
        head = network.machines["head"]
        cluster = Cluster(head, network.machines["other"])
        clients = Clients(num_clients, expected, head.namespace, (head.address, PORT), ())
        try:
            cluster.start()
            clients.begin()
            for number in range(num_faults):
                kind = rng.choice(KINDS)
                print(f"{number}: {kind}; so far {clients.so_far()}", flush=True)
                time.sleep(rng.uniform(0.1, 1.0))
                cluster.strike(kind, rng)
                kinds[kind] += 1
                if clients.violations:
                    break
        finally:
            clients.stop()
            clients.join()
            cluster.close()
    print(f"{kinds.total()} faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))
    print(clients.report())
    if clients.violations:
        sys.exit("; ".join(clients.violations))


def main() -> None:
    """Run the soak that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    reason = why_not_permitted()
    if reason is not None:
        sys.exit(reason)
    soak(options.clients, options.faults, options.seed)


if __name__ == "__main__":
    main()
