"""What a model asks of its kernels: an interface that the reference and the kernels of each device implement.

T tokens or rows are computed at once. A row's result does not depend on the other rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from quire.errors import QuireError
from quire.kernels.arrays import Float64Array
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.bounds import POOLED_TOKENS
from quire.kernels.devices.device import HOST, array_to_device
from quire.kernels.devices.memory import WeightMemory
from quire.kernels.layers.activations import ACTIVATIONS, sigmoid, silu
from quire.kernels.layers.experts import Experts, ExpertWeights, Mixture
from quire.kernels.layers.gated_linear import GatedLinear
from quire.kernels.layers.linear import Linear
from quire.kernels.layers.recurrence import DeltaHeads, ScanHeads
from quire.kernels.layers.weights import Weight
from quire.kernels.sampling.token_choice import TokenChoice
from quire.kernels.size_classes import DECODE_SIZES, SizeClasses
from quire.step import Int64Array


class NotCapturableError(QuireError):
    """A step cannot be captured, as it depends on what the host finds out in the middle of it."""


Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures what a function asks its device for, without computing it; returns what replays it.

Raises:
    NotCapturableError: it never can.
"""


class KernelSet(ABC):
    """The compute primitives of one device."""

    name: ClassVar[str]
    sampling: ClassVar[TokenChoice]
    """Chooses tokens where the logits are."""
    takes_any_value_size: ClassVar[bool] = True
    """Whether heads of values may have other sizes than those of queries and keys."""
    takes_chunks: ClassVar[bool] = True
    """Whether attention may be that of `AttentionBatch.in_chunks`."""
    block_kinds: ClassVar[Set[str]] = frozenset()
    """Kinds of blocks whose `BlockWeight` layers take; of all other kinds they take what it decodes to."""
    step_sizes: ClassVar[SizeClasses] = DECODE_SIZES
    """Of captured decode steps."""
    device: torch.device = HOST
    """Where all tensors are that these kernels take or return, but for those of an `AttentionBatch`."""

    @property
    def capture(self) -> Capture | None:
        """Captures what is asked of these kernels; None: they leave that to their device, if it can."""
        return None

    def output_bits(self, int4_activations: str = "int8") -> int:
        """Return the bits of the output layer of a model in int4, 6 or 8, with such activations."""
        return 8

    @property
    @abstractmethod
    def weight_layout(self) -> str | None:
        """Identifies the layout of packed layers, beside their options; None: layers are not packed."""

    @abstractmethod
    def use_threads(self, num_threads: int) -> None:
        """Compute on `num_threads` threads from now on; 0: one for each physical core."""

    def compile_only(self) -> AbstractContextManager[None] | None:
        """Return a context in which launches only compile their kernels, in parallel, and compute nothing.

        Outputs are undefined then. None: there is nothing to compile.
        """
        return None

    @property
    def compiles_only(self) -> bool:
        """Whether a context of `compile_only` is entered."""
        return False

    @abstractmethod
    def linear(
        self,
        parts: Sequence[Weight],
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype,
        quantization: str = "none",
        group_size: int = 128,
        int4_activations: str = "int8",
        memory: WeightMemory | None = None,
    ) -> Linear:
        """Return the dense layer whose weight is `parts`, one below the other.

        Args:
            parts: the rows of the matrix, as they come from the checkpoint; all have the same input features,
                in their own order.
            bias: [out_features], any floating-point type.
            dtype: of the weights, if they are not quantized.
            quantization: what to make of weights in floating point: none, int8, int4, int6, which is int8
                unless `output_bits` are 6, or fp8 where there is float8. Quantized ones stay as they are if
                `quantization` names another kind; those in float8 are floating point where there is none.
            group_size: inputs that share a scale, for int4.
            int4_activations: what rows are made for int4: int8, each with a scale, or bfloat16.
            memory: where weights go; None: memory of the layer's own.
        """

    def output_linear(
        self, parts: Sequence[Weight], bias: torch.Tensor | None = None, **options: Any
    ) -> Linear:
        """Return `linear` for the logits of a model, which may hold more so that it `finds_largest`."""
        return self.linear(parts, bias, **options)

    def gated_linear(self, gate_up: Linear, activation: str) -> GatedLinear:
        """Return the layer that computes `gated_activation` of another's results.

        Args:
            gate_up: a layer that `linear` has returned; it becomes a part of the new one, and may not be
                called by others any more.
            activation: as for `gated_activation`.
        """
        return GatedLinear(self, gate_up, activation)

    @abstractmethod
    def experts(
        self,
        weights: Iterable[ExpertWeights],
        mixture: Mixture,
        *,
        dtype: torch.dtype,
        quantization: str = "none",
        group_size: int = 128,
        int4_activations: str = "int8",
        memory: WeightMemory | None = None,
    ) -> Experts:
        """Return the experts of a layer.

        Args:
            weights: those of each expert, in order, taken one expert at a time.
            mixture: what they are experts of.
            dtype, quantization, group_size, int4_activations, memory: as for `linear`.
        """

    @abstractmethod
    def rms_norm(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the root-mean-square norm of each row (Zhang and Sennrich 2019), in `rows`' type.

        With `bias` it is the layer norm (Ba et al. 2016): the mean is subtracted first, and `bias` added
        last. All of it is in float32, and so must `weight` and `bias` be: [n] for rows [T, n]. With `out` the
        result goes there, which may be `rows` itself.
        """

    @abstractmethod
    def add_rms_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor | None,
        *,
        eps: float,
        bias: torch.Tensor | None = None,
        scale: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add `scale * delta` to `residual` in place, and return the norm of the sum.

        Args:
            residual, delta: [T, n] of one type; the sum is computed in float32 and rounded to it.
            weight: [n] float32, of the norm; None: `residual` itself is returned.
            eps, bias: as for `rms_norm`.
            scale: of `delta`.
            out: [T, n], for the norm.
        """

    @abstractmethod
    def gated_activation(
        self, gate_up: torch.Tensor, activation: str, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `activation(gate) * up` for `gate_up` [T, 2 * n], gate first; computed in float32.

        `activation` is silu, gelu_tanh, gelu or relu2. With `out` [T, n] the result goes there.
        """

    def activation(
        self, rows: torch.Tensor, activation: str, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `activation`, one of `gated_activation`'s, of rows [T, n]; computed in float32.

        With `out` the result goes there, which may be `rows` itself.
        """
        result = ACTIVATIONS[activation](rows.float()).to(rows.dtype)
        return result if out is None else out.copy_(result)

    def soft_cap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """Replace logits, float32 and contiguous, by cap * tanh(logits / cap), and return them."""
        return logits.div_(cap).tanh_().mul_(cap)

    @abstractmethod
    def rotary_and_write_kv(
        self,
        qkv: torch.Tensor,
        kv: KVLayer,
        batch: AttentionBatch,
        *,
        heads: HeadLayout,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, and write keys and values to the cache.

        Args:
            qkv: [T, (heads + kv_heads) * head_dim + kv_heads * value_dim]: queries, keys, and values unless
                keys are the values; changed in place.
            kv: the layer's cache.
            batch: where each token goes.
            heads: what `qkv` consists of.
            cos, sin: [T, half] float32, the angles by which feature i of a head is rotated with feature
                i + half (Su et al. 2021); None: no rotation.
            q_norm, k_norm: float32 weights of a norm over each head, [head_dim], or over all of them,
                [heads * head_dim] and [kv_heads * head_dim]; None: no norm.
            eps: of the norms.

        Returns:
            The queries [T, heads, head_dim], a view of `qkv`.
        """

    def rotary(
        self,
        states: torch.Tensor,
        *,
        head_dim: int,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Normalize and rotate queries or keys in place, and write nothing to the cache.

        Args:
            states: [T, heads * head_dim], contiguous.
            head_dim: features of a head.
            cos, sin, norm, eps: as for `rotary_and_write_kv`.

        Returns:
            `states` as [T, heads, head_dim].
        """
        if norm is not None:
            grouped = states.view(-1, len(norm))
            self.rms_norm(grouped, norm, eps=eps, out=grouped)
        states = states.view(len(states), -1, head_dim)
        if cos is not None and sin is not None:
            states.copy_(apply_rotary(states, cos, sin))
        return states

    def sum_rows(
        self,
        rows: torch.Tensor,
        pieces: Int64Array,
        sums: torch.Tensor,
        *,
        unit: float,
        shares: Float64Array | None = None,
    ) -> None:
        """Add up rows in float64, each times its share and rounded to multiples of `unit`.

        So the sums are exact below 2**53 units, and do not depend on the order of the rows.

        Args:
            rows: [T, n].
            pieces: [S, 4]: the first row of each piece, its number of rows, which of the sums they are added
                to, no two the same, and whether that begins with zero.
            sums: [any number, n] float64.
            unit: a power of two.
            shares: [T]; None: all are 1.
        """
        first, counts, places, begins = pieces.T
        owners = np.repeat(np.arange(len(pieces)), counts)
        which = first[owners] + np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
        sums[array_to_device(places[begins != 0], rows.device)] = 0.0
        for start in range(0, len(which), POOLED_TOKENS):
            own = which[start : start + POOLED_TOKENS]
            wide = rows[array_to_device(own, rows.device)].double()
            if shares is not None:
                wide *= array_to_device(shares[own], rows.device)[:, None]
            to = array_to_device(places[owners[start : start + POOLED_TOKENS]], rows.device)
            sums.index_add_(0, to, (wide / unit).round_().mul_(unit))

    @abstractmethod
    def paged_attention(
        self,
        query: torch.Tensor,
        kv: KVLayer,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of every token of the step over its sequence's cache, itself included.

        Args:
            query: [T, heads, head_dim]; the numbers of a token are adjacent, tokens may be further apart.
            kv: the layer's cache; the step's own keys and values are already written.
            batch: the step; the `layer` of its `key_scores` is overwritten. Without a window, its
                `skipped_keys` and `key_selection` say which keys are left out.
            scale: multiplies the scores.
            window: a token sees itself and the `window - 1` tokens before it, of a two-sided batch also as
                many behind it; 0: all.
            softcap: scores become `softcap * tanh(score / softcap)`; 0: no cap (Gemma 2, section 2.4).
            sinks: [heads] float32, a score of each head that takes part in the softmax's sum and has no value
                (gpt-oss); None: none.
            distance_bias: [heads, 2 * D + 1] float32, what is added to the scores, after the cap, by how many
                places the key lies behind the token: from -D to D, and beyond these as there (T5, section
                2.1). Of two-sided batches only; None: nothing.
            out: [T, heads, head_dim] contiguous, to be overwritten with the result and returned; None: new.

        Returns:
            [T, heads, head_dim], in the query's type; sums are in float32.
        """

    @abstractmethod
    def causal_conv(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        state: torch.Tensor,
        batch: AttentionBatch,
        *,
        bias: torch.Tensor | None = None,
        activation: str = "",
    ) -> torch.Tensor:
        """Convolve each feature over the tokens of its sequence with K taps of its own.

        A token is computed from itself and the K - 1 before it, in float32, the oldest first.

        Args:
            rows: [T, n].
            weight: [K, n] float32, that of the oldest token first.
            state: [states, K - 1, n] in the rows' type: the inputs before the step, the oldest first; those
                of the step's sequences are brought up to date. `batch.states` says which they are, and how
                many tokens they take in.
            batch: the step.
            bias: [n] float32.
            activation: silu, or empty for none.

        Returns:
            [T, n] in the rows' type.
        """

    @abstractmethod
    def gated_delta_rule(
        self,
        qkv: torch.Tensor,
        strengths: torch.Tensor,
        times: torch.Tensor,
        state: torch.Tensor,
        batch: AttentionBatch,
        *,
        heads: DeltaHeads,
        out: torch.Tensor,
    ) -> None:
        """Update the memory of each head by each token, and recall its query (Yang et al. 2024).

        Queries and keys become vectors of length 1, and queries are divided by `sqrt(key_dim)`. A memory M
        [key_dim, value_dim], or each row of it with a time of its own, is multiplied by
        `exp(decay * softplus(time + time_bias))`; then `max_strength * sigmoid(strength) * key
        (value - key^T M)^T` is added to it, and `query^T M` is the result.

        Args:
            qkv: [T, 2 * num_keys * key_dim + num_values * value_dim]: queries, keys, values.
            strengths: [T, num_values], rows any distance apart.
            times: [T, num_values * heads.times_per_head], rows any distance apart.
            state: [states, num_values, key_dim, value_dim] float32; those of the step's sequences are brought
                up to date.
            batch: the step; `batch.states` says which these are, and how many tokens they take in.
            heads: what `qkv` consists of.
            out: [T, num_values, value_dim] for the result.
        """

    @abstractmethod
    def selective_scan(
        self,
        inputs: torch.Tensor,
        times: torch.Tensor,
        state: torch.Tensor,
        batch: AttentionBatch,
        *,
        heads: ScanHeads,
        out: torch.Tensor,
    ) -> None:
        """Update the memory of each head by each token, and recall its query (Mamba-2, Dao and Gu 2024).

        A memory M [state_size, head_dim] is multiplied by `exp(decay * time)`, where `time` is
        `softplus(times + time_bias)` within the limits; then `time * key value^T` is added to it, and
        `query^T M + skip * value` is the result.

        Args:
            inputs: [T, num_heads * head_dim + 2 * num_groups * state_size]: values, keys (also known as B)
                and queries (C).
            times: [T, num_heads].
            state: [states, num_heads, state_size, head_dim] float32; those of the step's sequences are
                brought up to date.
            batch: the step; `batch.states` says which these are.
            heads: what `inputs` consists of.
            out: [T, num_heads * head_dim] for the result.
        """

    def apply_gate(
        self,
        rows: torch.Tensor,
        gate: torch.Tensor,
        *,
        activation: Literal["silu", "sigmoid"],
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """Multiply rows by activation(gate), behind their root-mean-square norm if it has a weight.

        Args:
            rows: [T, n] or [T, heads, n] contiguous, overwritten and returned.
            gate: of the same shape, or with n = 1.
            activation: of the gate.
            norm: [n] float32, the weight of the norm.
            eps: as for `rms_norm`.
        """
        if norm is not None:
            flat = rows.view(-1, rows.shape[-1])
            self.rms_norm(flat, norm, eps=eps, out=flat)
        activate = silu if activation == "silu" else sigmoid
        return rows.mul_(activate(gate.float()).to(rows.dtype))


def apply_rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first `2 * half` features of each head by the position's angles (Su et al. 2021).

    Args:
        states: [T, heads, head_dim]; feature i is paired with feature i + half.
        cos, sin: [T, half] float32.
    """
    half = cos.shape[-1]
    wide = states.float()
    first, second = wide[..., :half], wide[..., half : 2 * half]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = [first * cos - second * sin, second * cos + first * sin, wide[..., 2 * half :]]
    return torch.cat(rotated, dim=-1).to(states.dtype)
