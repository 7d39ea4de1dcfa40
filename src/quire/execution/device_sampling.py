"""Choosing tokens on the device, where the next step finds them: nobody has to wait for them in between."""

from __future__ import annotations

import threading

import numpy as np
import torch

from quire.execution.arrays import Float32Array, Int64Array
from quire.execution.rng import uniforms
from quire.execution.sampling_table import SamplingTable
from quire.kernels.devices import HostCopy, to_device
from quire.kernels.token_choice import RowDraws, TokenChoice

_PLACEHOLDER = 0
_NO_SLOT = -1


class TokensInFlight:
    """The tokens that a device chooses for the rows of one call, and the largest logit of each row.

    Whoever asks is told the same: either what they are, or that the device has failed.
    """

    def __init__(self, token_ids: torch.Tensor, maxima: torch.Tensor) -> None:
        self._copies = HostCopy(token_ids), HostCopy(maxima)
        self._lock = threading.Lock()
        self._outcome: tuple[Int64Array, Float32Array] | Exception | None = None

    @property
    def have_arrived(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._outcome is not None or all(copy.has_arrived for copy in self._copies)

    def wait(self) -> tuple[Int64Array, Float32Array]:
        """Return (token ids, maxima) as soon as the host has them, see `TokenChoice.choose`.

        Raises:
            Exception: whatever the device has failed with.
        """
        with self._lock:
            if self._outcome is None:
                try:
                    token_ids, maxima = (copy.wait().numpy() for copy in self._copies)
                    self._outcome = token_ids, maxima
                except Exception as error:
                    self._outcome = error
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class DeviceSampler:
    """Chooses tokens with the parameters in `table`, and keeps the last one of each slot on the device.

    Args:
        choice: the kernels that choose.
        table: the parameters by slot; only temperature, top-k, top-p, min-p and seed are read.
        max_num_seqs: number of slots.
        device: of the logits.
    """

    def __init__(
        self, choice: TokenChoice, table: SamplingTable, max_num_seqs: int, device: torch.device
    ) -> None:
        self._choice = choice
        self._table = table
        self._last = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def sample(self, logits: torch.Tensor, slots: Int64Array, positions: Int64Array) -> TokensInFlight:
        """Choose one token per row.

        Args:
            logits: [R, V] float32 on the device.
            slots: [R] the slot of each row.
            positions: [R] absolute index of the token to choose.
        """
        token_ids, maxima = self._choice.choose(logits, self._draws(slots, positions))
        of_slots = to_device(torch.from_numpy(slots), self._last.device)
        self._last.index_copy_(0, of_slots, token_ids.clamp(min=_PLACEHOLDER))
        return TokensInFlight(token_ids, maxima)

    def encoded_ids(self, known: Int64Array, last_of: Int64Array) -> Int64Array:
        """Return what `input_ids` makes token ids of, [T].

        Args:
            known: [T] token ids; any number where the host does not know the token yet.
            last_of: [T] the slot whose last token it is there, -1 elsewhere.
        """
        return np.where(last_of == _NO_SLOT, known, -1 - last_of)

    def input_ids(self, encoded: torch.Tensor) -> torch.Tensor:
        """Return the token ids of a step, [T] int64 on the device, of `encoded_ids` on the device."""
        return torch.where(encoded < 0, self._last[(-1 - encoded).clamp(min=0)], encoded)

    def _draws(self, slots: Int64Array, positions: Int64Array) -> RowDraws | None:
        is_random = self._table.is_random(slots)
        if not is_random.any():
            return None
        filters = self._table.filters(slots)
        numbers = np.stack(
            [
                filters.temperature,
                filters.top_k,
                filters.top_p,
                filters.min_p,
                uniforms(self._table.seeds(slots), positions),
            ]
        )
        temperature, top_k, top_p, min_p, drawn = to_device(torch.from_numpy(numbers), self._last.device)
        return RowDraws(temperature, top_k.long(), top_p, min_p, drawn)
