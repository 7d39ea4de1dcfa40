"""The ragged batch of one step: which tokens of which sequences are computed, and where their KV lives.

Everything that depends on the step but not on the layer is computed once here and shared by all layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.attention.key_scores import KeyScores
from quire.kernels.attention.kv_layer import KVOfRows
from quire.kernels.attention.sparse_prefill import KeySelection, SkippedKeys
from quire.kernels.attention.step_arrays import (
    DerivedArrays,
    DeviceArrays,
    HostArrays,
    MakeArrays,
    StepArrays,
    lengthened,
)
from quire.kernels.attention.tiles import AttentionPlan, HeadLayout, plan_attention
from quire.kernels.devices.device import HOST
from quire.kernels.size_classes import DECODE_SIZES, EXACT_SIZES, SizeClasses
from quire.step import Int64Array

NO_BLOCK = -1  # of padding rows
_OVER_ROWS = "over rows"  # among a batch's plans


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class StepStates:
    """The states of recurrent layers that a step's sequences work on.

    Args:
        numbers: [S] int64, of each sequence's state. What it holds counts unless the sequence has no tokens
            before the step.
        layers: of each layer, its tensors of all states by name, [states, ...] each.
        num_tokens: [S] int64, how many of its tokens in the step each sequence's state takes in, at least 1;
            those behind them are computed, and leave nothing in it. None: all.
    """

    numbers: Int64Array
    layers: Sequence[Mapping[str, torch.Tensor]]
    num_tokens: Int64Array | None = None


@dataclasses.dataclass(slots=True, eq=False)
class AttentionBatch:
    """One step's tokens, sequence after sequence: prefill chunks and decodes alike.

    It is in host memory; what kernels of another device need of it is copied once, see `on_device`.

    The layers of each cache group have block tables of their own, see `quire.kv.blocks.groups`; those here
    are of one group.

    S sequences, T tokens. Sequence s computes `num_tokens[s]` tokens, the ones after the tokens that it has
    computed. Their keys and values follow the `num_cached_tokens[s]` in its cache, which are all of these
    unless some were evicted: then a token's place in the cache is not its position.
    """

    positions: torch.Tensor  # [T] int64, absolute; here and in the next two, T may be more, see `padded`
    block_size: int  # tokens
    slot_blocks: torch.Tensor  # [T] int64, block of each token
    slot_offsets: torch.Tensor  # [T] int64, place of each token in its block
    num_cached_tokens: Int64Array  # [S], before this step
    num_tokens: Int64Array  # [S], in this step, each at least 1
    block_tables: npt.NDArray[np.int32]  # [S, max_blocks]
    states: StepStates | None = None  # None: no layer is recurrent
    key_scores: KeyScores | None = None  # what attention reports; None: nothing
    skipped_keys: SkippedKeys | None = None  # in layers without a window; None: none
    key_selection: KeySelection | None = None  # see there; None: all tokens see all keys
    token_types: torch.Tensor | None = None  # [T] int64; None: all are of the first
    is_two_sided: bool = False  # tokens see those behind them, too; see `over_rows`
    sizes: SizeClasses = DECODE_SIZES  # to which kernels round up the sizes of their plans
    plans: dict[Any, Any] = dataclasses.field(default_factory=dict)  # what the kernels keep of this step
    step_arrays: StepArrays | None = None  # made when a device needs any
    others: tuple[AttentionBatch, ...] = ()  # the same step in cache groups 1 and up

    @classmethod
    def build(
        cls,
        num_computed_tokens: npt.NDArray[Any],
        num_tokens: npt.NDArray[Any],
        block_tables: npt.NDArray[Any],
        block_size: int,
        *,
        num_evicted_tokens: npt.NDArray[Any] | None = None,
        first_scoring_token: npt.NDArray[Any] | None = None,
        sums_scores: npt.NDArray[np.bool_] | None = None,
        num_scored_layers: int = 1,
        scores_on: torch.device = HOST,
        skipped_keys: SkippedKeys | None = None,
        key_selection: KeySelection | None = None,
        other_tables: Sequence[npt.NDArray[Any]] = (),
        states: StepStates | None = None,
    ) -> Self:
        """Return the batch of one step.

        Args:
            num_computed_tokens: [S] tokens that have been computed before.
            num_tokens: [S] tokens to compute now, each at least 1.
            block_tables: [S, B] block ids; entries past a sequence's last block are never read.
            block_size: tokens per block.
            num_evicted_tokens: [S] computed tokens whose KV is no longer in the cache, so that all later ones
                have moved up by that many places; None: none of any sequence. The windows of attention count
                places.
            first_scoring_token: [S] as for `KeyScores.build`; None: no token scores.
            sums_scores: [S] whether the scores of a sequence are summed over its tokens; None: none is.
            num_scored_layers, scores_on: `num_layers` and `device` of `KeyScores.build`.
            skipped_keys: cached keys that the step's tokens do not see; a sequence that skips any must not
                score.
            key_selection: which tokens see only selected keys.
            other_tables: the block tables [S, B] of cache groups 1 and up.
            states: of recurrent layers; None: there are no such layers.

        Raises:
            ValueError: a sequence skips keys and scores.
        """
        computed = np.asarray(num_computed_tokens, dtype=np.int64)
        counts = np.asarray(num_tokens, dtype=np.int64)
        tables = np.ascontiguousarray(block_tables, dtype=np.int32)
        first_row = counts.cumsum() - counts
        sequence = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(sequence)) + (computed - first_row)[sequence]
        cached, places = computed, positions
        if num_evicted_tokens is not None:
            evicted = np.asarray(num_evicted_tokens, dtype=np.int64)
            cached, places = computed - evicted, positions - evicted[sequence]
        key_scores = None
        if first_scoring_token is not None:
            key_scores = KeyScores.build(
                counts,
                cached + counts,
                first_scoring_token,
                sums_scores,
                num_layers=num_scored_layers,
                device=scores_on,
            )
            if skipped_keys is not None:
                _refuse_scores(skipped_keys, np.asarray(first_scoring_token) < counts)
        entries, offsets = np.divmod(places, block_size)
        blocks = tables[sequence, entries].astype(np.int64)
        batch = cls(
            positions=torch.from_numpy(positions),
            block_size=block_size,
            slot_blocks=torch.from_numpy(blocks),
            slot_offsets=torch.from_numpy(offsets),
            num_cached_tokens=cached,
            num_tokens=counts,
            block_tables=tables,
            states=states,
            key_scores=key_scores,
            skipped_keys=skipped_keys,
            key_selection=key_selection,
        )
        if len(other_tables):
            batch.others = tuple(batch._with_tables(other, sequence, entries) for other in other_tables)
        return batch

    @property
    def num_state_tokens(self) -> Int64Array:
        """How many of its tokens in the step each sequence's state takes in, see `StepStates`: [S]."""
        given = None if self.states is None else self.states.num_tokens
        return self.num_tokens if given is None else given

    def _with_tables(
        self, block_tables: npt.NDArray[Any], sequence: Int64Array, entries: Int64Array
    ) -> AttentionBatch:
        """Return the same step with the block tables of another cache group."""
        tables = np.ascontiguousarray(block_tables, dtype=np.int32)
        return dataclasses.replace(
            self,
            slot_blocks=torch.from_numpy(tables[sequence, entries].astype(np.int64)),
            block_tables=tables,
            plans={},
            step_arrays=None,
        )

    def kv_of_rows(self, qkv: torch.Tensor, heads: HeadLayout) -> KVOfRows:
        """Return the keys and values in rows [T, queries, keys and values], for `over_rows`; made once.

        All layers with such heads must use the same rows.
        """
        made: KVOfRows | None = self.plans.get(heads)
        if made is None:
            made = self.plans[heads] = KVOfRows.of(qkv, heads)
        return made

    def over_rows(self) -> AttentionBatch:
        """Return the attention of whole prompts in which each token sees all others; made once.

        There is no cache: keys and values are where the step's rows have them, each token a block of its own.

        Raises:
            ValueError: a sequence has tokens before the step.
        """
        made: AttentionBatch | None = self.plans.get(_OVER_ROWS)
        if made is None:
            if self.num_cached_tokens.any():
                raise ValueError("a sequence has tokens before the step; prompts must be computed whole")
            counts, total = self.num_tokens, len(self.positions)
            first_row = counts.cumsum() - counts
            rows = first_row[:, None] + np.arange(counts.max(initial=0))
            made = self.plans[_OVER_ROWS] = AttentionBatch(
                positions=self.positions,
                block_size=1,
                slot_blocks=torch.from_numpy(np.arange(total)),
                slot_offsets=torch.from_numpy(np.zeros(total, dtype=np.int64)),
                num_cached_tokens=self.num_cached_tokens,
                num_tokens=counts,
                block_tables=np.minimum(rows, total - 1).astype(np.int32),
                is_two_sided=True,
            )
        if self.step_arrays is not None and made.step_arrays is None:
            made.step_arrays = DerivedArrays(self.step_arrays, self, _OVER_ROWS, AttentionBatch.over_rows)
        return made

    def in_chunks(self, size: int) -> AttentionBatch:
        """Return the same step for layers in which a token sees those of its own chunk only, made once.

        The tokens of each chunk become a sequence of their own, which skips all keys before the chunk.

        Args:
            size: tokens of a chunk; the first begins with the sequence.
        """
        found: AttentionBatch | None = self.plans.get(("chunks", size))
        if found is None:
            found = self.plans["chunks", size] = self._in_chunks(size)
        return found

    def _in_chunks(self, size: int) -> AttentionBatch:
        first, last = self.num_cached_tokens // size, (self.num_cached_tokens + self.num_tokens - 1) // size
        num_chunks = last - first + 1
        sequence = np.repeat(np.arange(len(num_chunks)), num_chunks)
        chunk = np.arange(len(sequence)) - np.repeat(np.cumsum(num_chunks) - num_chunks - first, num_chunks)
        cached, end = (self.num_cached_tokens[sequence], (self.num_cached_tokens + self.num_tokens)[sequence])
        start, stop = np.maximum(cached, chunk * size), np.minimum(end, (chunk + 1) * size)
        return dataclasses.replace(
            self,
            num_cached_tokens=start,
            num_tokens=stop - start,
            block_tables=np.ascontiguousarray(self.block_tables[sequence]),
            states=None,
            key_scores=None,
            skipped_keys=SkippedKeys(np.zeros_like(start), chunk * size),
            key_selection=None,
            plans={},
            step_arrays=None,
            others=(),
        )

    @property
    def places_in_prompts(self) -> torch.Tensor:
        """The place of each token among those of its sequence in the step, [T] int64."""
        counts = self.num_tokens
        first_row = np.cumsum(counts) - counts
        return torch.from_numpy(np.arange(counts.sum()) - np.repeat(first_row, counts))

    @property
    def is_planned(self) -> bool:
        """Whether kernels have plans or arrays of this step already."""
        return bool(self.plans) or self.step_arrays is not None

    @property
    def num_rows(self) -> int:
        """Rows of the step's tensors: T, or more, see `padded`."""
        return len(self.positions)

    def padded(self, sizes: SizeClasses) -> Self:
        """Return this step with T rounded up; the rows after the tokens are padding.

        They hold any finite numbers; nothing is written to the cache for them. Kernels need
        not support that unless they run in captured steps.
        """
        if (
            sizes is EXACT_SIZES
            and not self.is_planned
            and not any(other.is_planned for other in self.others)
        ):
            return self
        num_rows = sizes.rows(self.num_rows)
        return dataclasses.replace(
            self,
            positions=torch.from_numpy(lengthened(self.positions.numpy(), num_rows)),
            slot_blocks=torch.from_numpy(lengthened(self.slot_blocks.numpy(), num_rows, NO_BLOCK)),
            slot_offsets=torch.from_numpy(lengthened(self.slot_offsets.numpy(), num_rows)),
            sizes=sizes,
            plans={},
            step_arrays=None,
            others=tuple(other.padded(sizes) for other in self.others) if self.others else (),
        )

    def on_device(self, name: Hashable, make: MakeArrays, device: torch.device) -> DeviceArrays:
        """Return the result of `make` for this step on a device, copied once; `name` identifies `make`."""
        if self.step_arrays is None:
            self.step_arrays = StepArrays()
        return self.step_arrays.of(self, name, make, device)

    def positions_on(self, device: torch.device) -> torch.Tensor:
        """Return the positions [T] on a device, copied once, or where a captured step reads them."""
        if self.step_arrays is None and device == HOST:
            return self.positions
        return self.on_device("positions", _positions, device).arrays[0]

    @property
    def last_position(self) -> int:
        """The highest position of all tokens; -1: there are no tokens."""
        return int(self.positions.numpy().max()) if len(self.positions) else -1

    def effective_window(self, window: int) -> int:
        """Return a layer's window; 0 for one that all sequences of a two-sided step fit into."""
        return 0 if self.is_two_sided and window >= self.num_tokens.max(initial=0) else window

    def plan(self, heads: HeadLayout, window: int) -> AttentionPlan:
        """Return the attention work of this step for layers of this shape and window (0: full), made once."""
        key = (heads, window)
        plan: AttentionPlan | None = self.plans.get(key)
        if plan is None:
            plan = plan_attention(
                self.num_cached_tokens,
                self.num_tokens,
                self.block_tables,
                block_size=self.block_size,
                heads=heads,
                window=window,
                skipped_keys=None if window else self.skipped_keys,
                is_two_sided=self.is_two_sided,
            )
            self.plans[key] = plan
        return plan


def _positions(batch: AttentionBatch) -> HostArrays:
    return HostArrays((batch.positions.numpy(),))


def check_distance_bias(bias: torch.Tensor, num_heads: int, batch: AttentionBatch) -> None:
    """Raise ValueError unless attention of a step may have this bias by distance."""
    shape = bias.shape
    if len(shape) != 2 or shape[0] != num_heads or not shape[1] % 2 or not batch.is_two_sided:
        raise ValueError(
            f"distance_bias is {list(shape)}, for a batch that is {'' if batch.is_two_sided else 'not '}"
            f"two-sided; it must be [{num_heads}, an odd number], for one that is"
        )
    if bias.dtype is not torch.float32 or not bias.is_contiguous():
        raise ValueError(
            f"distance_bias is {bias.dtype} with strides {bias.stride()}; it must be float32 and contiguous"
        )


def _refuse_scores(skipped: SkippedKeys, scores: npt.NDArray[np.bool_]) -> None:
    wrong = np.flatnonzero(scores & skipped.is_any)
    if wrong.size:
        raise ValueError(f"sequence {wrong[0]} skips keys in this step, so its tokens must not score")
