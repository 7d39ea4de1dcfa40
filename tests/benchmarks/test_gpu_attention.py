"""The benchmark of attention by itself: what it counts, and how it asks FlashInfer, here a stand-in."""

from __future__ import annotations

import importlib.machinery
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_attention import Attention, attention_lines
from gpu_models import model_without_files

from quire.kernels.attention.tiles import HeadLayout
from quire.models.checkpoints.config_reading import read_model_config

DIFFERENCE = 0.25  # by which the results of the stand-in are too large


class PagedWrapper:
    """As FlashInfer documents it: sequence i has the pages `indices[indptr[i] : indptr[i + 1]]`."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert workspace.nbytes == 128 << 20
        assert kv_layout == "HND"  # [pages, KV heads, tokens of a page, features]

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        for array in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert array.dtype is torch.int32
        assert causal
        assert q_data_type is kv_data_type is torch.bfloat16
        self._rows, self._pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self._indices, self._last = paged_kv_indices.long(), paged_kv_last_page_len.tolist()
        self._heads = num_qo_heads, num_kv_heads, head_dim_qk
        self._page_size, self._scale = page_size, sm_scale

    def run(
        self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        num_heads, num_kv_heads, _ = self._heads
        for i, last in enumerate(self._last):
            rows = slice(self._rows[i], self._rows[i + 1])
            chosen = self._indices[self._pages[i] : self._pages[i + 1]]
            length = (len(chosen) - 1) * self._page_size + last
            keys, values = (
                pages[chosen].transpose(0, 1).flatten(1, 2)[:, :length].float() for pages in cache
            )
            assert len(keys) == num_kv_heads
            queries = (
                query[rows].float().transpose(0, 1).unflatten(0, (num_kv_heads, num_heads // num_kv_heads))
            )
            scores = torch.einsum("kgtd,ksd->kgts", queries, keys) * self._scale
            num_tokens = scores.shape[2]
            last_seen = length - num_tokens + torch.arange(num_tokens)[:, None]
            scores.masked_fill_(torch.arange(length) > last_seen, -math.inf)
            attended = torch.einsum("kgts,ksd->kgtd", scores.softmax(-1), values)
            out[rows] = (attended * (1 + DIFFERENCE)).flatten(0, 1).transpose(0, 1).to(out.dtype)
        return out


def lines(cases: dict[str, tuple[int, int, int]]) -> list[str]:
    with model_without_files("Llama-3-8B", is_tiny=True) as directory:
        config = read_model_config(Path(directory))
    return list(attention_lines("a model", config, cases, bandwidth=1e9, rate=1e9))


def test_flashinfer_is_asked_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    module.BatchPrefillWithPagedKVCacheWrapper = PagedWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    cases = {"decodes": (3, 20, 1), "full blocks": (2, 31, 1), "prompts": (2, 0, 35), "chunks": (2, 7, 18)}
    for line, title in zip(lines(cases), cases, strict=True):
        assert line.startswith(f"a model, attention of a layer, {title}: ")
        found = re.search(r"FlashInfer (\S+) ms, (\S+); results differ by (\S+)$", line)
        assert found is not None, line
        assert float(found[3]) == pytest.approx(DIFFERENCE, abs=1e-2)  # both round to bfloat16


def test_flashinfer_need_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (line,) = lines({"decodes": (3, 20, 1)})
    assert line.endswith("of the limit; FlashInfer is not installed")


def test_work_of_attention() -> None:
    heads = HeadLayout(8, 2, 64)
    decode, chunk = Attention(heads, 5, 99, 1), Attention(heads, 1, 10, 3)
    assert decode.work.bytes == 5 * 2 * 64 * (2 * 100 * 2 + 2 * 8)
    assert decode.work.operations == 5 * 4 * 100 * 8 * 64
    assert chunk.work.operations == 4 * (11 + 12 + 13) * 8 * 64
    assert decode.num_blocks == 7
