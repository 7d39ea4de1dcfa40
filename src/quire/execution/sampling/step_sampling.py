"""The tokens of one step, chosen where the kernels compute: on a device that can, else on the host."""

from __future__ import annotations

import torch

from quire.execution.arrays import Int64Array
from quire.execution.known_tokens import KnownTokens
from quire.execution.sampling.device_penalties import DevicePenalties
from quire.execution.sampling.device_sampling import DeviceSampler, TokensInFlight
from quire.execution.sampling.sampler import Sampler, SamplerOutput
from quire.execution.sampling.table import SamplingTable
from quire.execution.sampling.token_masks import TokenMasks
from quire.execution.step_graphs import Record, StepLogits
from quire.kernels.interface import KernelSet
from quire.kernels.sampling.rows import SamplingKernels


class StepSampler:
    """Samples with the parameters in its `table`.

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
        self.table = SamplingTable(max_num_seqs, vocab_size)
        self.device: DeviceSampler | None = None
        self._host: Sampler | None = None
        if isinstance(kernels.sampling, SamplingKernels):
            self._host = Sampler(self.table, kernels.sampling)
        else:
            penalties = DevicePenalties(self.table, max_num_seqs, vocab_size, max_model_len, kernels.device)
            self.device = DeviceSampler(
                kernels.sampling,
                kernels,
                self.table,
                penalties,
                max_num_seqs=max_num_seqs,
                vocab_size=vocab_size,
                record=record,
            )

    def input_ids(self, encoded: torch.Tensor) -> torch.Tensor:
        """See `DeviceSampler.input_ids`."""
        return encoded if self.device is None else self.device.input_ids(encoded)

    def sample(
        self,
        logits: StepLogits,
        slots: Int64Array,
        positions: Int64Array,
        masks: TokenMasks | None,
        known: KnownTokens,
    ) -> TokensInFlight | SamplerOutput:
        """Choose one token per row.

        Arguments are as for `Sampler.sample`; on a device, the last tokens of rows may be known only there.
        """
        if self.device is not None:
            return self.device.sample(logits, slots, positions, masks=masks, known=known)
        assert self._host is not None
        return self._host.sample(logits.rows, slots, positions, known.token_ids, masks)
