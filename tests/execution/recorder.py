"""A stand-in for what records on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from operation_tape import OperationTape


@dataclasses.dataclass
class Recorder:
    """Records as a GPU would; counts recordings and replays."""

    num_recordings: int = 0
    num_replays: int = 0

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.num_recordings += 1
        with OperationTape() as tape:
            compute()

        def replay() -> None:
            self.num_replays += 1
            tape.replay()

        return replay
