"""Benchmarks are scripts beside each other, not a package: tests import them as they import one another."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
