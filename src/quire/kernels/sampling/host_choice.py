"""Choosing tokens on the host, where native kernels or numpy scan the logits.

The order of operations is the one vLLM documents: log-probabilities are of the raw distribution; then the
grammar's mask, banned words, minimum length, logit bias; then repetition, frequency and presence penalties;
then greedy choice, or temperature, min-p, top-k, top-p and a draw. A row's result depends on its own logits
and numbers only: each operation runs along single rows in a fixed order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from typing_extensions import override

from quire.kernels.arrays import Float32Array
from quire.kernels.sampling.row_scans import RowScans
from quire.kernels.sampling.selection import draw
from quire.kernels.sampling.token_choice import (
    Array,
    Filters,
    LogitChanges,
    LogitEdits,
    LogitMasks,
    RowDraws,
    RowLogprobs,
    RowPenalties,
    TokenChoice,
)
from quire.step import NO_TOKEN, BoolArray, Int64Array


class HostChoice(TokenChoice):
    """Chooses from logits in the host's memory, and returns when it has chosen.

    Args:
        scans: of the rows of logits.
    """

    is_synchronous = True

    def __init__(self, scans: RowScans) -> None:
        self.scans = scans

    @override
    def choose(
        self,
        logits: torch.Tensor,
        draws: RowDraws[Array] | None = None,
        changes: LogitChanges[Array] | None = None,
        penalties: RowPenalties[Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = logits.numpy()
        token_ids, maxima = self.scans.largest(rows)
        is_drawable = np.isfinite(maxima)
        unsound = (~is_drawable).nonzero()[0]
        if unsound.size:
            token_ids[unsound] = NO_TOKEN
        if changes is not None or penalties is not None:
            is_changed = change_logits(rows, changes, penalties)
            changed = (is_changed & is_drawable).nonzero()[0]
            likeliest, largest = self.scans.largest(rows, None if len(changed) == len(rows) else changed)
            has_none = ~np.isfinite(largest)
            if np.count_nonzero(has_none):
                likeliest[has_none] = NO_TOKEN
                is_drawable[changed] = ~has_none
                # Without a mask, a row where all tokens are banned keeps its likeliest one.
                if changes is not None and changes.masks is not None:
                    has_none &= changes.masks.mask_of_row[changed] < 0
                changed, likeliest, largest = changed[~has_none], likeliest[~has_none], largest[~has_none]
            token_ids[changed], maxima[changed] = likeliest, largest
        if draws is not None:
            drawn = ((draws.temperature > 0) & is_drawable).nonzero()[0]
            if drawn.size:
                token_ids[drawn] = self._draw(rows, maxima, draws, drawn)
        return torch.from_numpy(token_ids), torch.from_numpy(maxima)

    def _draw(
        self, logits: Float32Array, maxima: Float32Array, draws: RowDraws[Array], rows: Int64Array
    ) -> Int64Array:
        numbers = draws.temperature, draws.top_k, draws.top_p, draws.min_p
        filters = Filters(*(of_rows[rows] for of_rows in numbers))
        return draw(logits, maxima[rows], filters, draws.uniforms[rows], rows=rows, scans=self.scans)

    @override
    def logprobs(
        self, logits: torch.Tensor, chosen: torch.Tensor, num_likeliest: int, rows: torch.Tensor
    ) -> RowLogprobs:
        all_rows, wanted = logits.numpy(), rows.numpy()
        largest = maxima = self.scans.largest(all_rows, wanted)[1]
        is_sound = np.isfinite(maxima)
        if np.count_nonzero(is_sound) < len(wanted):  # in place of such rows, others with any numbers
            all_rows, wanted = all_rows[wanted], np.arange(len(wanted))
            all_rows[~is_sound] = 0
            largest = np.where(is_sound, maxima, np.float32(0))
        tokens = np.maximum(chosen.numpy(), 0)
        log_mass = largest + np.log(self.scans.sum_exp(all_rows, largest, np.ones(len(wanted)), wanted))
        token_ids = tokens[:, None]
        if num_likeliest:
            top = top_tokens(all_rows, num_likeliest, rows=wanted, scans=self.scans)
            token_ids = np.concatenate((token_ids, top), axis=1)
        logprobs = all_rows[wanted[:, None], token_ids] - log_mass[:, None]
        ranks = self.scans.ranks(all_rows, tokens, wanted)
        return RowLogprobs(*map(torch.from_numpy, (token_ids, logprobs, ranks, maxima)))


def top_tokens(logits: Float32Array, count: int, *, rows: Int64Array, scans: RowScans) -> Int64Array:
    """Return the ids of the `count` (1 to 128) likeliest tokens of each row, in order: [S, min(count, V)]."""
    count = min(count, logits.shape[1])
    head = scans.likeliest(logits, rows)
    top = np.empty((len(rows), count), dtype=np.int64)
    enough = head.count >= count
    if np.count_nonzero(enough):
        top[enough] = head.token_ids[enough, :count]
    for index in np.flatnonzero(~enough).tolist():
        top[index] = np.argsort(-logits[rows[index]], kind="stable")[:count]
    return top


def change_logits(
    logits: Float32Array, changes: LogitChanges[Array] | None, penalties: RowPenalties[Any] | None = None
) -> BoolArray:
    """Change logits [R, V] in place; return which rows are changed, [R]."""
    is_changed = np.zeros(len(logits), dtype=np.bool_)
    if changes is not None:
        if changes.masks is not None:
            is_changed |= _forbid(logits, changes.masks)
        assert not isinstance(changes.edits, LogitEdits)
        with np.errstate(invalid="ignore"):  # a ban of what is infinite, in a row that has no token
            for row, token_ids, added, _ in changes.edits:
                logits[row][token_ids] += added  # of several for one token, the last counts: a ban
                is_changed[row] = True
    if penalties is not None:
        is_changed |= _penalize(logits, penalties)
    return is_changed


def _forbid(logits: Float32Array, masks: LogitMasks[Array]) -> BoolArray:
    is_masked: BoolArray = masks.mask_of_row >= 0
    for row in is_masked.nonzero()[0].tolist():
        of_row, mask = logits[row], masks.mask_of_row[row]
        allowed = None if masks.ids is None else masks.ids[mask]
        if allowed is None:
            words = np.ascontiguousarray(masks.bitmask[mask], dtype="<i4")
            places = np.flatnonzero(words != 0)
            if len(places) >= len(words) // 4:
                bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=len(of_row))
                np.copyto(of_row, -np.inf, where=bits == 0)
                continue
            bits = np.unpackbits(words[places].view(np.uint8), bitorder="little")
            found = np.flatnonzero(bits.view(np.bool_))
            allowed = 32 * places[found // 32] + found % 32
            allowed = allowed[allowed < len(of_row)]
        kept = of_row[allowed]
        of_row.fill(-np.inf)
        of_row[allowed] = kept
    return is_masked


def _penalize(logits: Float32Array, penalties: RowPenalties[Any]) -> BoolArray:
    """Penalize tokens that rows have seen.

    Repetition (Keskar et al. 2019) concerns tokens of prompt and output: a positive logit is divided by it,
    any other multiplied. Frequency and presence (OpenAI's formula) concern the output only: logit - count *
    frequency - (count > 0) * presence.
    """
    numbers = penalties.seen_of_row, penalties.repetition, penalties.frequency, penalties.presence
    rows = zip(*(of_rows.tolist() for of_rows in numbers), strict=True)
    is_penalized: BoolArray = penalties.seen_of_row >= 0
    for row, (slot, repetition, frequency, presence) in enumerate(rows):
        if slot < 0:
            continue
        seen = penalties.seen[slot]
        num_ids, drafted = len(seen.ids), []
        if penalties.drafts is not None:
            drafted = [token_id for token_id in penalties.drafts[row].tolist() if token_id != NO_TOKEN]
            for token_id in drafted:
                seen.add(token_id)
        ids, in_output = seen.ids, seen.times
        changed = logits[row][ids]
        if repetition != 1:
            found, changed = changed, changed * repetition
            np.divide(found, repetition, out=changed, where=found > 0)
        if frequency:
            changed -= frequency * in_output
        if presence:
            changed -= presence * np.minimum(in_output, 1)
        logits[row][ids] = changed
        if drafted:
            seen.take_back(drafted, num_ids)
    return is_penalized
