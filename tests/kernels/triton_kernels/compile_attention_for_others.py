"""Compiles attention for a GPU of another compute capability than 9.0, as `python FILE 80`, with large heads.

`python FILE 89 shared` only goes so far that it is known what shared memory programs take.

A process of its own, as Triton decides once whether it interprets. Prints how many programs there are, and
what shared memory the largest takes, in bytes.
"""

from __future__ import annotations

import json
import sys

import hopper
import numpy as np
import torch

from caches import make_cache
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.sparse_prefill import KeySelection
from quire.kernels.triton.attention import kernels as attention_kernels
from quire.kernels.triton.attention import key_selection
from quire.kernels.triton.attention.paged import paged_attention
from quire.kernels.triton.kernel import compile_only

hopper.compile_only(int(sys.argv[1]))
if sys.argv[2:] == ["shared"]:
    hopper.count_shared_memory_only()
with compile_only(2):
    for head_dim, dtype, group in (
        (128, torch.float32, 64),
        (128, torch.bfloat16, 2),
        (256, torch.bfloat16, 2),
    ):
        batch = AttentionBatch.build(
            np.array([700, 400]), np.array([1, 120]), np.zeros((2, 64), np.int32), 16
        )
        kv = make_cache(1, 1, 2, 16, head_dim, dtype).views[0]
        query = torch.empty(121, 2 * group, head_dim, dtype=dtype)
        paged_attention(query, kv, batch, scale=0.125)
    for dtype, size, stride in ((torch.bfloat16, 256, 4), (torch.float16, 64, 8)):  # the other in float32
        selection = KeySelection(np.array([520]), 0.8, size, stride)
        batch = AttentionBatch.build(
            np.array([519]), np.array([1]), np.zeros((1, 64), np.int32), 16, key_selection=selection
        )
        paged_attention(torch.empty(1, 16, 256, dtype=dtype), kv, batch, scale=0.125)
kernels = attention_kernels.attend, attention_kernels.merge_parts, key_selection.weigh_key_blocks
compiled = [program for kernel in kernels for program in kernel.device_caches[0][0].values()]
print(json.dumps({"programs": len(compiled), "shared": max(program.metadata.shared for program in compiled)}))
