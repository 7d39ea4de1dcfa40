"""The tokens of one step: chosen on the device, and on the host what only the host can choose."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from quire.execution.arrays import BoolArray, Int64Array
from quire.execution.device_penalties import DevicePenalties, KnownTokens
from quire.execution.device_sampling import DeviceSampler, TokensInFlight
from quire.execution.host_sampling import HostLogits, host_kernels
from quire.execution.sampler import Sampler, SamplerOutput
from quire.execution.sampling_table import SamplingTable
from quire.execution.step_graphs import Record, StepLogits
from quire.execution.token_masks import TokenMasks
from quire.kernels.devices import array_to_device
from quire.kernels.interface import KernelSet
from quire.kernels.sampling import SamplingKernels
from quire.step import IntArray


class StepSampler:
    """Samples with the parameters in its `table`.

    Which rows are the host's depends on their own requests alone, so a request's tokens do not depend on the
    others in its steps.

    Args:
        max_num_seqs: number of slots.
        vocab_size: V.
        max_model_len: maximum number of tokens of a request.
        kernels: of the model.
        record: records what the device is asked for; None: nothing is recorded.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        max_model_len: int,
        kernels: KernelSet,
        *,
        record: Record | None = None,
    ) -> None:
        self.host_kernels: SamplingKernels = host_kernels(kernels)
        self.host_logits = HostLogits()
        self._host = Sampler(max_num_seqs, vocab_size, self.host_kernels)
        self.device: DeviceSampler | None = None
        if kernels.token_choice is not None:
            penalties = DevicePenalties(self.table, max_num_seqs, vocab_size, max_model_len, kernels.device)
            self.device = DeviceSampler(
                kernels,
                self.table,
                penalties,
                max_num_seqs=max_num_seqs,
                vocab_size=vocab_size,
                record=record,
            )

    @property
    def table(self) -> SamplingTable:
        """The parameters by slot."""
        return self._host.table

    def input_ids(self, encoded: torch.Tensor) -> torch.Tensor:
        """See `DeviceSampler.input_ids`."""
        return encoded if self.device is None else self.device.input_ids(encoded)

    def is_of_host(self, slots: IntArray | Int64Array) -> BoolArray:
        """Return for which of `slots` only the host can choose, [R]."""
        if self.device is None:
            return np.ones(len(slots), dtype=np.bool_)
        return self.table.depends_on_output(slots)

    def begin(
        self,
        logits: StepLogits,
        slots: Int64Array,
        positions: Int64Array,
        masks: TokenMasks | None,
        known: KnownTokens,
    ) -> SamplingInFlight:
        """Begin to choose one token per row.

        Arguments are as for `Sampler.sample`, but `logits` are on the device, and the last tokens of rows may
        be known only there.
        """
        if self.device is None:
            return SamplingInFlight(self, logits.rows, slots, positions, masks, np.arange(len(slots)), None)
        is_of_host = self.is_of_host(slots)
        chosen = self.device.sample(logits, slots, positions, masks=masks, known=known, is_of_host=is_of_host)
        return SamplingInFlight(
            self, logits.rows, slots, positions, masks, np.flatnonzero(is_of_host), chosen
        )

    def sample_on_host(
        self,
        logits: torch.Tensor,
        slots: Int64Array,
        positions: Int64Array,
        token_ids: IntArray,
        masks: TokenMasks | None,
    ) -> SamplerOutput:
        """Fetch the logits and do what `Sampler.sample` says."""
        return self._host.sample(self.host_logits.fetch(logits), slots, positions, token_ids, masks)


@dataclasses.dataclass(slots=True, frozen=True)
class SamplingInFlight:
    """One call of `StepSampler.begin`, R rows."""

    _sampler: StepSampler
    _logits: torch.Tensor
    _slots: Int64Array
    _positions: Int64Array
    _masks: TokenMasks | None
    rows_of_host: Int64Array  # which only the host can choose for, ascending
    on_device: TokensInFlight | None  # of all rows; None: the host chooses for all

    def finish(self, token_ids: IntArray) -> SamplerOutput:
        """Wait for the device, choose on the host for its rows, and return the tokens of all.

        Args:
            token_ids: [max_num_seqs, more than the largest position] known tokens by slot.
        """
        if self.on_device is None:
            return self._sampler.sample_on_host(
                self._logits, self._slots, self._positions, token_ids, self._masks
            )
        sampled = self.on_device.sampled()
        return self._chosen_again(sampled, token_ids) if self.rows_of_host.size else sampled

    def _chosen_again(self, sampled: SamplerOutput, token_ids: IntArray) -> SamplerOutput:
        rows = self.rows_of_host
        of_host = self._sampler.sample_on_host(
            self._logits[array_to_device(rows, self._logits.device)],
            self._slots[rows],
            self._positions[rows],
            token_ids,
            None if self._masks is None else self._masks.of_rows(rows),
        )
        numbers = rows.tolist()
        sampled.token_ids[rows] = of_host.token_ids
        errors = {row: error for row, error in sampled.errors.items() if row not in set(numbers)}
        errors |= {numbers[index]: error for index, error in of_host.errors.items()}
        logprobs = {numbers[index]: found for index, found in of_host.logprobs.items()}
        return SamplerOutput(sampled.token_ids, sampled.logprobs | logprobs, errors)
