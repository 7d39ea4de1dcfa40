"""How much Python a call runs: a cost that is the same on every machine, unlike a time."""

from __future__ import annotations

import sys
from collections.abc import Callable


def num_opcodes(call: Callable[[], object]) -> int:
    """Return how many bytecode instructions a call runs; what C code does in between is not counted."""
    count = 0

    def trace_opcodes(frame, _event, _argument):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return count_opcode

    def count_opcode(_frame, event, _argument):
        nonlocal count
        count += event == "opcode"
        return count_opcode

    before = sys.gettrace()
    sys.settrace(trace_opcodes)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
