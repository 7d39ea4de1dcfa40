"""Paged attention by itself: Quire's kernels beside what the GPU can do, and beside FlashInfer's.

FlashInfer's tiles and spans follow from the whole batch, so the bits of a request depend on its company. That
is why Quire's kernels come first: `attention_lines` tells whether its speed would be worth another way.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator

import numpy as np
import torch
from gpu_machine import seconds
from gpu_roofline import BFLOAT16_BYTES, Work

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.devices.cuda_graphs import CudaGraphs
from quire.kernels.dispatch import kernel_set
from quire.kv import KVLayerSpec, PagedAttentionCache, PagedAttentionCacheMetaData
from quire.models.config import ModelConfig
from quire.models.layers.attention import attention_of

BLOCK_SIZE = 16
FLASHINFER_BYTES = 128 << 20  # of its workspace, as its documentation recommends


@dataclasses.dataclass(frozen=True)
class Attention:
    """One layer's attention in a step: sequences that are all alike."""

    heads: HeadLayout
    num_sequences: int
    num_cached: int  # tokens of each
    num_tokens: int  # further ones of each, which this step computes

    @property
    def num_blocks(self) -> int:
        """Blocks of a sequence."""
        return -(-(self.num_cached + self.num_tokens) // BLOCK_SIZE)

    @property
    def work(self) -> Work:
        """What it has to do at least: each key and value is read once, and seen by the tokens after it."""
        heads, end = self.heads, self.num_cached + self.num_tokens
        pairs = self.num_tokens * self.num_cached + self.num_tokens * (self.num_tokens + 1) // 2
        features = 2 * end * heads.num_kv_heads + 2 * self.num_tokens * heads.num_heads
        return Work(
            self.num_sequences * features * heads.head_dim * BFLOAT16_BYTES,
            self.num_sequences * 4 * pairs * heads.num_heads * heads.head_dim,
        )


class Inputs:
    """Random queries, and keys and values in blocks of random order, of one attention on a device."""

    def __init__(self, attention: Attention, device: torch.device) -> None:
        heads, num_sequences = attention.heads, attention.num_sequences
        spec = KVLayerSpec(heads.num_kv_heads, heads.head_dim, heads.head_dim)
        metadata = PagedAttentionCacheMetaData.for_layers(
            [spec],
            page_size=BLOCK_SIZE,
            dtype=torch.bfloat16,
            num_pages=num_sequences * attention.num_blocks,
        )
        cache = PagedAttentionCache.on_device(metadata, device)
        (self.kv,) = cache.views
        for pages in (self.kv.key_pages, self.kv.value_pages):
            pages.normal_()
        order = np.random.default_rng(0).permutation(metadata.num_pages_per_layer)
        self.tables = order.reshape(num_sequences, attention.num_blocks).astype(np.int32)
        num_rows = num_sequences * attention.num_tokens
        self.query = torch.randn(num_rows, heads.num_heads, heads.head_dim, device=device).bfloat16()
        self.scale = heads.head_dim**-0.5


def of_quire(attention: Attention, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """Return what computes it with Quire's kernels."""
    on_gpu = inputs.query.device.type == "cuda"
    kernels = kernel_set("triton" if on_gpu else "auto")
    counts = np.full((2, attention.num_sequences), ((attention.num_cached,), (attention.num_tokens,)))
    batch = AttentionBatch.build(*counts, inputs.tables, BLOCK_SIZE)
    out = torch.empty_like(inputs.query)
    return lambda: kernels.paged_attention(inputs.query, inputs.kv, batch, scale=inputs.scale, out=out)


def of_flashinfer(attention: Attention, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """Return what computes it with FlashInfer's kernels, over the same blocks."""
    import flashinfer

    heads, device = attention.heads, inputs.query.device
    workspace = torch.empty(FLASHINFER_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
    sequences = torch.arange(attention.num_sequences + 1, dtype=torch.int32, device=device)
    end = attention.num_cached + attention.num_tokens
    wrapper.plan(
        sequences * attention.num_tokens,
        sequences * attention.num_blocks,
        torch.from_numpy(inputs.tables.reshape(-1)).to(device),
        torch.full_like(sequences[1:], (end - 1) % BLOCK_SIZE + 1),
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        BLOCK_SIZE,
        causal=True,
        sm_scale=inputs.scale,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    pages = inputs.kv.key_pages.transpose(0, 1), inputs.kv.value_pages.transpose(0, 1)
    out = torch.empty_like(inputs.query)
    return lambda: wrapper.run(inputs.query, pages, out=out)


def seconds_of(compute: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Return how long the device takes, without what the host takes to ask for it."""
    if device.type != "cuda":
        return seconds(compute, device)
    compute()  # its kernels are compiled and loaded
    torch.cuda.synchronize()

    def compute_and_drop() -> None:
        compute()

    return seconds(CudaGraphs().capture(compute_and_drop), device)


def attention_lines(
    name: str, config: ModelConfig, cases: dict[str, tuple[int, int, int]], bandwidth: float, rate: float
) -> Iterator[str]:
    """Yield a line for each case of a model's layers.

    Args:
        name: of the model.
        config: likewise.
        cases: sequences, cached tokens and further ones of each, by what it is called.
        bandwidth: bytes that the GPU copies in a second.
        rate: operations of products that it does in a second.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    first = attention_of(config)[0]
    heads = HeadLayout(first.num_heads, first.num_kv_heads, first.head_dim)
    for title, sizes in cases.items():
        attention = Attention(heads, *sizes)
        inputs = Inputs(attention, device)
        compute = of_quire(attention, inputs)
        ours = seconds_of(compute, device)
        share = attention.work.seconds(bandwidth, rate) / ours
        line = f"{name}, attention of a layer, {title}: {ours * 1e3:.3f} ms, {share:.2f} of the limit; "
        if importlib.util.find_spec("flashinfer") is None:
            yield line + "FlashInfer is not installed"
            continue
        theirs = of_flashinfer(attention, inputs)
        taken = seconds_of(theirs, device)
        expected, found = compute().float(), theirs().float()
        difference = float((found - expected).norm() / expected.norm())
        yield line + (
            f"FlashInfer {taken * 1e3:.3f} ms, {ours / taken:.2f}; results differ by {difference:.1e}"
        )
