"""A stand-in for what captures on a GPU, and runners that capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from step_driver import BLOCK_SIZE, MAX_MODEL_LEN, StepDriver, model_cache

from operation_tape import OperationTape
from quire.execution.model_runner import ModelRunner
from quire.kernels.size_classes import size_class
from quire.models.decoder import Decoder


@dataclasses.dataclass
class Recorder:
    """Captures as a GPU would; counts captures and replays."""

    num_captures: int = 0
    num_replays: int = 0

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        with OperationTape() as tape:
            compute()

        def replay() -> None:
            self.num_replays += 1
            tape.replay()

        return replay


def driver_of(model: Decoder, capture: Any = None, max_num_seqs: int = 4, **parts: Any) -> StepDriver:
    """Return a driver of a runner that captures steps, if it is told how."""
    model.reserve(size_class(64))
    cache = model_cache(model)
    runner = ModelRunner(
        model,
        [cache],
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        capture=capture,
        **parts,
    )
    return StepDriver(runner, cache, max_num_seqs=max_num_seqs)
