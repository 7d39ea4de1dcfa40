"""Ranks on the host that capture steps, as ranks on GPUs do: on tapes, and with a stand-in for NCCL.

`python tests/support/taped_ranks.py DESCRIPTOR PARENT EVENTS FAILURE` is a rank other than 0.
"""

from __future__ import annotations

import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from interpreter_patches import hurry_the_interpreter
from late_tokens import LateCopy
from nccl_stand_in import NcclStandIn
from operation_tape import OperationTape
from quire.engine.building import runner as runner_building
from quire.engine.ranks import connecting, group, nccl, process
from quire.execution import step_graphs
from quire.execution.sampling import tokens_in_flight
from quire.execution.sampling.captured_choice import CapturedChoice
from quire.kernels.devices import cuda_graphs
from quire.models.decoder import Decoder

MAX_GRAPHS = 2
RESERVED = 64  # tokens


class TapedNccl(NcclStandIn):
    """What is asked for while a step is captured takes place when it is replayed only, as in a CUDA graph."""

    def do(self, exchange: Callable[[], None]) -> None:
        tape = OperationTape.current
        if tape is None:
            super().do(exchange)
        else:
            tape.note(lambda: super(TapedNccl, self).do(exchange))


class ReachedPoint:
    is_reached = True


class Events:
    """What a rank has done, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, event: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{event}\n")


class TapeGraphs:
    """Stands for `CudaGraphs`.

    Args:
        events: what captures and replays of steps are written to, a line for each.
        failure: of every capture: "refuses", "hangs", or empty.
    """

    def __init__(self, events: Events, failure: str) -> None:
        self._events = events
        self._failure = failure
        self._num_captures = 0

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        if compute.__qualname__.startswith(CapturedChoice.__name__):  # which is the first rank's alone
            with OperationTape() as choice:
                compute()
            return choice.replay
        number = self._num_captures
        self._num_captures += 1
        self._events.note(f"captures {number}")
        while self._failure == "hangs":
            time.sleep(1)
        with OperationTape() as tape, np.errstate(all="ignore"):  # of numbers that nobody has sent
            compute()
            if self._failure == "refuses":
                raise RuntimeError("operation not permitted when stream is capturing")

        def replay() -> None:
            self._events.note(f"replays {number}")
            tape.replay()

        return replay


class TapedRanks:
    """Two ranks, of which this process will be the first.

    Args:
        patch: undone by whoever has made it.
        directory: for what the ranks write.
        failures: of each rank, see `TapeGraphs`.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, directory: Path, failures: tuple[str, str] = ("", "")
    ) -> None:
        self._files = [directory / f"rank_{rank}" for rank in range(2)]
        for file in self._files:
            file.write_text("")
        _stand_in(patch, self._files[0], failures[0])
        patch.setattr(tokens_in_flight, "HostCopy", LateCopy)  # of what the next replay overwrites
        patch.setattr(
            runner_building,
            "_capture",
            lambda config, model: (model.reserve(RESERVED), cuda_graphs.CudaGraphs().capture)[1],
        )
        others = [str(self._files[1]), failures[1]]

        def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            *_, module, number, parent = command
            assert module == "quire.engine.ranks.process"
            return subprocess.Popen([sys.executable, __file__, number, parent, *others], **options)

        patch.setattr(group, "subprocess", types.SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))

    @property
    def events(self) -> list[list[str]]:
        """What each rank has reserved memory for, captured and replayed, in order."""
        return [file.read_text().splitlines() for file in self._files]


def _stand_in(patch: pytest.MonkeyPatch, path: Path, failure: str) -> None:
    events, reserve = Events(path), Decoder.reserve

    def noted(decoder: Decoder, num_tokens: int) -> None:
        events.note(f"reserves {num_tokens}")
        reserve(decoder, num_tokens)

    patch.setattr(Decoder, "reserve", noted)
    patch.setattr(dist, "ProcessGroupNCCL", TapedNccl, raising=False)
    patch.setattr(nccl, "DevicePoint", ReachedPoint)
    patch.setattr(nccl, "is_capturing", lambda: OperationTape.current is not None)
    patch.setattr(
        connecting,
        "communicator_on",
        lambda device, shard, rendezvous, timeout: nccl.NcclCommunicator(shard, rendezvous, timeout=timeout),
    )
    patch.setattr(cuda_graphs, "CudaGraphs", lambda: TapeGraphs(events, failure))
    patch.setattr(step_graphs, "MAX_GRAPHS", MAX_GRAPHS)


if __name__ == "__main__":
    hurry_the_interpreter()
    _stand_in(pytest.MonkeyPatch(), Path(sys.argv[3]), sys.argv[4])
    process.main()
