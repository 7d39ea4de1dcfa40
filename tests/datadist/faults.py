"""What goes wrong between two processes on machines of their own: drawn from a seed, and done to them.

It knows nothing of what the processes do: something of theirs is under way when a fault strikes.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Protocol

from network_namespaces import Network
from network_switch import Action

LONG = 1.5  # times the deadline of what is under way: it cannot survive that
SHORT = 0.3  # times it: it may
SLIGHT = 0.003  # seconds of delay that something has to survive

KINDS = {
    "cut": 3,
    "silence": 2,
    "short silence": 2,
    "loss": 2,
    "delay": 1,
    "reset": 3,
    "kill": 4,
    "kill unheard": 3,
    "stop": 3,
    "vanish": 1,
    "garbage": 2,
    "half-open connections": 1,
    "wrong token": 2,
}
"""How often each is drawn, relative to the others. Those of strangers let everything succeed."""

KINDS_ON_ONE_HOST = {"kill": 6, "stop": 2, "garbage": 1, "half-open connections": 1, "wrong token": 1}
"""Those that need no network between the processes."""

MOMENTS = {"data": 6, "first message": 1, "second message": 1, "behind second message": 1}
"""When something strikes: in what the source sends, or at or behind a message of the target, by weight."""

OF_ONE_SIDE = {"cut", "kill", "kill unheard", "stop"}
OF_STRANGERS = {"garbage", "half-open connections", "wrong token"}
STRIKING = OF_ONE_SIDE | {"silence", "short silence", "reset", "vanish"}


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        number: in its plan.
        kind: one of `KINDS`.
        operation: that it strikes.
        victim: machine that it hits, if it hits one.
        moment: when it strikes, one of `MOMENTS`; empty: it lasts all the time.
        reached: part of the data that has come then.
        loss: part of the frames that is lost.
        delay: seconds that frames are kept.
        seed: for what else is to be drawn.
    """

    number: int
    kind: str
    operation: str
    victim: str
    moment: str
    reached: float
    loss: float
    delay: float
    seed: int

    def __str__(self) -> str:
        details = f" of the {self.victim}" if self.victim else ""
        details += f" in {self.moment}" if self.moment else ""
        details += f" at {self.reached:.0%}" if self.moment == "data" else ""
        details += f", {self.loss:.1%} lost" if self.loss else ""
        details += f", {self.delay * 1e3:.0f} ms late" if self.delay else ""
        return f"{self.number}: a {self.operation}; {self.kind}{details}"

    @property
    def kills(self) -> bool:
        return self.kind in {"kill", "kill unheard", "vanish"}


def plan(
    seed: int,
    num_faults: int,
    source: str,
    target: str,
    *,
    operations: Mapping[str, int],
    kinds: Mapping[str, int] = KINDS,
) -> Iterator[Fault]:
    """Yield random faults, the same for the same arguments; only the target vanishes for good.

    Args:
        seed: of everything.
        num_faults: in all.
        source, target: of operations, the machines that may be hit.
        operations: how often each is drawn, relative to the others.
        kinds: likewise.
    """
    choose = random.Random(seed)
    for number in range(num_faults):
        (kind,) = choose.choices(list(kinds), list(kinds.values()))
        (operation,) = choose.choices(list(operations), list(operations.values()))
        (moment,) = choose.choices(list(MOMENTS), list(MOMENTS.values()))
        victim, reached = choose.choice((source, target)), choose.uniform(0.05, 0.9)
        loss, delay = choose.uniform(0.002, 0.03), choose.uniform(0.001, 0.03)
        yield Fault(
            number,
            kind,
            operation,
            target if kind == "vanish" else victim if kind in OF_ONE_SIDE else "",
            moment if kind in STRIKING else "",
            reached,
            loss if kind == "loss" else 0.0,
            delay if kind in {"delay", "loss"} else 0.0,
            seed=choose.randrange(1 << 32),
        )


class Process(Protocol):
    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...


class Injector:
    """Does faults to the processes that run on machines of the same names.

    Args:
        network: that the machines are on.
        processes: by the names of their machines; the dictionary may be changed.
        source, target: of operations; most bytes go from the one to the other.
        shares_host: nothing crosses the network, so a fault strikes at a time instead of a byte.
    """

    def __init__(
        self,
        network: Network,
        processes: Mapping[str, Process],
        source: str,
        target: str,
        *,
        shares_host: bool = False,
    ) -> None:
        self._network = network
        self._processes = processes
        self._source = network.machines[source].port
        self._target = network.machines[target].port
        self._shares_host = shares_host

    def arm(self, fault: Fault, num_bytes: int) -> None:
        """Prepare a fault that strikes in an operation that is about to begin, and takes so many bytes."""
        switch = self._network.switch
        switch.loss, switch.delay = fault.loss, fault.delay
        if not fault.moment or self._shares_host:
            return
        action: Action = "silence behind it" if fault.moment == "behind second message" else "silence"
        action = "reset" if fault.kind == "reset" else action
        if fault.moment == "data":
            switch.act_after(int(num_bytes * fault.reached), self._source, action)
        else:
            switch.act_after(0 if fault.moment == "first message" else 1, self._target, action)

    def strike(self, fault: Fault, limit: float, duration: float = 0.0) -> None:
        """Wait for the moment, when the network falls silent, and do it; late if the moment does not come.

        Args:
            fault: that was armed.
            limit: seconds that the operation may take.
            duration: seconds that it takes usually, where a fault strikes at a time.
        """
        if not fault.moment:
            return
        switch = self._network.switch
        if self._shares_host:
            time.sleep(duration * fault.reached)
        else:
            switch.limit_reached.wait(limit)
        if fault.kind == "cut":
            self._network.machines[fault.victim].cut()
        elif fault.kills:
            self._processes[fault.victim].kill()
        elif fault.kind == "stop":
            os.kill(self._processes[fault.victim].pid, signal.SIGSTOP)
        if fault.kind in {"cut", "kill", "stop"}:
            switch.release()

    def outlast(self, fault: Fault, limit: float) -> None:
        """Let a fault last for a part or a multiple of what an operation may take, if it has a time."""
        if fault.kind == "stop":
            time.sleep(LONG * limit)
        elif fault.kind == "short silence":
            time.sleep(SHORT * limit)
            self._network.switch.release()

    def wake(self, fault: Fault) -> None:
        """Let a process go on that was stopped."""
        if fault.kind == "stop":
            os.kill(self._processes[fault.victim].pid, signal.SIGCONT)

    def heal(self, fault: Fault) -> None:
        """Let everything go on as before, but for what was killed."""
        self.wake(fault)
        if fault.kind == "cut":
            self._network.machines[fault.victim].restore()
        self._network.switch.release()
