"""The KV cache itself: one block-major tensor, with a strided view for each layer."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch


class KVCacheTensors:
    """Keys and values of all layers, `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.

    All layers of one block are one contiguous span of `bytes_per_block` bytes, so that moving a block is one
    copy. The memory is not initialized: a place holds anything until its token is written.
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
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        self.tensor = torch.empty(shape, dtype=dtype)
        self.num_blocks = num_blocks
        self.num_layers = num_layers
        self.block_size = block_size
        self.bytes_per_block = math.prod(shape[1:]) * dtype.itemsize
        self._layers = [(self.tensor[:, i, 0], self.tensor[:, i, 1]) for i in range(num_layers)]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's (keys, values), each a view `[num_blocks, kv_heads, block_size, head_dim]`."""
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
