"""Steps that are recorded once, and then computed without Python between their kernels.

The native kernels that a step calls become programs; what it leaves to torch, which is little, is called
again between them. All results go to the addresses that they had when the step was recorded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from quire.kernels.cpu import _native
from quire.kernels.interface import NotCapturableError

_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_OF_NUMBERS = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
_ALIGNMENT = 64  # bytes, of results
_PIECE = 1 << 20  # bytes of memory for results


class NativePrograms:
    """Captures steps that are computed one after the other, and so share the memory of their results."""

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Record what `compute` asks the native kernels and torch for; return what computes it.

        The kernels compute nothing meanwhile. All tensors that `compute` takes must stay where they are.

        Raises:
            NotCapturableError: `compute` depends on the numbers in a tensor, or on arrays of this step alone.
        """
        recorder = _Recorder(self._memory)
        try:
            with recorder:
                recorder.record()
                compute()
        finally:
            _native.stop_recording()
        return recorder.replay_of(compute)


def refuse_recording(what: str) -> None:
    """Raise `NotCapturableError` while this thread records."""
    if _native.is_recording():
        raise NotCapturableError(f"{what} cannot be recorded")


@dataclasses.dataclass(slots=True, frozen=True)
class _Replay:
    """Calls of programs and of torch, and what keeps what their addresses belong to."""

    calls: Sequence[Callable[[], object]]
    kept: tuple[object, ...]

    def __call__(self) -> None:
        for call in self.calls:
            call()


def _gathered(func: Any, args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the matrix and which of its rows a call of torch takes, if it does that and nothing else."""
    if func is torch.ops.aten.embedding.default:
        rows, places = args[:2]
    elif func is torch.ops.aten.index_select.default and args[1] == 0:
        rows, places = args[0], args[2]
    else:
        return None
    are_plain = rows.is_contiguous() and places.is_contiguous() and places.dtype is torch.int64
    return (rows, places) if are_plain and rows.ndim == 2 and places.ndim == 1 else None


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records programs, and between them calls of torch.

    Args:
        memory: pieces for results, which become more where they do not suffice.
    """

    def __init__(self, memory: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self._piece, self._used = 0, 0  # the piece that is being used up, and its bytes that are
        self._calls: list[Callable[[], object]] = []
        self._program = _native.Program()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first call imports torch's compiler: a second, and 140 MB

    def record(self) -> None:
        """Record native kernels, behind what there is."""
        if not self._program.is_empty:
            self._calls.append(self._program.run)
            self._program = _native.Program()
        self._program.record()

    def replay_of(self, compute: Callable[[], None]) -> _Replay:
        """Return what computes everything that `compute` has asked for."""
        if not self._program.is_empty:
            self._calls.append(self._program.run)
        return _Replay(self._calls, (compute, self._memory))

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        name = func.overloadpacket.__name__
        if any(tag in func.tags for tag in _OF_NUMBERS) and not (name == "index" and _has_no_mask(args[1])):
            raise NotCapturableError(f"torch's {name} depends on the numbers in a tensor")
        result = func(*args, **kwargs)
        if rows := _gathered(func, args):
            return self._gather(*rows, result)
        if func._schema.is_mutable:
            self._calls_torch(functools.partial(func, *args, **kwargs))
        elif not func.is_view:
            held = tree_map_only(torch.Tensor, self._held, result)
            if name not in _EMPTY:
                self._calls_torch(lambda: _copy(func(*args, **kwargs), held))
            return held
        return result

    def _calls_torch(self, call: Callable[[], object]) -> None:
        self.record()
        self._calls.append(call)

    def _gather(self, rows: torch.Tensor, places: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Have the native kernels take some rows of a matrix."""
        held = self._held(result)
        row_bytes = rows.shape[1] * rows.itemsize
        _native.gather_rows(
            rows.data_ptr(), len(rows), row_bytes, places.data_ptr(), len(places), held.data_ptr()
        )
        return held

    def _held(self, result: torch.Tensor) -> torch.Tensor:
        """Return a result, or what will be one, where it will be each time."""
        while (
            self._piece < len(self._memory) and self._used + result.nbytes > self._memory[self._piece].nbytes
        ):
            self._piece, self._used = self._piece + 1, 0
        if self._piece == len(self._memory):
            self._memory.append(torch.empty(max(_PIECE, result.nbytes), dtype=torch.uint8))
        place = self._memory[self._piece][self._used :][: result.nbytes]
        self._used += -(-result.nbytes // _ALIGNMENT) * _ALIGNMENT
        return place.view(result.dtype).view(result.shape).copy_(result)


def _copy(result: Any, to: Any) -> None:
    for made, held in zip(tree_leaves(result), tree_leaves(to), strict=True):
        if isinstance(held, torch.Tensor):
            held.copy_(made)


def _has_no_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in indices)
