"""The choice of tokens on the host: as if it were a device's, and for single rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire.execution.known_tokens import KnownTokens
from quire.execution.sampling.constraints import ChangesOfStep, Constraints
from quire.execution.sampling.sampler import Sampler
from quire.execution.sampling.tokens_in_flight import SamplerOutput
from quire.execution.step_graphs import StepLogits
from quire.kernels.devices.device import HOST
from quire.kernels.sampling import host_choice
from quire.kernels.sampling.host_choice import change_logits
from quire.kernels.sampling.row_scans import ReferenceScans, RowScans
from quire.kernels.sampling.seen_tokens import SeenIds, in_prompt
from quire.kernels.sampling.token_choice import LogitChanges, LogitEdits, RowEdits, RowPenalties
from quire.sampling_params import SamplingParams
from quire.step import NO_TOKEN


def of_arrays(parts: Any) -> Any:
    """Return parts of a choice as arrays."""
    tensors = {field.name: getattr(parts, field.name) for field in dataclasses.fields(parts)}
    return dataclasses.replace(
        parts,
        **{name: part.numpy() for name, part in tensors.items() if isinstance(part, torch.Tensor)},
    )


def row_edits(edits: LogitEdits) -> list[RowEdits]:
    """Return the edits that are made, one by one."""
    before = edits.tokens_before.tolist()
    return [
        RowEdits(int(row), np.array([int(token_id)]), added)
        for row, token_id, added, after in edits.numbers.T.tolist()
        if row >= 0 and after in (NO_TOKEN, before[int(row)])
    ]


def seen_ids(counts: Any) -> SeenIds:
    """Return what a row of `SeenTokens.counts` says."""
    ids = counts.nonzero()[0]
    times = counts[ids] & (in_prompt(torch.from_numpy(counts).dtype) - 1)
    return SeenIds(ids, np.repeat(ids, times))


class HostChoice(host_choice.HostChoice):
    """Stands for a device: the next step may begin before the host knows its tokens."""

    is_synchronous = False

    def __init__(self) -> None:
        super().__init__(ReferenceScans())

    def choose(self, logits, draws=None, changes=None, penalties=None):  # type: ignore[no-untyped-def]
        if changes is not None:
            masks = None if changes.masks is None else of_arrays(changes.masks)
            edits = row_edits(changes.edits) if isinstance(changes.edits, LogitEdits) else ()
            changes = LogitChanges(masks, edits)
        if penalties is not None:
            seen = {
                slot: seen_ids(penalties.seen[slot].numpy())
                for slot in penalties.seen_of_row.tolist()
                if slot >= 0
            }
            penalties = dataclasses.replace(of_arrays(penalties), seen=seen)
        return super().choose(logits, None if draws is None else of_arrays(draws), changes, penalties)


class HostSampler(Sampler):
    """Samples on the host from all that is known."""

    def __init__(self, num_slots: int, vocab_size: int, scans: RowScans) -> None:
        class Kernels:
            sampling = host_choice.HostChoice(scans)
            device = HOST

        kernels: Any = Kernels()
        super().__init__(num_slots, vocab_size, 1000, kernels)
        self._num_calls = 0

    def sample_known(
        self, logits: torch.Tensor, slots: Any, positions: Any, token_ids: Any, masks: Any = None
    ) -> SamplerOutput:
        """Choose tokens after others [slots, any], which may be written anew for each call."""
        self._num_calls += 1
        written = np.full(len(slots), self._num_calls)
        known = KnownTokens(token_ids, written, np.zeros(len(slots), dtype=np.bool_))
        return self.sample(StepLogits(logits), slots, positions, masks, lambda *_: known).sampled()


def penalized(row: Any, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Any:
    """Return a row of logits after the penalties of a request."""
    seen = [SeenIds(np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32))]
    numbers = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    of_row = (np.array([number], dtype=np.float32) for number in numbers)
    changed = row[None].copy()
    change_logits(changed, LogitChanges(), RowPenalties(seen, np.array([0]), *of_row))
    return changed[0]


def constrained(
    row: Any, params: SamplingParams, output: Sequence[int], eos_token_ids: tuple[int, ...] = ()
) -> Any:
    """Return a row of logits after the constraints of a request."""
    constraints = Constraints.of(params, eos_token_ids=eos_token_ids, vocab_size=len(row))
    assert constraints is not None
    changes = ChangesOfStep(None, 1, len(row))
    changes.constrain(0, constraints, np.array(output, dtype=np.int32), lacks_last=False)
    changed = row[None].copy()
    change_logits(changed, LogitChanges(changes.masks, changes.row_edits))
    return changed[0]
