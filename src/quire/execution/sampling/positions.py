"""Where a step samples, and which of the sampled tokens count: the verification of drafts.

A request with d drafts samples at d + 1 positions: after its last known token and after each draft, each time
as if all tokens before it were final. Drafts are accepted from the left as long as the token sampled at a
draft's position equals the draft; at the first mismatch the sampled token replaces the draft, and everything
sampled after it is discarded.

That is rejection sampling (Leviathan et al. 2023, Chen et al. 2023) for a proposal that puts all its mass on
one token: the draft is accepted with the probability p that the sampler gives it, and what is emitted after
a rejection is distributed as p over the other tokens. Since each position's uniform number is the one that
the request would have drawn without drafts, the tokens are not only equal in distribution but identical.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import numpy as np

from quire.step import NO_TOKEN, Int64Array, IntArray, SchedulerOutput


@dataclasses.dataclass(slots=True, frozen=True)
class SamplingPositions:
    """The sampling positions of one step: S requests sample at P positions, request after request."""

    rows: Int64Array  # [S] rows of the step, ascending
    drafts: IntArray  # [S, K] padded with NO_TOKEN
    request: Int64Array  # [P] index into `rows`
    offset: Int64Array  # [P] drafts before the position
    positions: Int64Array  # [P] absolute index of the token to choose
    tokens: Int64Array  # [P] index, among the step's tokens, of the token before

    @classmethod
    def of(cls, output: SchedulerOutput) -> Self:
        """Return the positions of a step; a row that does not reach its last known token has none."""
        rows = output.samples.nonzero()[0]
        drafts = output.draft_token_ids[rows]
        request = np.arange(len(rows))
        offset = np.zeros(len(rows), dtype=np.int64)
        positions = output.num_known_tokens[rows].astype(np.int64)
        tokens = output.num_tokens.cumsum(dtype=np.int64)[rows] - 1
        if drafts.size:
            num_positions = 1 + np.count_nonzero(drafts != NO_TOKEN, axis=1)
            request = np.repeat(request, num_positions)
            offset = np.arange(len(request)) - (np.cumsum(num_positions) - num_positions)[request]
            positions = positions[request] + offset
            tokens = (tokens - num_positions + 1)[request] + offset
        return cls(rows, drafts, request, offset, positions, tokens)

    def accept(self, token_ids: Int64Array) -> IntArray:
        """Return the tokens that each request emits, padded with NO_TOKEN: [S, 1 + K].

        A position without a token, because of an error, ends the row before it; the error recurs when the
        request starts a step there.

        Args:
            token_ids: [P] the token sampled at each position, or NO_TOKEN.
        """
        if not self.drafts.shape[1]:
            return token_ids[:, None].astype(np.int32)
        sampled = np.full((len(self.rows), 1 + self.drafts.shape[1]), NO_TOKEN, dtype=np.int32)
        sampled[self.request, self.offset] = token_ids
        is_accepted = (sampled[:, :-1] == self.drafts) & (self.drafts != NO_TOKEN)
        num_accepted = np.logical_and.accumulate(is_accepted, axis=1).sum(axis=1)
        sampled[np.arange(sampled.shape[1]) > num_accepted[:, None]] = NO_TOKEN
        return sampled
