"""Drafts copied from earlier in the prompt or the output: prompt lookup.

Source: Saxena, "Prompt Lookup Decoding" (2023); Yang et al., "Inference with Reference" (2023). Useful where
the output repeats its input: editing, extraction, retrieval, code.
"""

from __future__ import annotations

import numpy as np

from quire.execution.drafts.proposer import Proposer, RowsToContinue
from quire.step import NO_TOKEN, IntArray


class NgramProposer(Proposer):
    """Finds an earlier occurrence of the last tokens, and proposes what followed them there.

    It is the most recent occurrence of the longest suffix (at most `max_n` tokens) that occurs earlier. A
    copy that reaches the end of the known tokens runs on into itself, as in LZ77 (Ziv and Lempel 1977), so
    that a loop yields the full number of drafts.

    Args:
        min_n: shortest suffix to look for, at least 1.
        max_n: longest, at least `min_n`.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._max_n = max_n

    def propose(self, rows: RowsToContinue, num_drafts: int) -> IntArray:
        """Return tokens that may follow in each row, padded with NO_TOKEN: [S, num_drafts]."""
        drafts = np.full((len(rows.slots), num_drafts), NO_TOKEN, dtype=np.int32)
        for row, (slot, num_tokens, count) in enumerate(
            zip(rows.slots.tolist(), rows.num_tokens.tolist(), rows.max_drafts.tolist(), strict=True)
        ):
            token_ids = rows.token_ids[slot, :num_tokens]
            start = self._newest_continuation(token_ids)
            if start is not None:
                source = start + np.arange(count) % (num_tokens - start)
                drafts[row, :count] = token_ids[source]
        return drafts

    def _newest_continuation(self, token_ids: IntArray) -> int | None:
        """Return the index after the newest earlier occurrence of the longest suffix, None without one."""
        last = len(token_ids) - 1
        ends = np.flatnonzero(token_ids[:last] == token_ids[last])
        found = None
        for length in range(1, self._max_n + 1):
            if not ends.size:
                break
            if length >= self._min_n:
                found = int(ends[-1]) + 1
            ends = ends[ends >= length]
            ends = ends[token_ids[ends - length] == token_ids[last - length]]
        return found
