"""What layers with a state have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import torch

    from quire.models.layer import LayerLoader


def require_recurrence(loader: LayerLoader) -> None:
    """Raise `ModelError` if the kernels cannot compute layers with a state."""
    if not loader.kernels.has_recurrence:
        raise ModelError(
            f"layer {loader.index} is recurrent, which the {loader.kernels.name} kernels cannot compute; set "
            "EngineConfig.device to 'cpu'"
        )


def refuse_ranks(size: int) -> None:
    """Raise `ConfigError` if a layer with a state would be divided among ranks."""
    if size > 1:
        raise ConfigError(
            f"EngineConfig.tensor_parallel_size is {size}, but this model has recurrent layers, which cannot "
            "be divided; set it to 1"
        )


def conv_taps(loader: LayerLoader, field: str) -> torch.Tensor:
    """Return the weight [n, 1, K] of a convolution as [K, n], contiguous."""
    weight = loader.tensor(field)
    assert weight is not None
    return weight[:, 0].T.contiguous()
