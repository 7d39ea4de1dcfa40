"""Between the host's memory and that of a device, and what torch knows of its GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy.typing as npt
import torch

from quire.errors import ConfigError

HOST = torch.device("cpu")

MIN_CAPABILITY = 8, 0
"""Of GPUs that the kernels compute on: older ones lack shared memory, and products in bfloat16."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device: itself on the host, else a copy, without waiting for it."""
    if device == HOST:
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from other memory, the host would have to wait
    return tensor.to(device, non_blocking=True)


def array_to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array on a device as `to_device` does; on the host, its memory is shared."""
    tensor = torch.from_numpy(array)
    return tensor if device == HOST else to_device(tensor, device)


def rows_on_host(tensor: torch.Tensor, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy of some rows of a tensor in the host's memory; waits for its device."""
    if tensor.is_cpu:
        taken: npt.NDArray[Any] = tensor.numpy()[rows]
        return taken
    return tensor[array_to_device(rows, tensor.device)].cpu().numpy()


def copy_to_device(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor of the host to `target`, which may be on a device, without waiting for it."""
    if target.device.type == "cuda":
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)


class DevicePoint:
    """A point after everything that was launched in the current stream so far."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    @property
    def is_reached(self) -> bool:
        """Whether the device has got here; may be asked from any thread."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]


def is_capturing() -> bool:
    """Return whether launches become part of a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


class HostCopy:
    """A device's tensor on its way to the host's memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._on_host = tensor
        if tensor.device != HOST:
            self._on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._on_host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> torch.Tensor:
        """Return the copy as soon as it is there; may be called from any thread."""
        if self._event is not None:
            self._event.synchronize()
        return self._on_host


def cuda_obstacle() -> str:
    """Return why torch cannot compute on a GPU here; empty: it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build for CPUs; install one for CUDA"
    if not torch.cuda.is_available():
        return "torch sees no GPU; check what nvidia-smi and CUDA_VISIBLE_DEVICES say"
    capability = cuda_capability()
    if capability < MIN_CAPABILITY:
        needed, found = dotted(MIN_CAPABILITY), dotted(capability)
        return f"the kernels need a GPU of compute capability {needed} or more, and this one's is {found}"
    try:
        # Needs a context, memory, and a torch that was built for this GPU.
        torch.ones(1, device="cuda").item()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        return f"torch cannot compute on the GPU ({reason}); end what else computes there, or update torch"
    return ""


@contextlib.contextmanager
def refusing_shortage(message_for: Callable[[RuntimeError], str]) -> Iterator[None]:
    """Raise `ConfigError` if torch, Triton or CUDA runs out of device memory.

    Args:
        message_for: returns the message for such an error.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
            raise
        raise ConfigError(message_for(error)) from error


def num_gpus() -> int:
    """Return how many GPUs CUDA shows."""
    return torch.cuda.device_count()


def has_nccl() -> bool:
    """Return whether torch was built with NCCL, through which GPUs exchange tensors."""
    return torch.distributed.is_available() and torch.distributed.is_nccl_available()


def cuda_memory() -> int:
    """Return the bytes of memory of the GPU that torch computes on."""
    return torch.cuda.mem_get_info()[1]


def free_cuda_memory() -> int:
    """Return the free bytes of the GPU that torch computes on."""
    torch.cuda.empty_cache()  # torch keeps the memory of deleted tensors, such as an earlier engine's
    return torch.cuda.mem_get_info()[0]


class CudaMemory:
    """What torch takes of its GPU's memory from now on, whatever else there is in this process."""

    def __init__(self) -> None:
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_reserved()

    @property
    def num_taken(self) -> int:
        """Bytes that torch has taken, those between tensors included."""
        torch.cuda.empty_cache()
        return max(0, torch.cuda.memory_reserved() - self._before)

    @property
    def num_available(self) -> int:
        """Bytes that torch has taken or can still take, less what others take in the meantime."""
        return self.num_taken + free_cuda_memory()

    def begin_peak(self) -> None:
        """Reset `peak`, without the memory that torch keeps of deleted tensors."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    @property
    def peak(self) -> int:
        """The maximum bytes that torch had taken since `begin_peak`."""
        return max(0, torch.cuda.max_memory_reserved() - self._before)


def cuda_capability(num_gpus: int = 1) -> tuple[int, int]:
    """Return the lowest compute capability of the first GPUs, by default of the one torch computes on."""
    return min(map(torch.cuda.get_device_capability, range(num_gpus)))


def dotted(capability: tuple[int, int]) -> str:
    """Return a compute capability as NVIDIA writes it."""
    return ".".join(map(str, capability))


def cuda_name() -> str:
    """Return what the GPU that torch computes on is called."""
    return torch.cuda.get_device_name()
