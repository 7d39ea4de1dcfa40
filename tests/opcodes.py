"""How much Python a call runs: a cost that is the same on every machine, unlike a time."""

from __future__ import annotations

import sys
from collections.abc import Callable


def num_opcodes(call: Callable[[], object]) -> int:
    """Return how many bytecode instructions a call runs; what C code does in between is not counted."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
