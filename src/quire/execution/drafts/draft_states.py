"""States of a draft model's recurrent layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from quire.kernels.attention.batch import AttentionBatch, StepStates
from quire.kernels.devices.device import array_to_device
from quire.kv.cache.state_cache import LayerStates, StateCache
from quire.step import Int64Array


class DraftStates:
    """The draft model's part of each state, and copies of those of slots, which take in drafts.

    What the target model's states go through, theirs do with it, as they are one: they are restored, forked
    and kept, and take in no draft before it is accepted.

    Args:
        layers: of each layer of the draft model, its part of all states.
        copies: a state for each slot, without checkpoints.
    """

    def __init__(self, layers: Sequence[LayerStates], copies: StateCache) -> None:
        self._layers = layers
        self._copies = copies
        self._taken_in = np.zeros(copies.num_slots, dtype=np.int64)  # tokens of each slot's state

    def followed(self, batch: AttentionBatch) -> AttentionBatch:
        """Return a step of the target model as one of the draft model, which is about to be computed."""
        assert batch.states is not None
        self._taken_in[batch.states.numbers] = batch.num_cached_tokens + batch.num_state_tokens
        return dataclasses.replace(batch, states=dataclasses.replace(batch.states, layers=self._layers))

    def begin(self, slots: Int64Array) -> Int64Array:
        """Copy the states of slots [S] for drafts to go on with; return how many tokens each has taken in."""
        places = array_to_device(slots, self._copies.states.device)
        for layer, copies in zip(self._layers, self._copies.layers, strict=True):
            for name, part in layer.items():
                copies[name][places] = part[places]
        return self._taken_in[slots]

    def of_drafts(self, slots: Int64Array) -> StepStates:
        """Return the copies for a step that computes drafts of slots [S]."""
        return StepStates(slots, self._copies.layers)
