"""What a launch does where the GPU lacks what a kernel needs."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.runtime.jit import JITFunction

from quire.errors import ConfigError
from quire.kernels.triton import kernel
from quire.kernels.triton.kernel import _CompiledKernel, compile_only
from quire.kernels.triton.kernel_set import TritonKernels


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


class Launchers:
    """Stands for the driver; what launches a kernel takes long to compile."""

    def __init__(self, num_threads: int) -> None:
        self.all_compile = threading.Barrier(num_threads)
        self.made: list[tuple[Any, Any]] = []

    def launcher_cls(self, src: Any, metadata: Any) -> None:
        self.all_compile.wait(30)
        if src == "bad":
            raise RuntimeError("no C compiler")
        self.made.append((src, metadata))


def test_what_launches_kernels_is_compiled_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    launchers = Launchers(3)
    monkeypatch.setattr(triton.runtime.driver, "_active", launchers)
    kernels = {name: SimpleNamespace(src=name, metadata=len(name)) for name in ("a", "bb", "bad")}
    finished: list[Any] = []
    with compile_only(3):
        mode = triton.runtime._async_compile.active_mode.get()
        for name, compiled in kernels.items():
            mode.submit(name, lambda compiled=compiled: compiled, finished.append)
    assert sorted(launchers.made) == [("a", 1), ("bb", 2)]
    assert sorted(kernel.src for kernel in finished) == ["a", "bb"]


def test_nobody_waits_for_the_hash_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    def hash_files() -> None:
        assert may_end.wait(30)
        has_ended.set()

    monkeypatch.setattr(kernel, "triton_key", hash_files)
    monkeypatch.setattr(kernel, "is_interpreted", False)
    TritonKernels()
    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(30)


def test_kernels_are_there_though_the_system_refuses_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(kernel, "is_interpreted", False)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert TritonKernels().name == "triton"
