"""The layers behind pooling: from the rows that states have become to those that are returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.kernels.bounds import POOLED_TOKENS
from quire.kernels.layers.activations import gelu, silu
from quire.kernels.layers.linear import Linear

_ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu, "gelu": gelu, "silu": silu}


class DenseRows(NamedTuple):
    """A dense layer of rows, in float32 on the host."""

    linear: Linear
    activation: str  # "": none
    norm: torch.Tensor | None = None  # [outputs], weight of a layer norm behind that
    norm_bias: torch.Tensor | None = None  # [outputs]
    norm_eps: float = 0.0


def through(layers: Sequence[DenseRows], rows: torch.Tensor) -> torch.Tensor:
    """Return what layers make of rows [N, inputs], of any type: [N, outputs] float32, on the host.

    With native kernels, no bit of a row depends on the others.
    """
    return torch.cat([_through(layers, piece.float().cpu()) for piece in torch.split(rows, POOLED_TOKENS)])


def _through(layers: Sequence[DenseRows], rows: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        rows = layer.linear(rows)
        if layer.activation:
            rows = _ACTIVATIONS[layer.activation](rows)
        if layer.norm is not None:
            rows = F.layer_norm(rows, layer.norm.shape, layer.norm, layer.norm_bias, layer.norm_eps)
    return rows
