"""Where a step samples, and which of the sampled tokens count: the verification of drafts.

A request with d drafts samples at d + 1 places: after its last known token and after each draft, each time as
if all before it were certain. Drafts are accepted from the left as long as the token sampled at a draft's
place is the draft; the first other token takes its draft's place, and what was sampled after it is void.

That is rejection sampling (Leviathan et al. 2023, Chen et al. 2023) for a proposal that puts all its mass on
one token: the draft is accepted with the probability p that the sampler gives it, and what is emitted after
a rejection is distributed as p over the other tokens. As the place's uniform number is the one that the
request would have drawn without drafts, the tokens are not only distributed alike but are the same ones.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import numpy as np

from quire.execution.arrays import Int64Array
from quire.step import NO_TOKEN, IntArray, SchedulerOutput


@dataclasses.dataclass(slots=True, frozen=True)
class SamplingPositions:
    """The places of one step: S requests sample, at P places, request after request."""

    rows: Int64Array  # [S] rows of the step, rising
    drafts: IntArray  # [S, K] padded with NO_TOKEN
    request: Int64Array  # [P] index into `rows`
    offset: Int64Array  # [P] drafts before the place
    positions: Int64Array  # [P] absolute index of the token to choose
    tokens: Int64Array  # [P] index among the step's tokens of the one before

    @classmethod
    def of(cls, output: SchedulerOutput) -> Self:
        """Return the places of a step; there is none in a row that does not reach its last known token."""
        rows = np.flatnonzero(output.samples)
        drafts = output.draft_token_ids[rows]
        num_places = 1 + np.count_nonzero(drafts != NO_TOKEN, axis=1)
        request = np.repeat(np.arange(len(rows)), num_places)
        offset = np.arange(len(request)) - (np.cumsum(num_places) - num_places)[request]
        last = np.cumsum(output.num_tokens)[rows] - 1
        return cls(
            rows=rows,
            drafts=drafts,
            request=request,
            offset=offset,
            positions=output.num_known_tokens[rows].astype(np.int64)[request] + offset,
            tokens=(last - num_places + 1)[request] + offset,
        )

    def accept(self, token_ids: Int64Array) -> IntArray:
        """Return the tokens that each request emits, padded with NO_TOKEN: [S, 1 + K].

        A place without a token, because of an error, ends the row before it; the request finds the error
        again when it starts a step there.

        Args:
            token_ids: [P] the token sampled at each place, or NO_TOKEN.
        """
        sampled = np.full((len(self.rows), 1 + self.drafts.shape[1]), NO_TOKEN, dtype=np.int32)
        sampled[self.request, self.offset] = token_ids
        is_accepted = (sampled[:, :-1] == self.drafts) & (self.drafts != NO_TOKEN)
        num_accepted = np.logical_and.accumulate(is_accepted, axis=1).sum(axis=1)
        sampled[np.arange(sampled.shape[1]) > num_accepted[:, None]] = NO_TOKEN
        return sampled
