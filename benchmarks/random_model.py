"""The model of the comparison with other engines, for benchmarks of Quire alone."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def random_model(directory: str) -> Iterator[str]:
    """Yield `directory`; if it is empty, a temporary one with random weights in Qwen3-0.6B's shape.

    Another process makes them, so that this one's memory stays as it is.
    """
    if directory:
        yield directory
        return
    script = Path(__file__).with_name("peers_model.py")
    with tempfile.TemporaryDirectory() as made:
        subprocess.run([sys.executable, str(script), made], check=True)
        yield made
