"""Native kernels refuse wrong arguments with an exception; in a process of their own, which may crash."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import wrong_arguments

from subprocesses import run


@pytest.mark.processes
@pytest.mark.first_case
@pytest.mark.parametrize("kernel", wrong_arguments.KERNELS)
def test_wrong_arguments_are_refused(kernel: str) -> None:
    result = run([sys.executable, str(Path(wrong_arguments.__file__)), kernel], preload=True)
    lines = result.stdout.splitlines()
    wrong = [pair for pair in itertools.pairwise(lines) if pair[1].startswith("WRONG")]
    assert result.returncode == 0, f"{result.returncode} after {lines[-1:]}; {wrong}; {result.stderr[-2000:]}"
    assert lines[-1] == "done"
