"""Choosing tokens from logits that captured steps leave at the same addresses, captured as well.

A GPU chooses the likeliest tokens by 5 operations, draws others by 36, and masks and penalties add some to
that; each takes it less time than the host takes to ask for it, as those of small steps do (`step_graphs`).
They are captured separately: which operations there are depends on the requests, and other ranks choose
nothing.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.execution.capture_backoff import CaptureBackoff
from quire.execution.sampling.constraints import NO_EDIT, NO_MASK, RowMasks
from quire.execution.sampling.table import NO_PENALTIES
from quire.execution.step_graphs import MAX_GRAPHS
from quire.kernels.arrays import Float64Array
from quire.kernels.devices.device import array_to_device, copy_to_device
from quire.kernels.interface import Capture
from quire.kernels.sampling.token_choice import NUM_DRAW_NUMBERS, LogitMasks
from quire.kernels.size_classes import wide_size_class
from quire.step import Int64Array

if TYPE_CHECKING:
    from quire.kernels.interface import KernelSet

logger = logging.getLogger(__name__)

NUM_CAPTURED_EDITS = 256, 4096
"""Edits of logits that a capture has, most of which may be no edits."""

MAX_CHOICES = 2 * MAX_GRAPHS
"""Captures that are kept, of several kinds for each captured step; the least recently used goes first."""


@dataclasses.dataclass(slots=True, frozen=True)
class ChoiceNumbers:
    """The parameters by which tokens of R rows are chosen."""

    slots: Int64Array  # [R] where the tokens are kept
    draws: Float64Array | None = None  # [NUM_DRAW_NUMBERS, R]; None: no row draws
    penalties: Float64Array | None = None  # see `StepPenalties`; None: no row is penalized
    masks: RowMasks | None = None  # None: all tokens are allowed
    edits: Float64Array | None = None  # [NUM_EDIT_NUMBERS, E] see `LogitEdits`; None: none

    def on(self, device: torch.device) -> ChoiceTensors:
        """Return copies on a device, of the numbers that there are."""
        masks = None
        if self.masks is not None:
            bitmask, mask_of_row = self.masks.bitmask, self.masks.mask_of_row
            masks = LogitMasks(array_to_device(bitmask, device), array_to_device(mask_of_row, device))
        numbers = (
            None if part is None else array_to_device(part, device)
            for part in (self.draws, self.penalties, self.edits)
        )
        draws, penalties, edits = numbers
        return ChoiceTensors(array_to_device(self.slots, device), draws, penalties, masks, edits)


@dataclasses.dataclass(slots=True, frozen=True)
class ChoiceTensors:
    """The same on the device."""

    slots: torch.Tensor
    draws: torch.Tensor | None = None
    penalties: torch.Tensor | None = None
    masks: LogitMasks | None = None
    edits: torch.Tensor | None = None

    @property
    def kind(self) -> ChoiceKind:
        """Which operations choose the tokens."""
        return ChoiceKind(
            self.draws is not None,
            self.penalties is not None,
            self.masks is not None,
            0 if self.edits is None else self.edits.shape[1],
        )


class ChoiceKind(NamedTuple):
    """Which operations choose tokens."""

    is_drawn: bool
    is_penalized: bool
    is_masked: bool
    num_edits: int


Choose = Callable[[torch.Tensor, ChoiceTensors], tuple[torch.Tensor, torch.Tensor]]
"""Chooses tokens [R] for logits [R, V]; returns token ids and maxima as `TokenChoice.choose`."""


class CapturedChoice:
    """Chooses tokens as a function does, which is captured for each address, size and kind.

    Args:
        choose: the function.
        capture: of the device.
        kernels: that the function asks.
        max_num_seqs: number of slots; the one after the last is that of padding rows.
        num_words: of a row of masks.
    """

    def __init__(
        self, choose: Choose, capture: Capture, kernels: KernelSet, *, max_num_seqs: int, num_words: int
    ) -> None:
        self._choose = choose
        self._capture = capture
        self._kernels = kernels
        most_rows = wide_size_class(max_num_seqs)
        device = kernels.device
        self._slots = _PaddedNumbers([max_num_seqs], most_rows, torch.int64, device)
        self._draws = _PaddedNumbers([0.0] * NUM_DRAW_NUMBERS, most_rows, torch.float64, device)
        self._penalties = _PaddedNumbers(NO_PENALTIES, most_rows, torch.float64, device)
        self._edits = _PaddedNumbers(NO_EDIT, NUM_CAPTURED_EDITS[-1], torch.float64, device)
        self._mask_of_row = _PaddedNumbers([NO_MASK], most_rows, torch.int64, device)
        self._bitmask = torch.zeros((most_rows, num_words), dtype=torch.int32, device=device)
        self._token_ids = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._maxima = torch.zeros(most_rows, dtype=torch.float32, device=device)
        self._computed: set[tuple[int, ChoiceKind]] = set()  # for which there is nothing left to compile
        self._replays: OrderedDict[tuple[int, int, ChoiceKind], Callable[[], None]] = OrderedDict()
        self._backoffs: defaultdict[ChoiceKind, CaptureBackoff] = defaultdict(CaptureBackoff)

    def has_room(self, logits: torch.Tensor, numbers: ChoiceNumbers) -> bool:
        """Return whether logits, masks and edits fit a capture."""
        num_masks = 0 if numbers.masks is None else len(numbers.masks.bitmask)
        num_edits = 0 if numbers.edits is None else numbers.edits.shape[1]
        return max(len(logits), num_masks) <= len(self._token_ids) and num_edits <= NUM_CAPTURED_EDITS[-1]

    def choose(self, logits: torch.Tensor, numbers: ChoiceNumbers) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose one token for each of the first R rows.

        Args:
            logits: [R or more, V], where a captured step always leaves them; see `has_room`.
            numbers: of R rows.

        Returns:
            Token ids and maxima [R], which the next call overwrites.
        """
        tensors = self._filled(len(logits), numbers)
        replay = self._replay_of(logits, tensors)
        if replay is None:
            self._compute(logits, tensors)
        else:
            replay()
        num_rows = len(numbers.slots)
        return self._token_ids[:num_rows], self._maxima[:num_rows]

    def _filled(self, num_rows: int, numbers: ChoiceNumbers) -> ChoiceTensors:
        """Copy the rows' parameters to the addresses that captures read; return these tensors."""
        draws, penalties, edits = numbers.draws, numbers.penalties, numbers.edits
        masks = None
        if numbers.masks is not None:
            bitmask = numbers.masks.bitmask
            copy_to_device(torch.from_numpy(bitmask), self._bitmask[: len(bitmask)])
            [mask_of_row] = self._mask_of_row.filled(numbers.masks.mask_of_row[None], num_rows)
            masks = LogitMasks(self._bitmask, mask_of_row)
        return ChoiceTensors(
            self._slots.filled(numbers.slots[None], num_rows)[0],
            None if draws is None else self._draws.filled(draws, num_rows),
            None if penalties is None else self._penalties.filled(penalties, num_rows),
            masks,
            None if edits is None else self._edits.filled(edits, _num_captured(edits.shape[1])),
        )

    def _compute(self, logits: torch.Tensor, tensors: ChoiceTensors) -> None:
        num_rows = len(logits)
        self._token_ids[:num_rows], self._maxima[:num_rows] = self._choose(logits, tensors)
        if not self._kernels.compiles_only:
            self._computed.add((num_rows, tensors.kind))

    def _replay_of(self, logits: torch.Tensor, tensors: ChoiceTensors) -> Callable[[], None] | None:
        """Return what replays the choice for logits at this address, captured if need be; None: nothing."""
        kind = tensors.kind
        may_capture = self._backoffs[kind].allows_attempt()
        key = (logits.data_ptr(), len(logits), kind)
        replay = self._replays.get(key)
        if replay is not None:
            self._replays.move_to_end(key)
            return replay
        if not may_capture or key[1:] not in self._computed:
            return None
        try:
            replay = self._capture(lambda: self._compute(logits, tensors))
        except Exception:
            logger.exception("choosing tokens cannot be captured as a graph; steps are slower without")
            self._backoffs[kind].begin()
            return None
        self._replays[key] = replay
        if len(self._replays) > MAX_CHOICES:
            self._replays.popitem(last=False)
        return replay


