"""The example's scheduler, with a fault in one of its calls."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from custom_scheduler import OneByOne

LIES = (None, -1, "nonsense", math.nan, [object()], {}, {0: None}, 10**9)


class FaultyScheduler(OneByOne):
    """Raises in the call `faulty`, or returns one thing after the other that it must not return."""

    faulty: ClassVar[str] = ""
    lies: ClassVar[bool] = False
    num_lies: ClassVar[int] = 0

    def __getattribute__(self, name: str) -> Any:
        if name != FaultyScheduler.faulty:
            return super().__getattribute__(name)

        def fault(*args: Any, **kwargs: Any) -> Any:
            if not FaultyScheduler.lies:
                raise RuntimeError(f"{name} is broken")
            FaultyScheduler.num_lies += 1
            return LIES[FaultyScheduler.num_lies % len(LIES)]

        return fault
