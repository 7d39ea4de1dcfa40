"""Triton's interpreter, without work that tests need not wait for."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any


def hurry_the_interpreter() -> None:
    """Let the interpreter do once what it does again and again, and not look for overflows of integers."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:  # no test that was collected uses it
        return
    _patch_the_language_once(interpreter)
    _describe_types_once(interpreter)


def _patch_the_language_once(interpreter: ModuleType) -> None:
    """Let it patch Triton's language once for each module, and compute sums and products of integers once.

    It replaces each function of the language by its own at a launch, does so again for each function that the
    kernel calls, which changes nothing, and takes it back after the launch. Sums and products of integers are
    computed a second time, in 64 bits, to see whether they overflow: no test has tensors so large that their
    offsets do, and other wrong numbers show in the results. Each of the two takes more than a quarter of the
    time of most kernels.
    """
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    patch, nothing_to_restore = interpreter._patch_lang, interpreter._LangPatchScope
    patched: set[str] = set()

    def patch_once(function: Any) -> Any:
        if function.__module__ not in patched:
            patch(function)
            patched.add(function.__module__)
        return nothing_to_restore()

    interpreter._patch_lang = patch_once


def _describe_types_once(interpreter: ModuleType) -> None:
    """Let all tensors of a type share what describes it, which is made for each result otherwise.

    That takes more than a quarter of the time of most kernels.
    """
    core = interpreter.tl.core
    describe_block, describe_tensor, numpy_type = (
        core.block_type.__init__,
        core.tensor.__init__,
        interpreter._get_np_dtype,
    )
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (size.value if isinstance(size, core.constexpr) else size for size in shape)
        address_space = getattr(element_ty, "address_space", None)
        key = element_ty.name, getattr(element_ty, "const", None), address_space, *sizes
        if key not in blocks:
            describe_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            describe_tensor(self, handle, type)
            shapes[key] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(shapes[key], handle=handle, type=type, dtype=type.scalar)

    def get_np_dtype(tt_dtype: Any) -> Any:
        name = tt_dtype.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(tt_dtype)
        return numpy_types[name]

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    interpreter._get_np_dtype = get_np_dtype
