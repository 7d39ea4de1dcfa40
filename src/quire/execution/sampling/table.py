"""The sampling parameters of every slot: a struct of arrays, written when a request enters its slot."""

from __future__ import annotations

import numpy as np

from quire.execution.sampling.constraints import Constraints
from quire.execution.sampling.rng import uniforms
from quire.kernels.arrays import Float64Array, UInt8Array, UInt64Array
from quire.kernels.bounds import MIN_HEAD_TOKENS
from quire.kernels.sampling.seen_tokens import SeenIds
from quire.kernels.sampling.token_choice import NUM_DRAW_NUMBERS
from quire.sampling_params import SamplingParams
from quire.step import BoolArray, Int64Array, IntArray

DRAWS, PENALTIES, CONSTRAINTS, LOGPROBS = 1, 2, 4, 8
"""What a request may need beside its likeliest token; bits."""

_NO_SLOT = -1
NO_PENALTIES = (_NO_SLOT, 1.0, 0.0, 0.0, _NO_SLOT)
"""The numbers of a row without penalties, as in `StepPenalties`."""

_NO_LOGPROBS = -1
_ALL = 0
_NO_POSITION = -1
_SEED_MASK = 2**64 - 1
_NUM_AHEAD = 64


class SamplingTable:
    """Sampling parameters by slot, [max_num_seqs] each."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._needs: UInt8Array = np.zeros(max_num_seqs, dtype=np.uint8)
        self.num_prompt_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._draws = np.zeros((NUM_DRAW_NUMBERS - 1, max_num_seqs))  # see `RowDraws`
        self._seed: UInt64Array = np.zeros(max_num_seqs, dtype=np.uint64)
        # Random numbers are computed for some positions at once: one costs as much as many. Each lies at its
        # position modulo their number.
        self._uniforms = np.zeros((max_num_seqs, _NUM_AHEAD))
        self._uniforms_of: Int64Array = np.full((max_num_seqs, _NUM_AHEAD), _NO_POSITION, dtype=np.int64)
        self._num_largest: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs: Int64Array = np.full(max_num_seqs, _NO_LOGPROBS, dtype=np.int64)
        self._constrained_until: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._penalties = np.tile(np.array(NO_PENALTIES)[:, None], max_num_seqs)
        self.constraints: list[Constraints | None] = [None] * max_num_seqs
        self.seen: list[SeenIds | None] = [None] * max_num_seqs

    def write(
        self,
        slot: int,
        params: SamplingParams,
        *,
        num_prompt_tokens: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """Set up a slot for a request that enters it.

        Raises:
            ValueError: the request samples but has no seed; the front fills it in.
        """
        if params.seed is None and not params.is_greedy:
            raise ValueError(f"the request in slot {slot} samples but its SamplingParams.seed is None")
        self.num_prompt_tokens[slot] = num_prompt_tokens
        top_k = min(params.top_k or self._vocab_size, self._vocab_size)
        self._draws[:, slot] = params.temperature, top_k, params.top_p, params.min_p
        self._seed[slot] = (params.seed or 0) & _SEED_MASK
        self._uniforms_of[slot] = _NO_POSITION
        self.num_logprobs[slot] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        constraints = Constraints.of(params, eos_token_ids=eos_token_ids, vocab_size=self._vocab_size)
        self.constraints[slot] = constraints
        self._constrained_until[slot] = 0 if constraints is None else constraints.until
        penalty = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        is_penalized = penalty != (1, 0, 0)
        self._penalties[:, slot] = NO_PENALTIES
        if is_penalized:
            self._penalties[:, slot] = slot, *np.array(penalty, dtype=np.float32), slot
        draws = params.temperature > 0
        needs = (
            PENALTIES * is_penalized
            + CONSTRAINTS * (constraints is not None)
            + LOGPROBS * (params.logprobs is not None)
        )
        self._needs[slot] = needs + DRAWS * draws
        num_drawn_from = top_k if draws else 1
        needs_all = needs or params.structured_outputs is not None or num_drawn_from > MIN_HEAD_TOKENS
        self._num_largest[slot] = _ALL if needs_all else num_drawn_from

    def clear(self, slot: int) -> None:
        """Free the memory held for the request that left the slot."""
        self.constraints[slot] = self.seen[slot] = None

    def needs(self, slots: Int64Array) -> int:
        """Return what any of `slots` [R] needs."""
        needs = 0
        for of_slot in set(self._needs[slots].tobytes()):
            needs |= of_slot
        return needs

    def num_largest(self, slots: IntArray) -> int:
        """Return how many of the largest logits of each of `slots` their tokens depend on; 0: all."""
        numbers = self._num_largest[slots]
        return int(numbers.max(initial=0)) if numbers.all() else _ALL

    def is_penalized(self, slots: Int64Array) -> BoolArray:
        """Return which of `slots` have penalties, [R]."""
        penalized: BoolArray = self._penalties[0, slots] != _NO_SLOT
        return penalized

    def penalties_of(self, slots: Int64Array) -> Float64Array:
        """Return the numbers of `StepPenalties` of `slots`, [5, R]."""
        return self._penalties.take(slots, axis=1)

    def is_constrained(self, slots: Int64Array, positions: Int64Array) -> BoolArray:
        """Return which of `slots` have constraints on the token at `positions`, [R]."""
        num_output_tokens = positions - self.num_prompt_tokens[slots]
        constrained: BoolArray = num_output_tokens < self._constrained_until[slots]
        return constrained

    def draws(self, slots: Int64Array, positions: Int64Array) -> Float64Array:
        """Return the numbers that `RowDraws` are made of, [NUM_DRAW_NUMBERS, R], in the order of its fields.

        Args:
            slots: [R].
            positions: [R] absolute index of the token to choose.
        """
        places = positions % _NUM_AHEAD
        numbers = np.empty((NUM_DRAW_NUMBERS, len(slots)))
        numbers[:-1] = self._draws.take(slots, axis=1)
        numbers[-1] = self._uniforms[slots, places]
        missing = (self._uniforms_of[slots, places] != positions).nonzero()[0]
        if missing.size:
            of_slots = slots[missing, None]
            ahead = positions[missing, None] + np.arange(_NUM_AHEAD)
            seeds = np.broadcast_to(self._seed[of_slots], ahead.shape)
            found = uniforms(seeds.ravel(), ahead.ravel()).reshape(ahead.shape)
            numbers[-1, missing] = found[:, 0]
            self._uniforms[of_slots, ahead % _NUM_AHEAD] = found
            self._uniforms_of[of_slots, ahead % _NUM_AHEAD] = ahead
        return numbers
