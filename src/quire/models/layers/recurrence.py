"""What layers with a state have in common."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from quire.errors import ConfigError
from quire.models.layer import SubLayerConfig

if TYPE_CHECKING:
    import torch

    from quire.models.layer import LayerLoader
    from quire.models.shard import Shard


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig(SubLayerConfig):
    """The numbers of a sub-layer with a state, in place of attention; ranks cannot divide it."""

    role: ClassVar[str] = "attention"

    @override
    def on_rank(self, shard: Shard) -> Self:
        return self

    @override
    def check_divisible(self, size: int) -> None:
        if size > 1:
            raise ConfigError(
                f"EngineConfig.tensor_parallel_size is {size}, but this model has recurrent layers, which "
                "cannot be divided; set it to 1"
            )


def conv_taps(loader: LayerLoader, field: str) -> torch.Tensor:
    """Return the weight [n, 1, K] of a convolution as [K, n], contiguous."""
    weight = loader.tensor(field)
    assert weight is not None
    return weight[:, 0].T.contiguous()
