"""The sampling parameters of every slot: a struct of arrays, written when a request enters its slot."""

from __future__ import annotations

import numpy as np

from quire.execution.arrays import BoolArray, Float32Array, Int64Array, UInt64Array
from quire.execution.sampling.constraints import Constraints
from quire.execution.sampling.penalties import Penalties
from quire.execution.sampling.selection import Filters
from quire.sampling_params import SamplingParams
from quire.step import IntArray

_NO_LOGPROBS = -1
_SEED_MASK = 2**64 - 1


class SamplingTable:
    """Sampling parameters by slot, [max_num_seqs] each."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.num_prompt_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._temperature = np.zeros(max_num_seqs)
        self._top_k: Int64Array = np.full(max_num_seqs, vocab_size, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs)
        self._min_p = np.zeros(max_num_seqs)
        self._seed: UInt64Array = np.zeros(max_num_seqs, dtype=np.uint64)
        self.num_logprobs: Int64Array = np.full(max_num_seqs, _NO_LOGPROBS, dtype=np.int64)
        self._constrained_until: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._allows_few: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self._penalized: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self._penalty = np.zeros((3, max_num_seqs), dtype=np.float32)
        self.penalties: list[Penalties | None] = [None] * max_num_seqs
        self.constraints: list[Constraints | None] = [None] * max_num_seqs

    def write(
        self,
        slot: int,
        params: SamplingParams,
        *,
        prompt_token_ids: IntArray,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """Set up a slot for a request that enters it.

        Raises:
            ValueError: the request samples but has no seed; the front fills it in.
        """
        if params.seed is None and not params.is_greedy:
            raise ValueError(f"the request in slot {slot} samples but its SamplingParams.seed is None")
        self.num_prompt_tokens[slot] = len(prompt_token_ids)
        self._temperature[slot] = params.temperature
        self._top_k[slot] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = (params.seed or 0) & _SEED_MASK
        self.num_logprobs[slot] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        penalties = Penalties.of(params, prompt_token_ids)
        constraints = Constraints.of(params, eos_token_ids=eos_token_ids, vocab_size=self._vocab_size)
        self.penalties[slot] = penalties
        self.constraints[slot] = constraints
        self._allows_few[slot] = constraints is not None and constraints.allows_few
        self._penalized[slot] = penalties is not None
        self._penalty[:, slot] = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        self._constrained_until[slot] = 0 if constraints is None else constraints.until

    def clear(self, slot: int) -> None:
        """Free the memory held for the request that left the slot."""
        self.penalties[slot] = None
        self.constraints[slot] = None

    def is_adjusted(self, slots: Int64Array, positions: Int64Array) -> BoolArray:
        """Return which of `slots` change their logits before the token at `positions` is chosen, [R]."""
        adjusted: BoolArray = self._penalized[slots] | self.is_constrained(slots, positions)
        return adjusted

    def is_penalized(self, slots: Int64Array) -> BoolArray:
        """Return which of `slots` have penalties, [R]."""
        penalized: BoolArray = self._penalized[slots]
        return penalized

    def penalties_of(self, slots: Int64Array) -> Float32Array:
        """Return the penalties of `slots` for repetition, frequency and presence, [3, R]."""
        penalties: Float32Array = np.ascontiguousarray(self._penalty[:, slots])
        return penalties

    def is_constrained(self, slots: Int64Array, positions: Int64Array) -> BoolArray:
        """Return which of `slots` have constraints on the token at `positions`, [R]."""
        num_output_tokens = positions - self.num_prompt_tokens[slots]
        constrained: BoolArray = num_output_tokens < self._constrained_until[slots]
        return constrained

    def allows_few(self, slots: Int64Array) -> BoolArray:
        """Return which of `slots` choose among some tokens only, [R]."""
        few: BoolArray = self._allows_few[slots]
        return few

    def is_random(self, slots: Int64Array) -> BoolArray:
        """Return which of `slots` sample rather than take the most likely token, [R]."""
        random: BoolArray = self._temperature[slots] > 0
        return random

    def filters(self, slots: Int64Array) -> Filters:
        """Return the filters of `slots`; the temperature of those that do not sample is 0."""
        return Filters(self._temperature[slots], self._top_k[slots], self._top_p[slots], self._min_p[slots])

    def seeds(self, slots: Int64Array) -> UInt64Array:
        """Return the seeds of `slots`, [R]."""
        return self._seed[slots]
