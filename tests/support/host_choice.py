"""A `TokenChoice` in numpy, which stands for that of a device."""

from __future__ import annotations

import numpy as np
import torch

from quire.execution.sampling.logprobs import position_logprobs
from quire.execution.sampling.selection import Filters, draw
from quire.kernels.sampling.rows import ReferenceSampling
from quire.kernels.sampling.seen_tokens import in_prompt
from quire.kernels.sampling.token_choice import LogitChanges, RowDraws, RowLogprobs, RowPenalties, TokenChoice
from quire.step import NO_TOKEN


class HostChoice(TokenChoice):
    """Stands for a device: chooses what the sampler on the host would."""

    kernels = ReferenceSampling()

    def choose(
        self,
        logits: torch.Tensor,
        draws: RowDraws | None = None,
        changes: LogitChanges | None = None,
        penalties: RowPenalties | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = logits.numpy()
        raw_ids, raw_maxima = self.kernels.largest(rows)
        if changes is not None:
            change(rows, changes)
        if penalties is not None:
            penalize(rows, penalties)
        token_ids, maxima = self.kernels.largest(rows)
        if changes is not None or penalties is not None:
            masks = None if changes is None else changes.masks
            has_mask = np.zeros(len(rows), dtype=bool) if masks is None else masks.mask_of_row.numpy() >= 0
            keeps = ~np.isfinite(raw_maxima) | (~np.isfinite(maxima) & ~has_mask)
            token_ids[keeps], maxima[keeps] = raw_ids[keeps], raw_maxima[keeps]
            rows[keeps, token_ids[keeps]] = maxima[keeps]  # the only token that is left
        if draws is not None:
            drawn = np.flatnonzero((draws.temperature.numpy() > 0) & np.isfinite(maxima))
            numbers = (draws.temperature, draws.top_k, draws.top_p, draws.min_p)
            filters = Filters(*(of_rows.numpy()[drawn] for of_rows in numbers))
            uniforms = draws.uniforms.numpy()[drawn]
            token_ids[drawn] = draw(rows, maxima[drawn], filters, uniforms, rows=drawn, kernels=self.kernels)
        token_ids[~np.isfinite(maxima)] = NO_TOKEN
        return torch.from_numpy(token_ids), torch.from_numpy(maxima)

    def logprobs(
        self, logits: torch.Tensor, chosen: torch.Tensor, num_likeliest: int, rows: torch.Tensor
    ) -> RowLogprobs:
        counts = np.full(len(rows), num_likeliest)
        found = position_logprobs(
            logits.numpy(), chosen.clamp(min=0).numpy(), counts, rows=rows.numpy(), kernels=self.kernels
        )
        return RowLogprobs(
            torch.tensor([entry.token_ids for entry in found]),
            torch.tensor([entry.logprobs for entry in found], dtype=torch.float64),
            torch.tensor([entry.ranks[0] for entry in found]),
            torch.from_numpy(self.kernels.largest(logits.numpy(), rows.numpy())[1]),
        )


def change(rows: np.ndarray, changes: LogitChanges) -> None:
    masks, edits = changes.masks, changes.edits
    if masks is not None:
        for row, mask in enumerate(masks.mask_of_row.tolist()):
            for token in range(rows.shape[1] if mask >= 0 else 0):
                if not int(masks.bitmask[mask, token // 32]) >> token % 32 & 1:
                    rows[row, token] = -np.inf
    if edits is not None:
        for row, token, added, after in edits.numbers.T.tolist():
            if row >= 0 and after in (NO_TOKEN, edits.tokens_before[int(row)].item()):
                rows[int(row), int(token)] += np.float32(added)


def penalize(rows: np.ndarray, penalties: RowPenalties) -> None:
    numbers = penalties.seen_of_row, penalties.repetition, penalties.frequency, penalties.presence
    most = in_prompt(penalties.seen.dtype)
    for row, (slot, repetition, frequency, presence) in enumerate(
        zip(*map(torch.Tensor.numpy, numbers), strict=True)
    ):
        if slot < 0:
            continue
        for token, count in enumerate(penalties.seen[slot].tolist()):
            if count:
                logit = rows[row, token]
                logit = logit / repetition if logit > 0 else logit * repetition
                logit -= frequency * np.float32(count % most)
                rows[row, token] = logit - presence * np.float32(count % most > 0)
