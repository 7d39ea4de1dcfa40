"""The arrays of a step that kernels of a device read; the host makes them from the batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from quire.kernels.devices.device import array_to_device

if TYPE_CHECKING:
    from quire.kernels.attention.batch import AttentionBatch


Number = TypeVar("Number", bound=np.generic)


class HostArrays(NamedTuple):
    """Arrays in the host's memory, and numbers that kernels are launched with."""

    arrays: tuple[npt.NDArray[Any], ...]
    numbers: tuple[int, ...] = ()


class DeviceArrays(NamedTuple):
    """The same with the arrays on a device."""

    arrays: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...] = ()


def lengthened(numbers: npt.NDArray[Number], length: int, value: npt.ArrayLike = 0) -> npt.NDArray[Number]:
    """Return numbers [N, ...] padded with `value`, a number or a row, to a length of at least N."""
    if length == len(numbers):
        return numbers
    longer = np.empty((length, *numbers.shape[1:]), dtype=numbers.dtype)
    longer[: len(numbers)] = numbers
    longer[len(numbers) :] = value
    return longer


MakeArrays = Callable[["AttentionBatch"], HostArrays]
"""What it returns depends on nothing but the batch and what does not change from step to step."""


class StepArrays:
    """The arrays of one step on its device, each copied when it is first asked for."""

    def __init__(self) -> None:
        self._on_device: dict[Hashable, DeviceArrays] = {}

    def of(
        self, batch: AttentionBatch, name: Hashable, make: MakeArrays, device: torch.device
    ) -> DeviceArrays:
        """Return the result of `make` for `batch`, on a device. `name` identifies `make`."""
        found = self._on_device.get(name)
        if found is None:
            arrays, numbers = make(batch)
            on_device = tuple(array_to_device(array, device) for array in arrays)
            found = self._on_device[name] = DeviceArrays(on_device, numbers)
        return found


class DerivedArrays(StepArrays):
    """The arrays of a step that is made of another, among those of that one.

    Args:
        arrays: of the other step.
        batch: the other step.
        name: of what is made of it.
        derive: makes it.
    """

    def __init__(
        self,
        arrays: StepArrays,
        batch: AttentionBatch,
        name: Hashable,
        derive: Callable[[AttentionBatch], AttentionBatch],
    ) -> None:
        super().__init__()
        self._arrays = arrays
        self._batch = batch
        self._name = name
        self._derive = derive

    @override
    def of(
        self, batch: AttentionBatch, name: Hashable, make: MakeArrays, device: torch.device
    ) -> DeviceArrays:
        derive = self._derive
        return self._arrays.of(self._batch, (self._name, name), lambda other: make(derive(other)), device)
