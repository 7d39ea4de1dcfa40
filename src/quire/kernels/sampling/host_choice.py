"""Choosing tokens on the host, where native kernels or numpy scan the logits.

The order of operations is the one vLLM documents: log-probabilities are of the raw distribution; then the
grammar's mask, banned words, minimum length, logit bias; then repetition, frequency and presence penalties;
then greedy choice, or temperature, min-p, top-k, top-p and a draw. A row's result depends on its own logits
and numbers only: each operation runs along single rows in a fixed order.
"""

from __future__ import annotations

import numpy as np
import torch
from typing_extensions import override

from quire.kernels.sampling.row_scans import BoolArray, Float32Array, Int64Array, RowScans
from quire.kernels.sampling.seen_tokens import in_prompt
from quire.kernels.sampling.selection import Filters, draw
from quire.kernels.sampling.token_choice import (
    LogitChanges,
    LogitEdits,
    LogitMasks,
    RowDraws,
    RowLogprobs,
    RowPenalties,
    TokenChoice,
)
from quire.step import NO_TOKEN


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
        draws: RowDraws | None = None,
        changes: LogitChanges | None = None,
        penalties: RowPenalties | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = logits.numpy()
        token_ids, maxima = self.scans.largest(rows)
        is_drawable = np.isfinite(maxima)
        if not is_drawable.all():
            token_ids[~is_drawable] = NO_TOKEN
        if changes is not None or penalties is not None:
            is_changed = change_logits(rows, changes or LogitChanges(), penalties)
            changed = np.flatnonzero(is_changed & is_drawable)
            likeliest, largest = self.scans.largest(rows, changed)
            has_one = np.isfinite(largest)
            if not has_one.all():
                likeliest[~has_one] = NO_TOKEN
                is_drawable[changed] = has_one
                # Without a mask, a row where all tokens are banned keeps its likeliest one.
                if changes is not None and changes.masks is not None:
                    has_one |= changes.masks.mask_of_row.numpy()[changed] >= 0
                changed, likeliest, largest = changed[has_one], likeliest[has_one], largest[has_one]
            token_ids[changed], maxima[changed] = likeliest, largest
        if draws is not None:
            drawn = np.flatnonzero((draws.temperature.numpy() > 0) & is_drawable)
            if drawn.size:
                token_ids[drawn] = self._draw(rows, maxima, draws, drawn)
        return torch.from_numpy(token_ids), torch.from_numpy(maxima)

    def _draw(
        self, logits: Float32Array, maxima: Float32Array, draws: RowDraws, rows: Int64Array
    ) -> Int64Array:
        filters = Filters(
            draws.temperature.numpy()[rows],
            draws.top_k.numpy()[rows],
            draws.top_p.numpy()[rows],
            draws.min_p.numpy()[rows],
        )
        uniforms = draws.uniforms.numpy()[rows]
        return draw(logits, maxima[rows], filters, uniforms, rows=rows, scans=self.scans)

    @override
    def logprobs(
        self, logits: torch.Tensor, chosen: torch.Tensor, num_likeliest: int, rows: torch.Tensor
    ) -> RowLogprobs:
        all_rows, wanted = logits.numpy(), rows.numpy()
        largest = maxima = self.scans.largest(all_rows, wanted)[1]
        is_sound = np.isfinite(maxima)
        if not is_sound.all():  # in place of such rows, others with any numbers
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
    if enough.any():
        top[enough] = head.token_ids[enough, :count]
    for index in np.flatnonzero(~enough).tolist():
        top[index] = np.argsort(-logits[rows[index]], kind="stable")[:count]
    return top


def change_logits(
    logits: Float32Array, changes: LogitChanges, penalties: RowPenalties | None = None
) -> BoolArray:
    """Change logits [R, V] in place; return which rows are changed, [R]."""
    is_changed = np.zeros(len(logits), dtype=np.bool_)
    if changes.masks is not None:
        is_changed |= _forbid(logits, changes.masks)
    if changes.edits is not None:
        is_changed[_edit(logits, changes.edits)] = True
    if penalties is not None:
        is_changed |= _penalize(logits, penalties)
    return is_changed


def _forbid(logits: Float32Array, masks: LogitMasks) -> BoolArray:
    bitmask, mask_of_row = masks.bitmask.numpy(), masks.mask_of_row.numpy()
    is_masked: BoolArray = mask_of_row >= 0
    for row in np.flatnonzero(is_masked).tolist():
        words = np.ascontiguousarray(bitmask[mask_of_row[row]], dtype="<i4")
        places = np.flatnonzero(words != 0)
        if len(places) < len(words) // 4:
            bits = np.unpackbits(words[places].view(np.uint8), bitorder="little")
            found = np.flatnonzero(bits.view(np.bool_))
            allowed = 32 * places[found // 32] + found % 32
            allowed = allowed[allowed < logits.shape[1]]
            kept = logits[row][allowed]
            logits[row].fill(-np.inf)
            logits[row][allowed] = kept
        else:
            bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=logits.shape[1])
            np.copyto(logits[row], -np.inf, where=bits == 0)
    return is_masked


def _edit(logits: Float32Array, edits: LogitEdits) -> Int64Array:
    """Return the rows of the edits."""
    numbers, before = edits.numbers.numpy(), edits.tokens_before.numpy()
    rows: Int64Array = numbers[0].astype(np.int64)
    wanted = numbers[3]
    is_made = (rows >= 0) & ((wanted == NO_TOKEN) | (wanted == before[rows]))
    if not is_made.all():
        rows, numbers = rows[is_made], numbers[:, is_made]
    token_ids, added = numbers[1].astype(np.int64), numbers[2].astype(np.float32)
    is_ban = added == -np.inf
    added[is_ban] = 0
    logits[rows, token_ids] += added
    logits[rows[is_ban], token_ids[is_ban]] = -np.inf
    return rows


def _penalize(logits: Float32Array, penalties: RowPenalties) -> BoolArray:
    """Penalize tokens that rows have seen.

    Repetition (Keskar et al. 2019) concerns tokens of prompt and output: a positive logit is divided by it,
    any other multiplied. Frequency and presence (OpenAI's formula) concern the output only: logit - count *
    frequency - (count > 0) * presence.
    """
    slots, seen = penalties.seen_of_row.numpy(), penalties.seen.numpy()
    drafts = None if penalties.drafts is None else penalties.drafts.numpy()
    numbers = (penalties.repetition, penalties.frequency, penalties.presence)
    repetition, frequency, presence = (of_rows.numpy() for of_rows in numbers)
    is_counted = in_prompt(penalties.seen.dtype) - 1  # the bits of the count
    is_penalized: BoolArray = slots >= 0
    for row in np.flatnonzero(is_penalized).tolist():
        counts = seen[slots[row]]
        if drafts is not None:
            counts = counts.copy()
            np.add.at(counts, drafts[row][drafts[row] != NO_TOKEN], 1)
        ids = np.flatnonzero(counts != 0)
        in_output = (counts[ids] & is_counted).astype(np.float32)
        found = logits[row][ids]
        found = np.where(found > 0, found / repetition[row], found * repetition[row])
        found -= frequency[row] * in_output
        found -= presence[row] * (in_output > 0)
        logits[row][ids] = found
    return is_penalized
