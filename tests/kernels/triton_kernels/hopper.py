"""Triton's compiler for a GPU of compute capability 9.0, or another, which need not be there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from triton import knobs
from triton._C.libtriton import llvm
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Driver:
    """What the compiler asks of a GPU's driver."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, src: Any, metadata: Any) -> None:
        """Return what launches a kernel, which nobody does."""


def compile_only(capability: int = 90) -> set[str]:
    """Have launches compile down to machine code and do nothing else; return the names of all compiled."""
    names: set[str] = set()
    launch = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launch(self, *args, grid=grid, warmup=True, **options)
        names.add(self.__name__)

    driver.set_active(Driver(capability))
    JITFunction.run = run
    return names


def count_shared_memory_only() -> None:
    """Leave out what follows once it is known what shared memory a program takes: half of the work."""

    def shorten(*hooked: Any) -> tuple[str, str]:
        if hooked:
            stages = hooked[1]
            stages["ptx"] = lambda _code, metadata: metadata.update(name="") or ""
            stages["cubin"] = lambda _code, _metadata: b""
        return "shared memory only", ""  # what tells these programs from others

    knobs.runtime.add_stages_inspection_hook = shorten
    llvm.link_extern_libs = llvm.optimize_module = lambda *_: None


def check_reductions(programs: Iterable[Any]) -> None:
    """See that no reduction is of a layout in which lanes hold the same number.

    Triton (3.6.0 and 3.7.1) takes the lanes of such a layout for consecutive ones: it adds up some numbers
    twice, and leaves others out. Layouts of this kind come from a `reshape` of fewer numbers than threads.
    """
    for program in programs:
        code = program.asm["ttgir"]
        lanes = dict(re.findall(r"^#(\w+) = #ttg\.linear<\{.*lane = \[(.*?)\], warp", code, re.MULTILINE))
        repeated = {name for name, bases in lanes.items() if re.search(r"\[0(, 0)*\]", bases)}
        for reduced in re.findall(r"\}\) : \((tensor<[^)]*)\) ->", code):
            assert not repeated.intersection(re.findall(r"#(\w+)", reduced)), program.metadata.name


def check_order(programs: Iterable[Any]) -> None:
    """See that programs, which are launched early, touch no memory before the kernel before has ended."""
    for program in programs:
        code = program.asm["ptx"]
        touched = re.search(r"(ld|st|atom|red)\S*\.global|cp\.async", code)
        assert touched is not None
        assert code.index("griddepcontrol.wait") < touched.start(), program.metadata.name
        assert program.metadata.launch_pdl
