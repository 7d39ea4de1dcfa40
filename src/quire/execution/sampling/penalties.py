"""Repetition, presence and frequency penalties.

Repetition (Keskar et al. 2019) concerns tokens of prompt and output: a positive logit is divided by it, any
other multiplied. Frequency and presence (OpenAI's formula) concern the output only: logit - count *
frequency - (count > 0) * presence. The distinct tokens of a request are kept and updated with the newest,
so a step's cost depends on their number, not on the size of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.execution.arrays import Float32Array
from quire.sampling_params import SamplingParams
from quire.step import IntArray


class TokenCounts:
    """Distinct tokens of one request, with how often each is in the output.

    Args:
        prompt_token_ids: [P]; counted 0 times each.
    """

    def __init__(self, prompt_token_ids: IntArray) -> None:
        distinct = np.unique(prompt_token_ids)
        self._num_distinct = self._num_prompt_distinct = len(distinct)
        self._ids = np.empty(2 * len(distinct) + 64, dtype=np.int64)
        self._ids[: len(distinct)] = distinct
        self._counts = np.zeros(len(self._ids), dtype=np.int32)
        self._index = {token_id: index for index, token_id in enumerate(distinct.tolist())}
        self._num_prompt_tokens = len(prompt_token_ids)
        self._counted: IntArray = np.empty(64, dtype=np.int32)
        self._num_counted = 0

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct token ids, [D]."""
        return self._ids[: self._num_distinct]

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """Times in the output, [D]."""
        return self._counts[: self._num_distinct]

    def follow(self, token_ids: IntArray) -> None:
        """Count the output tokens of `token_ids`, the whole request so far.

        The cost is that of the difference from the last call: newer tokens are added, and discarded ones (a
        rejected draft, an abandoned beam) are taken back.
        """
        output = token_ids[self._num_prompt_tokens :]
        num_same = min(self._num_counted, len(output))
        differs = self._counted[:num_same] != output[:num_same]
        if differs.any():
            num_same = int(differs.argmax())
        for token_id in self._counted[num_same : self._num_counted][::-1].tolist():
            self._take_back(token_id)
        for token_id in output[num_same:].tolist():
            self._add(token_id)
        if len(output) > len(self._counted):
            self._counted = np.concatenate((self._counted, np.empty(len(output), dtype=np.int32)))
        self._counted[num_same : len(output)] = output[num_same:]
        self._num_counted = len(output)

    def _add(self, token_id: int) -> None:
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = self._num_distinct
            self._num_distinct += 1
            if index == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[index] = token_id
        self._counts[index] += 1

    def _take_back(self, token_id: int) -> None:
        index = self._index[token_id]
        self._counts[index] -= 1
        # Tokens are taken back newest first, so one that is in neither prompt nor output now came in last.
        if index >= self._num_prompt_distinct and not self._counts[index]:
            del self._index[token_id]
            self._num_distinct -= 1


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
        self._token_counts.follow(token_ids)
        ids, counts = self._token_counts.ids, self._token_counts.counts
        seen = logits[ids]
        seen = np.where(seen > 0, seen / self._repetition, seen * self._repetition)
        seen -= self._frequency * counts.astype(np.float32)
        seen -= self._presence * (counts > 0).astype(np.float32)
        logits[ids] = seen
