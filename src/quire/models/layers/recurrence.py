"""What layers with a state have in common."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from quire.models.layer import SubLayerConfig

if TYPE_CHECKING:
    import torch

    from quire.models.layer import LayerLoader


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig(SubLayerConfig):
    """The numbers of a sub-layer with a state, in place of attention; a rank has that of its features."""

    role: ClassVar[str] = "attention"


def conv_taps(loader: LayerLoader, field: str) -> torch.Tensor:
    """Return the weight [n, 1, K] of a convolution as [K, n], contiguous."""
    weight = loader.tensor(field)
    assert weight is not None
    return weight[:, 0].T.contiguous()
