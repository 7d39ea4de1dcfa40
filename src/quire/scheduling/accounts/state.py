"""Where every request is: in a slot, or waiting."""

from __future__ import annotations

import dataclasses

from quire.kv.blocks.block_pool import BlockPool
from quire.kv.blocks.manager import KVCacheManager
from quire.request import Request
from quire.scheduling.accounts.beam_groups import BeamGroups
from quire.scheduling.accounts.running_slots import RunningSlots
from quire.scheduling.accounts.waiting import WaitingRequests


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerState:
    """The running slots, the waiting requests and the KV blocks."""

    running: RunningSlots
    beams: BeamGroups
    waiting: WaitingRequests
    kv: KVCacheManager

    @property
    def pool(self) -> BlockPool:
        """The block pool."""
        return self.kv.pool

    def find(self, request_id: str) -> Request | None:
        """Return a request that waits or runs, or None."""
        slot = self.running.slot_of(request_id)
        return self.waiting.get(request_id) if slot is None else self.running.request_at(slot)

    def request_ids(self) -> list[str]:
        """Return the ids of all requests, running ones in the order of service first."""
        slots = self.running.in_order().tolist()
        leaders = [slot for slot in slots if (group := self.beams.at(slot)) is None or group.slots[0] == slot]
        running_ids = [self.running.request_at(slot).request_id for slot in leaders]
        return running_ids + [request.request_id for request in self.waiting]

    def request_counts(self) -> tuple[int, int]:
        """Return (running, waiting); a beam search counts once."""
        num_beams = sum(len(group.slots) - 1 for group in self.beams)
        return len(self.running) - num_beams, len(self.waiting)
