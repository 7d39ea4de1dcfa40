"""The KV cache itself: one block-major tensor, with strided views for each layer."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.kv_layer import KVLayer
from quire.kernels.memory import map_large_pages

SCALE_BYTES = 4  # a float32 for each int8 token and head


class KVCacheTensors:
    """Keys and values of all layers, block after block.

    All layers of one block are one contiguous span of `bytes_per_block` bytes, so that moving a block is one
    copy. The memory is not initialized: a place holds anything until its token is written.

    `tensor` is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`. With int8 it is
    `[num_blocks, num_layers, 2, num_kv_heads, block_size * (head_dim + 4)]` bytes: for each head the block's
    numbers, `[block_size, head_dim]`, and then its float32 scales, `[block_size]`.

    Raises:
        ValueError: int8, and `head_dim` is no multiple of 4, so that the scales would not be aligned.
    """

    def __init__(  # noqa: PLR0917 - the order of the tensor's dimensions
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        heads = (num_blocks, num_layers, 2, num_kv_heads)
        if dtype == torch.int8:
            if head_dim % SCALE_BYTES:
                raise ValueError(
                    f"an int8 KV cache needs a head_dim that is a multiple of {SCALE_BYTES}, and this is "
                    f"{head_dim}; use another kv_cache_dtype"
                )
            self.tensor = _empty(*heads, block_size * (head_dim + SCALE_BYTES), dtype=dtype)
            num_payload = block_size * head_dim
            numbers = self.tensor[..., :num_payload].view(*heads, block_size, head_dim)
            scales = self.tensor[..., num_payload:].view(torch.float32)
            self._layers = [
                KVLayer(numbers[:, i, 0], numbers[:, i, 1], scales[:, i, 0], scales[:, i, 1])
                for i in range(num_layers)
            ]
        else:
            self.tensor = _empty(*heads, block_size, head_dim, dtype=dtype)
            self._layers = [KVLayer(self.tensor[:, i, 0], self.tensor[:, i, 1]) for i in range(num_layers)]
        self.num_blocks = num_blocks
        self.num_layers = num_layers
        self.block_size = block_size
        self.bytes_per_block = self.tensor.nbytes // num_blocks if num_blocks else 0

    def layer(self, index: int) -> KVLayer:
        """Return a layer's keys and values, the same object every time."""
        return self._layers[index]

    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy whole blocks, each as it was before this call.

        Args:
            copies: [N, 2] block ids (from, to); no two go to the same block.
        """
        if len(copies):
            source, target = torch.from_numpy(copies.astype(np.int64)).unbind(1)
            self.tensor[target] = self.tensor[source]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.bytes_per_block


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that takes up memory as it is written to."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return map_large_pages(num_bytes)[:num_bytes].view(dtype).view(shape)
