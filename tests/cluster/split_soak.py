"""Engines behind a router under random faults: `make soak-split`, see docs/many-machines.md.

Four engines and the router are machines of their own, network namespaces on this one: two engines prefill and
two decode, or (`--alike`) all four do both. Clients ask without pause, streamed and not, for answers that are
known beforehand from one engine. Meanwhile engines are killed, stopped for longer than a lease, cut off, and
met by silence. Every answer must be right, tokens and log-probabilities, or end with an error that names its
cause, in time; and when all is over, no engine may hold anything.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable

import psutil
from asking_clients import Clients, Expected, expected_answers
from network_namespaces import Machine, Network, enter, network_of, why_not_permitted

ROUTER = "router"
SPLIT = {"prefill1": "prefill", "prefill2": "prefill", "decode1": "decode", "decode2": "decode"}
ALIKE = {f"engine{number}": "engine" for number in range(1, 5)}
PORT, KV_PORT = 8000, 8100
LEASE = 5.0  # seconds
RECOVERY_LIMIT = 120.0  # seconds until all engines are up again after a fault
KINDS = ("kill", "kill the engine process", "stop", "cut", "silence")


class ViolationError(Exception):
    """What must never happen has happened."""


class Process:
    """A command of Quire on a machine, which can be killed and started again.

    Args:
        machine: where it runs.
        arguments: of `quire`.
    """

    def __init__(self, machine: Machine, arguments: list[str]) -> None:
        self.machine = machine
        self._arguments = arguments
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self.start()

    def start(self) -> None:
        """Start it, in a process group of its own."""
        command = self.machine.command([sys.executable, "-m", "quire.cli.main", *self._arguments])
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.wait()

    def kill_engine_process(self) -> None:
        """Kill only the process that computes; the server starts another."""
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "quire.engine.process.main" in child.cmdline():
                    child.kill()

    def log(self) -> str:
        """Return the end of what it has printed."""
        self._log.seek(0)
        return self._log.read()[-4000:]


class EnginesUnderFaults:
    """The machines, what runs on them, and what clients have seen.

    Args:
        roles: of the engines, by name.
        num_clients: how many clients ask at a time.
        network: of machines for the router and every engine.
        expected: answers by prompt.
        rng: chooses faults.
    """

    def __init__(
        self,
        roles: dict[str, str],
        num_clients: int,
        network: Network,
        expected: dict[str, Expected],
        rng: random.Random,
    ) -> None:
        self._roles = roles
        self._network = network
        self._rng = rng
        machines = network.machines
        self.engines = {
            name: Process(machines[name], engine_arguments(machines[name], role))
            for name, role in roles.items()
        }
        self.router = Process(machines[ROUTER], router_arguments(roles, machines))
        router = machines[ROUTER]
        self.clients = Clients(num_clients, expected, router.namespace, (router.address, PORT), tuple(roles))

    def begin(self) -> None:
        """Wait until all is up, and let the clients ask."""
        self.wait_until_up()
        self.clients.begin()

    def strike(self, kind: str, name: str) -> None:
        """Let a fault happen to an engine, and wait until all is up again."""
        engine, machine = self.engines[name], self._network.machines[name]
        seconds = self._rng.uniform(0.2, 1.6 * LEASE)
        if kind == "kill":
            engine.kill()
            engine.start()
        elif kind == "kill the engine process":
            engine.kill_engine_process()
            time.sleep(seconds / 4)  # the server starts another by itself
        elif kind == "stop":
            engine.signal(signal.SIGSTOP)
            time.sleep(seconds)
            engine.signal(signal.SIGCONT)
        elif kind == "cut":
            machine.cut()
            time.sleep(seconds)
            machine.restore()
        else:
            self._network.switch.silence()
            time.sleep(seconds)
            self._network.switch.release()
        self.wait_until_up()

    def end(self) -> None:
        """Let the clients finish, and check that nothing is held."""
        self.clients.stop()
        self.clients.join()
        deadline = time.monotonic() + 4 * LEASE
        while held := self._held():
            if time.monotonic() > deadline:
                raise ViolationError(f"still held after the last request: {held}")
            time.sleep(0.2)

    def close(self) -> None:
        """Kill everything."""
        self.clients.stop()
        for process in (self.router, *self.engines.values()):
            process.kill()

    def wait_until_up(self) -> None:
        """Wait until the router takes all engines for up."""
        deadline = time.monotonic() + RECOVERY_LIMIT
        while not self._is_all_up():
            if time.monotonic() > deadline:
                logs = "\n".join(f"== {name}\n{one.log()}" for name, one in self.engines.items())
                raise ViolationError(f"not all engines came back:\n{logs}\n== router\n{self.router.log()}")
            time.sleep(0.2)

    def _is_all_up(self) -> bool:
        try:
            metrics = self._metrics(ROUTER)
            for name in self._roles:
                self._metrics(name)  # the router may not have noticed the fault yet
        except (OSError, http.client.HTTPException):
            return False
        up = [value for key, value in metrics.items() if key.startswith("quire_route_engine_up")]
        return up == [1.0] * len(self._roles)

    def _held(self) -> dict[str, dict[str, float]]:
        """Return what is not as in an engine that does nothing."""
        held = {}
        for name in self._roles:
            metrics = self._metrics(name)
            blocks = metrics["quire_kv_blocks"] - metrics["quire_kv_blocks_free"]
            figures = {"blocks": blocks, "leased": metrics["quire_kv_blocks_leased"]}
            figures |= {key: metrics[f"quire_requests_{key}"] for key in ("running", "waiting")}
            if any(figures.values()):
                held[name] = figures
        return held

    def _metrics(self, name: str) -> dict[str, float]:
        machine = self._network.machines[name]
        text = in_namespace(
            self._network.machines[ROUTER].namespace, lambda: get(machine.address, "/metrics")
        )
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {key: float(value) for key, value in rows}


def engine_arguments(machine: Machine, role: str) -> list[str]:
    """Return the arguments of `quire` for an engine."""
    options = {"--host": machine.address, "--port": PORT, "--num-threads": 1, "--num-kv-blocks": 512}
    if role != "engine":
        options |= {
            "--role": role,
            "--kv-transfer-host": machine.address,
            "--kv-transfer-port": KV_PORT,
            "--kv-transfer-token": "shared by all",
            "--kv-transfer-timeout": LEASE,
            "--kv-transports": "tcp",
        }
    return ["serve", "mini", *(str(part) for pair in options.items() for part in pair)]


def router_arguments(roles: dict[str, str], machines: dict[str, Machine]) -> list[str]:
    """Return the arguments of `quire` for the router."""
    arguments = ["route", "--host", machines[ROUTER].address, "--port", str(PORT)]
    for name, role in roles.items():
        arguments += [f"--{role}", f"http://{machines[name].address}:{PORT}"]
    limits = {"min-prefill-bytes": 0, "prefill-timeout": 10, "first-byte-timeout": 20, "idle-timeout": 10}
    limits |= {"connect-timeout": 2, "health-interval": 0.5}
    return arguments + [str(part) for name, value in limits.items() for part in (f"--{name}", value)]


def get(address: str, path: str) -> str:
    """Return the answer to a GET request."""
    connection = http.client.HTTPConnection(address, PORT, timeout=10)
    connection.request("GET", path)
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def in_namespace(namespace: str, function: Callable[[], str]) -> str:
    """Return what a function returns in a namespace."""
    results: list[str] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            enter(namespace)
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def soak(roles: dict[str, str], num_clients: int, num_faults: int, seed: int) -> None:
    """Let faults strike; print each before, and a summary at the end."""
    rng = random.Random(seed)
    expected = expected_answers(rng)
    kinds: Counter[str] = Counter()
    with network_of(ROUTER, *roles, seed=seed) as network:
        split = EnginesUnderFaults(roles, num_clients, network, expected, rng)
        try:
            split.begin()
            for number in range(num_faults):
                kind, name = rng.choice(KINDS), rng.choice(list(roles))
                print(f"{number}: {kind} {name}; so far {split.clients.so_far()}", flush=True)
                time.sleep(rng.uniform(0.1, 1.0))
                split.strike(kind, name)
                kinds[kind] += 1
                if split.clients.violations:
                    raise ViolationError("; ".join(split.clients.violations))
            split.end()
        finally:
            split.close()
    print(f"{num_faults} faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))
    print(f"{split.clients.report()}; nothing held at the end")


def main() -> None:
    """Run the soak that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alike", action="store_true", help="four engines that prefill and decode")
    parser.add_argument("--clients", type=int, default=3, help="number of clients that ask at a time")
    options = parser.parse_args()
    reason = why_not_permitted()
    if reason is not None:
        sys.exit(reason)
    soak(ALIKE if options.alike else SPLIT, options.clients, options.faults, options.seed)


if __name__ == "__main__":
    main()
