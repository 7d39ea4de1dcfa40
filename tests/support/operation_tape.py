"""A stand-in for CUDA graphs: what is asked of torch and of Triton's interpreter, noted down and done again.

As in a CUDA graph, every number that the host has worked out is part of the capture, every tensor is where
it was, and nothing of Python runs again. The computation takes place while it is captured, but what it has
written to memory that was there before is undone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from late_tokens import LateCopy
from quire.engine.building import runner
from quire.execution.sampling import tokens_in_flight

_WITHOUT_CONTENT = (
    torch.ops.aten.empty,
    torch.ops.aten.new_empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty_strided,
)
_FROM_DEVICE = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select)


def capture_steps(monkeypatch: pytest.MonkeyPatch) -> list[OperationTape]:
    """Have engines capture steps as on a GPU; return a list to which each one goes that is replayed."""
    replayed: list[OperationTape] = []

    def capture(compute: Callable[[], None]) -> Callable[[], None]:
        with OperationTape() as tape:
            compute()
        return lambda: (replayed.append(tape), tape.replay())[1]

    monkeypatch.setattr(runner, "_capture", lambda config, model: capture)
    monkeypatch.setattr(tokens_in_flight, "HostCopy", LateCopy)  # of what the next replay overwrites
    return replayed


class OperationTape(TorchDispatchMode):
    """Notes down operations while it is entered; `replay` does them again."""

    current: ClassVar[OperationTape | None] = None  # the one that is entered

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []
        self._made: set[int] = set()  # addresses of memory
        # By address: memory, and what was in it before.
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func.overloadpacket not in _FROM_DEVICE, f"{func} makes the host wait for the device"
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.keep((args, kwargs))
        result = func(*args, **kwargs)
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        self._made.update({storage.data_ptr() for storage in _storages(result)} - given)
        if func.overloadpacket not in _WITHOUT_CONTENT:
            self.operations.append(lambda: _again(func, args, kwargs, result))
        return result

    def __enter__(self) -> OperationTape:
        tape, self.call = self, interpreter.GridExecutor.__call__

        def noted(executor: Any, *args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                tape.keep((args, kwargs))
                tape.call(executor, *args, **kwargs)
            tape.operations.append(lambda: tape.call(executor, *args, **kwargs))

        interpreter.GridExecutor.__call__ = noted
        OperationTape.current = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        OperationTape.current = None
        interpreter.GridExecutor.__call__ = self.call
        for storage, content in self._before.values():
            storage.copy_(content)
        self._before.clear()

    def keep(self, written: Any) -> None:
        """Keep what is in memory that may be written to, unless it is the capture's own."""
        for storage in _storages(written):
            if storage.data_ptr() not in self._made and storage.data_ptr() not in self._before:
                self._before[storage.data_ptr()] = storage, storage.clone()

    def note(self, operation: Callable[[], None]) -> None:
        """Note down what is no operation of torch."""
        self.operations.append(operation)

    def replay(self) -> None:
        """Do all operations again, in order, on the same tensors."""
        for operation in self.operations:
            operation()


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _again(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
    for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)
