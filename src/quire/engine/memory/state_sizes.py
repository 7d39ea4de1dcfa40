"""How many states of recurrent layers an engine has, see `quire.kv.blocks.checkpoints`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from quire.errors import ConfigError
from quire.kv.blocks.checkpoints import StateSlots
from quire.kv.cache.state_layout import StateLayout

if TYPE_CHECKING:
    from quire.config import SchedulerConfig

CHECKPOINTS_PER_SEQUENCE = 4
"""States that are kept for the prefix cache for each sequence that may run, if there is memory."""

CHECKPOINT_SHARE = 0.25
"""Fraction of the memory for KV and states that checkpoints take at most."""

SEQUENCE_SHARE = 0.25
"""Fraction of all memory that the states of running sequences take at most."""

_MIN_INTERVAL, _MAX_INTERVAL = 8, 256  # blocks


def with_fitting_states(
    scheduler: SchedulerConfig, bytes_per_sequence: int, available_bytes: int
) -> SchedulerConfig:
    """Return a scheduler's configuration with as many sequences as have states within their share of memory.

    Args:
        scheduler: how many are asked for.
        bytes_per_sequence: of states, at least 1.
        available_bytes: of memory.
    """
    most = max(1, int(available_bytes * SEQUENCE_SHARE) // bytes_per_sequence)
    return dataclasses.replace(scheduler, max_num_seqs=min(scheduler.max_num_seqs, most))


@dataclasses.dataclass(frozen=True, slots=True)
class StateSizes:
    """The states of an engine: one for each sequence that may run, and the checkpoints.

    Args:
        layout: what lies where in a state.
        num_slots: sequences that run at once.
        num_checkpoints: states that are kept for the prefix cache.
        draft_layout: of the draft model's part of a state, which lies last, and of which each sequence has
            another for drafts; None: it has none.
    """

    layout: StateLayout
    num_slots: int
    num_checkpoints: int
    draft_layout: StateLayout | None = None

    @classmethod
    def of(
        cls,
        scheduler: SchedulerConfig,
        layout: StateLayout,
        free_bytes: int,
        draft_layout: StateLayout | None = None,
    ) -> StateSizes:
        """Return the states for an engine with this scheduler.

        Args:
            scheduler: says how many sequences run, and how many states there are.
            layout: with any bytes.
            free_bytes: for KV and states; may be negative.
            draft_layout: as for `StateSizes`.

        Raises:
            ConfigError: there are fewer states than sequences.
        """
        num_slots, num_states = scheduler.max_num_seqs, scheduler.num_linear_attention_blocks
        if num_states and num_states < num_slots:
            raise ConfigError(
                f"SchedulerConfig.num_linear_attention_blocks is {num_states}, but each of the {num_slots} "
                "sequences of SchedulerConfig.max_num_seqs needs one; raise it, or lower max_num_seqs"
            )
        if not (scheduler.enable_prefix_caching and scheduler.dynamic_split_fuse):
            num_checkpoints = 0  # which end chunks
        elif num_states:
            num_checkpoints = num_states - num_slots
        else:
            fitting = int(free_bytes * CHECKPOINT_SHARE) // layout.bytes_per_state
            num_checkpoints = max(0, min(CHECKPOINTS_PER_SEQUENCE * num_slots, fitting))
        return cls(layout, num_slots, num_checkpoints, draft_layout)

    @property
    def num_states(self) -> int:
        """States of both kinds."""
        return self.num_slots + self.num_checkpoints

    @property
    def num_bytes(self) -> int:
        """Bytes of all states."""
        return self.num_states * self.layout.bytes_per_state

    @property
    def draft_bytes(self) -> int:
        """Bytes of the states on which drafts are made."""
        return 0 if self.draft_layout is None else self.num_slots * self.draft_layout.bytes_per_state

    @property
    def total_bytes(self) -> int:
        """Bytes of all states, those on which drafts are made included."""
        return self.num_bytes + self.draft_bytes

    def for_scheduler(self, scheduler: SchedulerConfig, kv_bytes_per_block: int) -> StateSlots:
        """Return what the scheduler needs to know of the states.

        Args:
            scheduler: says how far apart checkpoints are.
            kv_bytes_per_block: of all layers; decides where it does not.
        """
        blocks = scheduler.cache_interval_multiplier
        if blocks is None:
            blocks = _MAX_INTERVAL
            if kv_bytes_per_block:
                ratio = -(-self.layout.bytes_per_state // kv_bytes_per_block)
                blocks = min(max(ratio, _MIN_INTERVAL), _MAX_INTERVAL)
        return StateSlots(self.num_checkpoints, blocks * scheduler.block_size)
