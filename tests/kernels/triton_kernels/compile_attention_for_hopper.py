"""Compiles the attention of some steps for a GPU of compute capability 9.0, which need not be there.

A process of its own, as Triton decides once whether it interprets. Prints how many programs there are after
each of three steps of one layer, and how many are of two-sided attention and of latents; and, with those of
layers and caches of other kinds, what shared memory the largest takes in bytes, and the names of those
without the tensor cores' instructions.
"""

from __future__ import annotations

import json
import re
from typing import Any

import hopper
import numpy as np
import torch

from caches import make_cache
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVOfRows
from quire.kernels.attention.sparse_prefill import KeySelection
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.triton.attention import kernels as attention_kernels
from quire.kernels.triton.attention import key_scores as key_score_kernel
from quire.kernels.triton.attention import key_selection
from quire.kernels.triton.attention.paged import paged_attention
from quire.kernels.triton.kernel import compile_only

KERNELS = (
    attention_kernels.attend,
    attention_kernels.merge_parts,
    key_score_kernel.score_keys,
    key_selection.weigh_key_blocks,
    key_selection.add_masses,
    key_selection.write_visits,
)
STEPS = ([700, 400], [1, 120], 64), ([15, 90, 0], [1, 1, 57], 23), ([1023, 33], [1, 301], 129)
BFLOAT16, FLOAT16, FLOAT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
OTHERS: list[tuple[int, int, torch.dtype, torch.dtype, dict[str, Any]]] = [
    # heads of a group, features, types of queries and pages, options
    (2, 128, BFLOAT16, BFLOAT16, {}),  # Qwen3-0.6B
    (4, 128, BFLOAT16, FLOAT8, {}),  # Llama-3-8B
    (8, 80, FLOAT16, FLOAT8, {"window": 100}),
    (1, 256, FLOAT16, FLOAT16, {"softcap": 50.0, "window": 512}),
    (8, 512, BFLOAT16, BFLOAT16, {}),  # Gemma 4
    (3, 96, BFLOAT16, torch.int8, {"sinks": torch.zeros(6)}),
    (2, 64, torch.float32, torch.float32, {}),
]

TWO_SIDED = [
    # heads, KV heads, features, type, options
    (12, 12, 64, BFLOAT16, {"distance_bias": torch.zeros(12, 257)}),  # all-mpnet-base-v2
    (12, 12, 64, FLOAT16, {"window": 65}),  # ModernBERT-base
]

LATENTS = [
    (16, 576, BFLOAT16, BFLOAT16),  # DeepSeek-V2-Lite
    (128, 576, BFLOAT16, FLOAT8),  # DeepSeek-V3
    (40, 288, BFLOAT16, torch.int8),  # MiniCPM3
]


def attend(
    step: tuple[list[int], list[int], int],
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    options: dict[str, Any],
    has_latents: bool = False,
    **batch_options: Any,
) -> None:
    computed, counts, table_width = step
    tables = np.zeros((len(counts), table_width), dtype=np.int32)
    batch = AttentionBatch.build(np.array(computed), np.array(counts), tables, 16, **batch_options)
    kv = make_cache(1, 1, 1 if has_latents else 2, 16, head_dim, page_dtype).views[0]
    if has_latents:
        kv = kv.replace(value_pages=kv.key_pages, value_scales=kv.key_scales)
    query = torch.empty(sum(counts), group * len(kv.key_pages), head_dim, dtype=dtype)
    paged_attention(query, kv, batch, scale=0.125, **options)


def attend_to_rows(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    layout = HeadLayout(heads, kv_heads, head_dim)
    batch = AttentionBatch.build(np.zeros(3), np.array([200, 1, 30]), np.zeros((3, 200)), 1).over_rows()
    kv = KVOfRows.of(torch.empty(231, (heads + 2 * kv_heads) * head_dim, dtype=dtype), layout)
    paged_attention(torch.empty(231, heads, head_dim, dtype=dtype), kv, batch, scale=0.125, **options)


def all_programs() -> list[Any]:
    return [program for kernel in KERNELS for program in kernel.device_caches[0][0].values()]


def operand_orders(programs: list[Any]) -> list[str]:
    """Return in which orders tensor cores take the numbers of products with keys and values of two bytes."""
    attending = [program.asm["ttgir"] for program in programs if program.metadata.name == "attend"]
    return sorted(
        {width for code in attending if "f8E4M3FN" not in code for width in re.findall(r"kWidth = \d", code)}
    )


hopper.compile_only()
report: dict[str, Any] = {"programs": []}
for step in STEPS:
    with compile_only(2):
        first_scoring_token = np.array(step[1]) - 1
        options = {"softcap": 30.0, "sinks": torch.zeros(8)}
        attend(step, 4, 64, BFLOAT16, torch.int8, options, first_scoring_token=first_scoring_token)
    report["programs"].append(len(all_programs()))
with compile_only(2):
    for layer in OTHERS:
        attend(STEPS[0], *layer)
dense = all_programs()
with compile_only(2):  # tiles of many rows and of few, with 8 rows of a head in the estimate; of few, with 64
    selection = KeySelection(np.array([900, 520]), 0.8, 64, 8)
    attend(([800, 519], [200, 1], 64), *OTHERS[0], key_selection=selection)
    attend(([519], [1], 64), *OTHERS[1], key_selection=KeySelection(np.array([520]), 0.8, 256, 4))
others = all_programs()
with compile_only(2):
    for two_sided in TWO_SIDED:
        attend_to_rows(*two_sided)
report["two_sided"] = len(all_programs()) - len(others)
others = all_programs()
with compile_only(2):
    for latents in LATENTS:
        attend(STEPS[0], *latents, {}, has_latents=True)
    attend(([800, 519], [200, 1], 64), *LATENTS[0], {}, has_latents=True, key_selection=selection)
    attend(([700, 9], [1, 1], 64), *LATENTS[0], {}, has_latents=True, first_scoring_token=np.zeros(2, int))
compiled = all_programs()
report["latents"] = len(compiled) - len(others)
hopper.check_order(compiled)
hopper.check_reductions(compiled)
report["orders"] = [
    operand_orders(programs) for programs in (dense, [one for one in others if one not in dense])
]
report["shared"] = max(program.metadata.shared for program in compiled)
names = [program.metadata.name for program in compiled if "mma" not in program.asm["ptx"]]
without = "merge_parts", "add_masses", "write_visits"
report["no_tensor_cores"] = [name for name in names if name not in without]
print(json.dumps(report))
