"""Triton's interpreter, without work that tests need not wait for."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


def hurry_the_interpreter() -> None:
    """Let the interpreter do once what it does again and again, and not look for overflows of integers."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:  # no test that was collected uses it
        return
    _patch_the_language_once(interpreter)
    _describe_types_once(interpreter)
    _match_operands_once(interpreter)
    _look_at_classes_first(interpreter)
    _call_the_language_directly(interpreter)


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
            blocks[key] = {**vars(self), "key": key}
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.key if type.is_block() else ()
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


def _match_operands_once(interpreter: ModuleType) -> None:
    """Let it find out once what becomes of two operands of certain types: to what they are cast, and shaped.

    That takes a third of the time of most kernels. A number becomes the same tensor each time.
    """
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic

    def key_of(operand: Any) -> Any:
        if not isinstance(operand, core.tensor):
            return type(operand), operand, str(operand)  # -0.0 is equal to 0.0
        if not hasattr(operand.type, "key"):  # a block's type has one from the start
            operand.type.key = operand.type.name, getattr(operand.type, "address_space", None)
        return operand.type.key

    def change_between(given: Any, found: Any) -> Callable[[Any, Any], Any]:
        """Return what makes of another operand like `given` what is like `found`."""
        if found is given:
            return lambda _semantic, operand: operand
        if not isinstance(given, core.tensor):
            found.handle.data.flags.writeable = False
            return lambda _semantic, _operand: found
        scalar, shape = found.type.scalar, SimpleNamespace(shape=tuple(found.shape.values))
        is_cast, is_block = scalar != given.type.scalar, given.type.is_block()
        is_spread = shape.shape != tuple(given.shape.values)

        def change(semantic: Any, operand: Any) -> Any:
            if is_cast:
                operand = semantic.cast(operand, scalar)
            if not is_spread:
                return operand
            builder, handle = semantic.builder, operand.handle
            if is_block:
                return core.tensor(builder.create_broadcast(handle, shape.shape), found.type)
            return core.tensor(builder.create_splat(shape, handle), found.type)

        return change

    def once(match: Callable[..., Any]) -> Callable[..., Any]:
        changes: dict[Any, tuple[Any, Any]] = {}

        def matched(self: Any, lhs: Any, rhs: Any, *options: Any, **named_options: Any) -> Any:
            key = key_of(lhs), key_of(rhs), options, *named_options.items()
            if key in changes:
                of_left, of_right = changes[key]
                return of_left(self, lhs), of_right(self, rhs)
            left, right = match(self, lhs, rhs, *options, **named_options)
            changes[key] = change_between(lhs, left), change_between(rhs, right)
            return left, right

        return matched

    for name in ("binary_op_type_checking_impl", "broadcast_impl_value"):
        setattr(semantic, name, once(getattr(semantic, name)))


def _look_at_classes_first(interpreter: ModuleType) -> None:
    """Let it see at once that most operands are no constants of the compiler, and that a type is itself."""
    core = interpreter.tl.core
    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    plain = {core.tensor, core.block_type, core.pointer_type, core.dtype, int, float, bool, type(None)}
    core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _call_the_language_directly(interpreter: ModuleType) -> None:
    """Let calls of the language's functions pass neither a copy of their options nor a check of these."""
    semantic = interpreter.interpreter_semantic

    def patch_attribute(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch_attribute
