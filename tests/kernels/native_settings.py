"""Other instruction sets and numbers of threads for the native kernels, until the end of a block.

The kernels are imported when they are used: a machine with a GPU may have none, and tests its own.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from pairwise import pairwise

IS_ARM = platform.machine() in ("aarch64", "arm64")
INSTRUCTION_SETS = [
    "portable",
    *(["dotprod", "i8mmbf16"] if IS_ARM else ["avx2", "avx512", "avx512bf16", "amx"]),
]


def on_instruction_sets(**values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test as `pairwise` does, with the instruction sets as one more parameter."""
    return pairwise(indirect=["instruction_set"], instruction_set=INSTRUCTION_SETS, **values)


@contextlib.contextmanager
def instructions(name: str) -> Iterator[None]:
    """Use one that this CPU has; the tests of the others would say nothing about it."""
    from quire.kernels.cpu import _native

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
    from quire.kernels.cpu import _native

    before = _native.num_threads()
    _native.set_threads(count)
    try:
        yield
    finally:
        _native.set_threads(before)
