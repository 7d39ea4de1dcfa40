"""Other instruction sets and numbers of threads for the native kernels, until the end of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from quire.kernels.cpu import _native

INSTRUCTION_SETS = ["portable", "avx2", "avx512", "avx512bf16"]


@contextlib.contextmanager
def instructions(name: str) -> Iterator[None]:
    """Use one that this CPU has; the tests of the others would say nothing about it."""
    best = _native.instruction_set()
    if not _native.set_instruction_set(name):
        pytest.skip(f"this CPU has no {name}")
    try:
        yield
    finally:
        _native.set_instruction_set(best)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Use `count` threads."""
    before = _native.num_threads()
    _native.set_threads(count)
    try:
        yield
    finally:
        _native.set_threads(before)
