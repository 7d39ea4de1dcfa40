"""Cosines and sines of rotary position embeddings, from tables that grow with the positions asked for."""

from __future__ import annotations

import math

import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.step_arrays import HostArrays
from quire.kernels.devices.device import HOST, to_device
from quire.models.config import RopeConfig

CHUNK = 2048  # positions computed at once; a fixed size, so that growing the table changes no bit of it


class RotaryTable:
    """Angles of every position under one set of frequencies.

    Frequencies that depend on the sequence's length (dynamic, longrope) are those of `max_model_len` for
    every position, so that a token's key does not depend on how long its sequence was or will be.

    Args:
        rope: the frequencies.
        max_model_len: longest sequence that will be served, in tokens.
        device: where the angles are looked up. They are computed on the host.
    """

    def __init__(self, rope: RopeConfig, max_model_len: int, device: torch.device = HOST) -> None:
        self._frequencies = inverse_frequencies(rope, max_model_len)
        self._attention_factor = rope.attention_factor
        self._device = device
        self._cos = torch.empty(0, len(self._frequencies), device=device)
        self._sin = torch.empty(0, len(self._frequencies), device=device)
        self._rope = rope
        self._query_scale = torch.empty(0, 1, 1, device=device)

    def of_step(self, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return a step's (cos, sin), see `rows`, and its query scale."""
        if (
            self._device == HOST and batch.step_arrays is not None
        ):  # captures must not keep a table that grows
            cos, sin, *scale = batch.on_device(self, self._host_arrays, HOST).arrays
            return cos, sin, scale[0] if scale else None
        positions = batch.positions_on(self._device)
        cos, sin = self.rows(positions, last=batch.last_position)
        return cos, sin, self.query_scale(positions)

    def _host_arrays(self, batch: AttentionBatch) -> HostArrays:
        self._cover(batch.last_position)
        tables = [self._cos, self._sin, self._query_scale][: 3 if self._rope.query_beta else 2]
        positions = batch.positions.numpy()  # numpy takes a few rows in a fraction of torch's time
        return HostArrays(tuple(table.numpy()[positions] for table in tables))

    def rows(self, positions: torch.Tensor, *, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin), each [T, rotary_dim / 2] float32.

        Args:
            positions: [T] int64, on the table's device.
            last: the highest of them, or more; -1: there are none.
        """
        self._cover(last)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def query_scale(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return what queries are multiplied by, [T, 1, 1] float32; None: 1.

        Args:
            positions: those of the last call of `rows`, or of earlier ones.
        """
        return self._query_scale.index_select(0, positions) if self._rope.query_beta else None

    def _cover(self, last: int) -> None:
        """Grow the table unless it has the angles of positions up to `last`."""
        if last >= len(self._cos):
            self._grow(last + 1)

    def _grow(self, needed: int) -> None:
        starts = range(len(self._cos), max(needed, len(self._cos) * 2), CHUNK)
        angles = [
            torch.arange(start, start + CHUNK, dtype=torch.float32)[:, None] * self._frequencies
            for start in starts
        ]
        if self._rope.query_beta:
            self._grow_query_scale(starts)
        scale = self._attention_factor
        cos = torch.cat([chunk.cos() * scale for chunk in angles])
        sin = torch.cat([chunk.sin() * scale for chunk in angles])
        self._cos = torch.cat([self._cos, to_device(cos, self._device)])
        self._sin = torch.cat([self._sin, to_device(sin, self._device)])

    def _grow_query_scale(self, starts: range) -> None:
        beta, original = self._rope.query_beta, self._rope.original_max_len
        firsts = (start + self._rope.query_offset for start in starts)
        chunks = [
            1 + beta * (torch.arange(first, first + CHUNK) // original).float().log1p() for first in firsts
        ]
        grown = to_device(torch.cat(chunks)[:, None, None], self._device)
        self._query_scale = torch.cat([self._query_scale, grown])


def inverse_frequencies(rope: RopeConfig, max_model_len: int) -> torch.Tensor:
    """Return the angle per position of each pair of features, [rotary_dim / 2] float32.

    Sources: RoPE (Su et al. 2021), position interpolation (Chen et al. 2023), dynamic NTK scaling (the
    LocalLLaMA forum, 2023), YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024), the model cards of Llama
    3.1 and Gemma 4.
    """
    if rope.kind == "dynamic":
        return _powers(_dynamic_theta(rope, max_model_len), rope.rotary_dim)
    plain = _powers(rope.theta, rope.rotary_dim)
    if rope.kind == "proportional":
        plain[rope.turning_pairs :] = 0.0
    if rope.kind in ("linear", "proportional"):
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope)
    if rope.kind == "longrope":
        is_long = max_model_len > rope.original_max_len
        return plain / torch.tensor(rope.long_factors if is_long else rope.short_factors)
    return plain


def _powers(theta: float, rotary_dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def _dynamic_theta(rope: RopeConfig, max_model_len: int) -> float:
    length = max(max_model_len, rope.original_max_len)
    stretch = rope.factor * length / rope.original_max_len - (rope.factor - 1)
    return float(rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow down long waves, keep short ones, and blend in between by the turns in the original context."""
    turns = rope.original_max_len * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return blend * plain + (1 - blend) * plain / rope.factor


def _yarn(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow down features by a linear ramp between those that turn `beta_fast` and `beta_slow` times."""

    def feature_with(turns: float) -> float:
        wave = rope.original_max_len / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = feature_with(rope.beta_fast), feature_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low or 0.001
    slowed = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return plain * (1 - slowed) + plain / rope.factor * slowed
