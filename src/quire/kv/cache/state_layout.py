"""What recurrent layers keep of a sequence, and where it lies in a state.

A *state* is what all recurrent layers of a model keep of one sequence after some number of tokens, however
many these are. It is one contiguous span of bytes, layer after layer, so that copying a state is one copy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from quire.kv.cache.page_layout import NUMBER_BYTES

_ALIGNMENT = 64  # bytes of a cache line


@dataclasses.dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a layer's state.

    Args:
        name: by which the layer finds it.
        shape: its dimensions.
        dtype: of its numbers; empty: that of the activations.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = ""


StateSpec = tuple[StatePart, ...]
"""What one layer keeps of a sequence."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedPart:
    """A part with its type, and where it begins in a state (bytes)."""

    part: StatePart
    dtype: str
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class StateLayout:
    """What lies where in a state.

    Args:
        layers: [layers of the model] the parts of each one's state; empty: it keeps none.
        bytes_per_state: a multiple of a cache line.
        num_pieces: equal parts in which a state is moved.
    """

    layers: tuple[tuple[PlacedPart, ...], ...]
    bytes_per_state: int
    num_pieces: int = 1

    @property
    def bytes_per_piece(self) -> int:
        """Bytes of each part in which a state is moved."""
        return self.bytes_per_state // self.num_pieces

    @property
    def alignment(self) -> int:
        """Bytes of which the place of a state, as its size, is a multiple."""
        return math.lcm(self.bytes_per_piece, _ALIGNMENT)

    def in_pieces(self, bytes_per_piece: int) -> StateLayout:
        """Return the layout of states that are moved in pieces of this size, at least one byte.

        A state has some bytes more then.
        """
        step = math.lcm(bytes_per_piece, _ALIGNMENT)
        num_bytes = -(-self.bytes_per_state // step) * step
        return StateLayout(self.layers, num_bytes, num_bytes // bytes_per_piece)

    def followed_by(self, other: StateLayout) -> StateLayout:
        """Return the layout of states that hold those of another model, too: its layers behind these."""
        moved = tuple(
            tuple(dataclasses.replace(part, offset=part.offset + self.bytes_per_state) for part in layer)
            for layer in other.layers
        )
        return StateLayout(self.layers + moved, self.bytes_per_state + other.bytes_per_state)

    @classmethod
    def of(cls, specs: Sequence[StateSpec | None], dtype: str) -> StateLayout:
        """Lay out the states of a model.

        Args:
            specs: what each layer keeps; None: nothing.
            dtype: of the activations.
        """
        layers = []
        end = 0
        for spec in specs:
            placed = []
            for part in spec or ():
                own = part.dtype or dtype
                placed.append(PlacedPart(part, own, end))
                end += math.prod(part.shape) * NUMBER_BYTES[own]
                end = -(-end // _ALIGNMENT) * _ALIGNMENT
            layers.append(tuple(placed))
        return cls(tuple(layers), end)
