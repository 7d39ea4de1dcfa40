"""What a launch does where the GPU lacks what a kernel needs."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.runtime.jit import JITFunction

from quire.errors import ConfigError
from quire.kernels.triton.kernel import _CompiledKernel


def attend(pointer: Any) -> None:
    """Stands for a kernel, and is not compiled."""


def test_a_kernel_that_needs_too_much_is_told_with_the_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise triton.OutOfResources(106_624, 101_376, "shared memory")

    monkeypatch.setattr(JITFunction, "run", run)
    with pytest.raises(
        ConfigError,
        match=r"^attend needs more shared memory \(106,624\) than this GPU has \(101,376\); set .*dtype to",
    ):
        _CompiledKernel(attend)[1,](None)
