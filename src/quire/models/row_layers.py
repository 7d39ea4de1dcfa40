"""The layers behind pooling: from the row that a prompt's states have become to the one that is returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.kernels.layers.activations import gelu

_ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu, "gelu": gelu}


class DenseRows(NamedTuple):
    """A dense layer of rows, in float32."""

    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None  # [outputs]
    activation: str  # "": none


def through(layers: Sequence[DenseRows], row: torch.Tensor) -> torch.Tensor:
    """Return what layers make of one row [inputs] float32; alone, so that no bit depends on others."""
    for weight, bias, activation in layers:
        row = F.linear(row, weight, bias)
        if activation:
            row = _ACTIVATIONS[activation](row)
    return row
