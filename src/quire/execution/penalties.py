"""Repetition, presence and frequency penalties.

Repetition (Keskar et al. 2019) concerns tokens of prompt and output: a positive logit is divided by it, any
other multiplied. Frequency and presence (OpenAI's formula) concern the output only: logit - count *
frequency - (count > 0) * presence. The distinct tokens of a request are kept and grown by the newest ones,
so a step costs their number, not the vocabulary's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.execution.arrays import Float32Array
from quire.request import SamplingParams
from quire.step import IntArray


class TokenCounts:
    """Distinct tokens of one request, with how often each is in the output.

    Args:
        prompt_token_ids: [P]; counted 0 times each.
    """

    def __init__(self, prompt_token_ids: IntArray) -> None:
        distinct = np.unique(prompt_token_ids)
        self._size = len(distinct)
        self._ids = np.empty(2 * self._size + 64, dtype=np.int64)
        self._ids[: self._size] = distinct
        self._counts = np.zeros(len(self._ids), dtype=np.int32)
        self._index = {token_id: index for index, token_id in enumerate(distinct.tolist())}
        self._num_seen = len(prompt_token_ids)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct token ids, [D]."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """Times in the output, [D]."""
        return self._counts[: self._size]

    def catch_up(self, token_ids: IntArray) -> None:
        """Count the output tokens that are new in `token_ids`, the whole request so far."""
        for token_id in token_ids[self._num_seen :].tolist():
            index = self._index.get(token_id)
            if index is None:
                index = self._add(token_id)
            self._counts[index] += 1
        self._num_seen = len(token_ids)

    def _add(self, token_id: int) -> int:
        index = self._size
        if index == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[index] = token_id
        self._index[token_id] = index
        self._size += 1
        return index


class Penalties:
    """The penalties of one request, with the token counts they need; see `of`."""

    def __init__(self, params: SamplingParams, prompt_token_ids: IntArray) -> None:
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._token_counts = TokenCounts(prompt_token_ids)

    @classmethod
    def of(cls, params: SamplingParams, prompt_token_ids: IntArray) -> Penalties | None:
        """Return the request's penalties, or None if it has none."""
        has_any = params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
        return cls(params, prompt_token_ids) if has_any else None

    def apply(self, logits: Float32Array, token_ids: IntArray) -> None:
        """Change one row of logits in place.

        Args:
            logits: [V].
            token_ids: the request's prompt and output so far.
        """
        self._token_counts.catch_up(token_ids)
        ids, counts = self._token_counts.ids, self._token_counts.counts
        seen = logits[ids]
        seen = np.where(seen > 0, seen / self._repetition, seen * self._repetition)
        seen -= self._frequency * counts.astype(np.float32)
        seen -= self._presence * (counts > 0).astype(np.float32)
        logits[ids] = seen
