"""Compiles the attention of some steps for a GPU of compute capability 9.0, which need not be there.

A process of its own, as Triton decides once whether it interprets. Prints how many programs there are after
each step, what shared memory the largest takes in bytes, and whether products are the tensor cores'.
"""

from __future__ import annotations

import json
from typing import Any

import hopper
import numpy as np
import torch

from caches import make_cache
from quire.kernels.batch import AttentionBatch
from quire.kernels.triton import attention_kernels, key_score_kernel
from quire.kernels.triton.attention import paged_attention
from quire.kernels.triton.kernel import compile_only


def attend(computed: list[int], counts: list[int], table_width: int, dtype: torch.dtype) -> None:
    sequences = len(counts)
    batch = AttentionBatch.build(
        np.array(computed),
        np.array(counts),
        np.zeros((sequences, table_width), dtype=np.int32),
        16,
        first_scoring_token=np.array(counts) - 1,
    )
    kv = make_cache(1, 1, 2, 16, 64, dtype).views[0]
    query = torch.empty(sum(counts), 8, 64, dtype=torch.bfloat16)
    paged_attention(query, kv, batch, scale=0.125, softcap=30.0, sinks=torch.zeros(8))


hopper.compile_only()
kernels = attention_kernels.attend, attention_kernels.merge_parts, key_score_kernel.score_keys
report: dict[str, Any] = {"programs": []}
for step in (([700, 400], [1, 120], 64), ([15, 90, 0], [1, 1, 57], 23), ([1023, 33], [1, 301], 129)):
    with compile_only(2):
        attend(*step, torch.int8)
    report["programs"].append(sum(len(kernel.device_caches[0][0]) for kernel in kernels))
compiled = [program for kernel in kernels for program in kernel.device_caches[0][0].values()]
report["shared"] = max(program.metadata.shared for program in compiled)
report["tensor_cores"] = all(
    "mma" in program.asm["ptx"] for program in compiled if program.metadata.name != "merge_parts"
)
print(json.dumps(report))
