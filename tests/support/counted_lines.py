"""How many lines of Python a call runs: a cost that is the same on every machine, unlike a time."""

from __future__ import annotations

import sys
from collections.abc import Callable


def num_lines(call: Callable[[], object]) -> int:
    """Return how many lines a call runs, those of a loop in each round; what C code does is not counted."""
    count = 0

    def count_line(_frame, event, _argument):
        nonlocal count
        count += event == "line"
        return count_line

    before = sys.gettrace()
    sys.settrace(count_line)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
