"""Buffers for what a forward pass computes on its way, kept from step to step."""

from __future__ import annotations

import dataclasses

import torch

from quire.models.config import ModelConfig


@dataclasses.dataclass(slots=True, frozen=True)
class StepBuffers:
    """The intermediate results of one layer for T tokens; the next layer overwrites them."""

    normed: torch.Tensor  # [T, hidden]
    qkv: torch.Tensor  # [T, (heads + 2 * kv_heads) * head_dim]
    attended: torch.Tensor  # [T, heads, head_dim]
    gate_up: torch.Tensor  # [T, 2 * intermediate], or [T, 0] if no layer keeps these products
    inner: torch.Tensor  # [T, intermediate]
    delta: torch.Tensor  # [T, hidden], what a sub-layer adds to the residual stream

    def rows(self, count: int) -> StepBuffers:
        """Return the buffers of the first `count` tokens."""
        return StepBuffers(*(getattr(self, field.name)[:count] for field in dataclasses.fields(self)))


class Workspace:
    """Grows to the largest step and to the most rows of logits that were asked for.

    Args:
        config: the model's numbers.
        dtype: of the hidden states.
        device: whose memory the buffers are in.
        keeps_products: see `GatedLinear`; of any layer.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, keeps_products: bool
    ) -> None:
        self._config = config
        self._keeps_products = keeps_products
        self._dtype = dtype
        self._device = device
        self._capacity = 0
        self._current: tuple[int, StepBuffers] | None = None
        self._logits = torch.empty(0, config.vocab_size, device=device)

    def step(self, num_tokens: int) -> StepBuffers:
        """Return the buffers of a step; steps of equal size get the same ones."""
        if num_tokens > self._capacity:
            self._buffers = self._allocate(num_tokens)
            self._capacity = num_tokens
            self._current = None
        if self._current is None or self._current[0] != num_tokens:
            self._current = num_tokens, self._buffers.rows(num_tokens)
        return self._current[1]

    def logits(self, num_rows: int) -> torch.Tensor:
        """Return [num_rows, vocab] float32, to be used up before the next call."""
        if num_rows > len(self._logits):
            self._logits = torch.empty(num_rows, self._config.vocab_size, device=self._device)
        return self._logits[:num_rows]

    def _allocate(self, num_tokens: int) -> StepBuffers:
        config = self._config
        num_heads = config.num_heads + 2 * config.num_kv_heads

        def rows(*shape: int) -> torch.Tensor:
            return torch.empty(num_tokens, *shape, dtype=self._dtype, device=self._device)

        return StepBuffers(
            normed=rows(config.hidden_size),
            qkv=rows(num_heads * config.head_dim),
            attended=rows(config.num_heads, config.head_dim),
            gate_up=rows(2 * config.intermediate_size if self._keeps_products else 0),
            inner=rows(config.intermediate_size),
            delta=rows(config.hidden_size),
        )
