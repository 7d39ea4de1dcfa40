"""How a process of an engine has ended, in words."""

from __future__ import annotations

import signal

_BUS_ERROR = (
    "a file that it had mapped into memory, such as the model's, was truncated, its disk failed, or shared "
    "memory is full"
)


def describe_end(code: int) -> str:
    """Return what `code` of `subprocess.Popen.wait` says, with the likely cause if it was a signal."""
    if code >= 0:
        return f"ended with code {code}"
    number = -code
    try:
        name = signal.Signals(number).name
    except ValueError:  # most of the real-time signals have no name
        name = f"signal {number}"
    return f"was killed by {name}" + (f": {_BUS_ERROR}" if number == signal.SIGBUS else "")
