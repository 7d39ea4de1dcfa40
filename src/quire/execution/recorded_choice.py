"""Choosing tokens from logits that recorded steps leave at the same addresses, recorded as well.

A GPU chooses the likeliest tokens by 5 operations, and draws others by 36, each of which takes it less time
than the host takes to ask for it, as those of small steps do (`step_graphs`). They are recorded apart from
these: whether tokens are drawn depends on the requests, and other ranks choose nothing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.execution.arrays import Float64Array, Int64Array
from quire.execution.step_graphs import MAX_GRAPHS, Record
from quire.kernels.devices import copy_to_device
from quire.kernels.size_classes import wide_size_class
from quire.kernels.step_arrays import lengthened

if TYPE_CHECKING:
    from quire.kernels.interface import KernelSet

logger = logging.getLogger(__name__)

NUM_DRAW_NUMBERS = 5
"""Numbers of a row that its draw depends on; all 0: its likeliest token is taken."""

MAX_CHOICES = 2 * MAX_GRAPHS
"""Recordings that are kept, drawn and not for each recorded step; the least recently used goes first."""

Choose = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
"""Chooses tokens [R] for logits [R, V], slots [R] int64 and numbers of draws [NUM_DRAW_NUMBERS, R] float64 or
None; returns token ids and maxima as `TokenChoice.choose`."""


class RecordedChoice:
    """Chooses tokens as a function does, which is recorded for each address and size of logits.

    Args:
        choose: the function.
        record: of the device.
        kernels: that the function asks.
        max_num_seqs: number of slots; the one behind the last stands for rows that are nobody's.
    """

    def __init__(self, choose: Choose, record: Record, kernels: KernelSet, max_num_seqs: int) -> None:
        self._choose = choose
        self._record = record
        self._kernels = kernels
        self._nobody = max_num_seqs
        most_rows = wide_size_class(max_num_seqs)
        device = kernels.device
        self._slots = torch.full((most_rows,), self._nobody, dtype=torch.int64, device=device)
        self._slots_there: Int64Array = np.full(most_rows, self._nobody, dtype=np.int64)
        self._draws = torch.zeros(NUM_DRAW_NUMBERS * most_rows, dtype=torch.float64, device=device)
        self._token_ids = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._maxima = torch.zeros(most_rows, dtype=torch.float32, device=device)
        self._computed: set[tuple[int, bool]] = set()  # sizes for which there is nothing left to compile
        self._replays: OrderedDict[tuple[int, int, bool], Callable[[], None]] = OrderedDict()
        self._refused: set[bool] = set()  # whether tokens are drawn where that cannot be recorded

    def has_room(self, num_rows: int) -> bool:
        """Return whether so many rows of logits are not too many."""
        return num_rows <= len(self._slots_there)

    def choose(
        self, logits: torch.Tensor, slots: Int64Array, draws: Float64Array | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose one token for each of the first R rows.

        Args:
            logits: [R or more, V], where a recorded step always leaves them; see `has_room`.
            slots: [R] of the rows.
            draws: [NUM_DRAW_NUMBERS, R]; None: nobody draws.

        Returns:
            Token ids and maxima [R], which the next call overwrites.
        """
        self._fill(len(logits), slots, draws)
        replay = self._replay_of(logits, is_drawn=draws is not None)
        if replay is None:
            self._compute(logits, is_drawn=draws is not None)
        else:
            replay()
        return self._token_ids[: len(slots)], self._maxima[: len(slots)]

    def _fill(self, num_rows: int, slots: Int64Array, draws: Float64Array | None) -> None:
        """Copy what rows need to the places that recordings read; slots are mostly those of the last step."""
        padded = lengthened(slots, num_rows, self._nobody)
        if not np.array_equal(padded, self._slots_there[:num_rows]):
            copy_to_device(torch.from_numpy(padded), self._slots[:num_rows])
            self._slots_there[:num_rows] = padded
        if draws is not None:
            numbers = np.zeros((NUM_DRAW_NUMBERS, num_rows))
            numbers[:, : len(slots)] = draws
            copy_to_device(torch.from_numpy(numbers), self._draws_of(num_rows))

    def _draws_of(self, num_rows: int) -> torch.Tensor:
        return self._draws[: NUM_DRAW_NUMBERS * num_rows].view(NUM_DRAW_NUMBERS, num_rows)

    def _compute(self, logits: torch.Tensor, *, is_drawn: bool) -> None:
        num_rows = len(logits)
        draws = self._draws_of(num_rows) if is_drawn else None
        token_ids, maxima = self._choose(logits, self._slots[:num_rows], draws)
        self._token_ids[:num_rows] = token_ids
        self._maxima[:num_rows] = maxima
        if not self._kernels.compiles_only:
            self._computed.add((num_rows, is_drawn))

    def _replay_of(self, logits: torch.Tensor, *, is_drawn: bool) -> Callable[[], None] | None:
        """Return what replays the choice for logits at this address, recorded if need be; None: nothing."""
        key = (logits.data_ptr(), len(logits), is_drawn)
        replay = self._replays.get(key)
        if replay is not None:
            self._replays.move_to_end(key)
            return replay
        if is_drawn in self._refused or key[1:] not in self._computed:
            return None
        try:
            replay = self._record(lambda: self._compute(logits, is_drawn=is_drawn))
        except Exception:
            logger.exception("choosing tokens cannot be recorded as a graph; steps are slower without")
            self._refused.add(is_drawn)
            return None
        self._replays[key] = replay
        if len(self._replays) > MAX_CHOICES:
            self._replays.popitem(last=False)
        return replay
