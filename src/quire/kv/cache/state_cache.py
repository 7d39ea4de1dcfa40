"""The memory of the states of recurrent layers, see `quire.kv.cache.state_layout`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Self

import numpy as np
import torch

from quire.kernels.devices.device import array_to_device
from quire.kv.cache.page_layout import NUMBER_BYTES
from quire.kv.cache.page_memory import allocate
from quire.kv.cache.state_layout import PlacedPart, StateLayout
from quire.step import IntArray

LayerStates = Mapping[str, torch.Tensor]
"""One layer's parts of all states, by name: [states, *shape] each. Empty: the layer keeps none."""


class StateCache:
    """States one after the other: those that running sequences work on, by slot, and then checkpoints.

    The memory is not initialized: a sequence begins with zeros whatever its state holds.

    Attributes:
        num_slots: as given.
        layers: each layer's parts of all states.
        states: all of them as they lie in memory, [states, bytes].
        num_pieces: of a state, see `StateLayout`.
        tensor: the pieces of all checkpoints, one after the other, [pieces, bytes].

    Args:
        layout: what lies where in a state.
        memory: bytes of all states, [N].
        num_slots: sequences that run at once; the other states are checkpoints.
    """

    def __init__(self, layout: StateLayout, memory: torch.Tensor, *, num_slots: int) -> None:
        self.num_slots = num_slots
        self.states = memory.view(-1, layout.bytes_per_state)
        self.num_pieces = layout.num_pieces
        self.tensor = self.states[num_slots:].view(-1, layout.bytes_per_piece)
        self.layers: list[LayerStates] = [
            {placed.part.name: self._part(placed) for placed in layer} for layer in layout.layers
        ]

    @classmethod
    def on_device(cls, layout: StateLayout, device: torch.device, *, num_slots: int, num_states: int) -> Self:
        """Return states, of which the first `num_slots` are of slots, in memory of their own."""
        num_bytes = num_states * layout.bytes_per_state
        return cls(layout, allocate(num_bytes, device)[:num_bytes], num_slots=num_slots)

    def _part(self, placed: PlacedPart) -> torch.Tensor:
        shape = placed.part.shape
        num_bytes = math.prod(shape) * NUMBER_BYTES[placed.dtype]
        span = self.states[:, placed.offset : placed.offset + num_bytes]
        return span.view(getattr(torch, placed.dtype)).view(len(span), *shape)

    def restore(self, copies: IntArray) -> None:
        """Copy checkpoints to slots: (checkpoint, slot), [N, 2]."""
        self.copy(copies + np.array([self.num_slots, 0], np.int32))

    def save(self, copies: IntArray) -> None:
        """Copy the states of slots to checkpoints: (slot, checkpoint), [N, 2]."""
        self.copy(copies + np.array([0, self.num_slots], np.int32))

    def fork(self, copies: IntArray) -> None:
        """Copy states of slots to other slots, each as it was before: (from, to), [N, 2]."""
        self.copy(copies, at_once=True)

    def copy(self, copies: IntArray, *, at_once: bool = False) -> None:
        """Copy states by their numbers here: (from, to), [N, 2].

        Args:
            copies: none of them is source and target, unless it is `at_once`.
            at_once: copies each as it was before, which takes memory; otherwise one goes after the other.
        """
        if at_once and len(copies):
            sources, targets = array_to_device(copies.astype(np.int64), self.states.device).unbind(1)
            self.states[targets] = self.states[sources]
            return
        for source, target in copies.tolist():
            self.states[target] = self.states[source]