def _num_captured(num_edits: int) -> int:
    """Return the captured number of edits that `num_edits` is padded to."""
    return next(size for size in NUM_CAPTURED_EDITS if size >= num_edits)


class _PaddedNumbers:
    """K numbers for each of up to `most_rows` rows, at the same address for equal numbers of rows.

    Args:
        padding: [K] the numbers of padding rows.
    """

    def __init__(
        self, padding: Sequence[float], most_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._padding = np.array(padding)[:, None]
        self._on_device = torch.zeros(len(padding) * most_rows, dtype=dtype, device=device)
        self._there: npt.NDArray[Any] = np.empty((len(padding), 0))

    def filled(self, numbers: Float64Array | Int64Array, num_rows: int) -> torch.Tensor:
        """Return numbers [K, R] on the device, followed by padding rows: [K, num_rows].

        They are copied only where they differ from those of the last call.
        """
        padded: npt.NDArray[Any] = np.empty((len(self._padding), num_rows), dtype=numbers.dtype)
        padded[:, : numbers.shape[1]] = numbers
        padded[:, numbers.shape[1] :] = self._padding
        place = self._on_device[: padded.size].view(padded.shape)
        if not np.array_equal(padded, self._there):
            copy_to_device(torch.from_numpy(padded), place)
            self._there = padded
        return place
