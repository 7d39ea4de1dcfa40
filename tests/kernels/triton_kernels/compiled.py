"""What scripts print that compile kernels for a GPU which need not be there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import subprocesses


def output_of(script: str, cache: Path, *arguments: str) -> str:
    """Return what a script beside this file prints, run by itself; fail with its errors if it fails.

    It starts with torch imported, and without Triton, which shall not interpret there. `cache` is an empty
    directory, for what is compiled.
    """
    path = Path(__file__).with_name(script)
    settings = {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": str(path.parents[2] / "support"),
    }
    command = [sys.executable, str(path), *arguments]
    done = subprocesses.run(command, preload=True, env=os.environ | settings, limit=200.0)
    assert done.returncode == 0, done.stderr
    return done.stdout
