"""The layers behind pooling: from the row that a prompt's states have become to the one that is returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.kernels.layers.activations import gelu, silu

_ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu, "gelu": gelu, "silu": silu}


class DenseRows(NamedTuple):
    """A dense layer of rows, in float32."""

    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None  # [outputs]
    activation: str  # "": none
    norm: torch.Tensor | None = None  # [outputs], weight of a layer norm behind that
    norm_bias: torch.Tensor | None = None  # [outputs]
    norm_eps: float = 0.0


def through(layers: Sequence[DenseRows], row: torch.Tensor) -> torch.Tensor:
    """Return what layers make of one row [inputs] float32; alone, so that no bit depends on others."""
    for layer in layers:
        row = F.linear(row, layer.weight, layer.bias)
        if layer.activation:
            row = _ACTIVATIONS[layer.activation](row)
        if layer.norm is not None:
            row = F.layer_norm(row, row.shape, layer.norm, layer.norm_bias, layer.norm_eps)
    return row
