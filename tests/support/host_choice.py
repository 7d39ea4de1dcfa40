"""The choice of tokens on the host: as if it were a device's, and for single rows."""

from __future__ import annotations

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
from quire.kernels.sampling.seen_tokens import SeenTokens
from quire.kernels.sampling.token_choice import LogitChanges, LogitEdits, LogitMasks, RowPenalties
from quire.sampling_params import SamplingParams


class HostChoice(host_choice.HostChoice):
    """Stands for a device: the next step may begin before the host knows its tokens."""

    is_synchronous = False

    def __init__(self) -> None:
        super().__init__(ReferenceScans())


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
        return self.sample(StepLogits(logits), slots, positions, masks, known).sampled()


def penalized(row: Any, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Any:
    """Return a row of logits after the penalties of a request."""
    seen = SeenTokens(1, len(row), 10**6, HOST)
    seen.open(0, np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32))
    numbers = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    of_row = (torch.tensor([number], dtype=torch.float32) for number in numbers)
    changed = row[None].copy()
    change_logits(changed, LogitChanges(), RowPenalties(seen.counts, torch.tensor([0]), *of_row))
    return changed[0]


def constrained(
    row: Any, params: SamplingParams, output: Sequence[int], eos_token_ids: tuple[int, ...] = ()
) -> Any:
    """Return a row of logits after the constraints of a request."""
    constraints = Constraints.of(params, eos_token_ids=eos_token_ids, vocab_size=len(row))
    assert constraints is not None
    changes = ChangesOfStep(None, 1, len(row))
    changes.constrain(0, constraints, np.array(output, dtype=np.int32), lacks_last=False)
    masks, edits = changes.masks, changes.edits
    changed = row[None].copy()
    change_logits(
        changed,
        LogitChanges(
            None if masks is None else LogitMasks(*map(torch.from_numpy, (masks.bitmask, masks.mask_of_row))),
            None if edits is None else LogitEdits(torch.from_numpy(edits), torch.tensor([-1])),
        ),
    )
    return changed[0]
