"""The prompt blocks that each step completes, derived from the plans, for KV connectors to save."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from quire.kv.blocks.block_hash import BlockKey, SequenceKeys
from quire.step import IntArray, SchedulerOutput

BlockIds = tuple[int, ...]
"""The numbers of one block in all cache groups."""


@dataclasses.dataclass(slots=True, frozen=True)
class Save:
    """Blocks of one prompt that are complete after a step, each reported once for each time the request runs.

    They are full, but for one that the keys end with. The first report also has those that were complete
    before: cached or loaded ones. Each has its number in each cache group, `NULL_BLOCK` if it was before the
    group's window when the request began to run. `first_block` is the place of the first one in the prompt.
    The step has read the `trusted_block_ids`, those of the first group from the start of the prompt, of the
    last one perhaps a part, and computed the others.
    """

    request_id: str
    first_block: int
    blocks: list[tuple[BlockKey, BlockIds]]
    trusted_block_ids: list[int]


@dataclasses.dataclass(slots=True)
class _Table:
    slot: int
    block_ids: list[BlockIds]
    keys: SequenceKeys
    num_reported: int = 0  # leading blocks


class PromptBlocks:
    """Follows the block tables of requests until their prompts are computed.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables: dict[str, _Table] = {}
        self._by_slot: dict[int, _Table] = {}

    def completed_by(self, plan: SchedulerOutput, keys: Mapping[str, SequenceKeys]) -> list[Save]:
        """Return what a step makes full; `keys` holds those of the prompts to follow, by request id."""
        for request_id in (*plan.preempted_req_ids, *plan.finished_req_ids):
            self.forget(request_id)
        for new in plan.scheduled_new_reqs:
            self._open(new.request_id, new.slot, new.block_ids, keys)
        for resumed in plan.scheduled_cached_reqs.resumed:
            self._open(resumed.request_id, resumed.slot, resumed.block_ids, keys)
        if not self._tables:
            return []
        self._take_new_blocks(plan)
        return self._complete_blocks(plan)

    def forget(self, request_id: str) -> None:
        """Stop following a request."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            del self._by_slot[table.slot]

    def _open(
        self, request_id: str, slot: int, block_ids: IntArray, keys: Mapping[str, SequenceKeys]
    ) -> None:
        self.forget(request_id)
        if keys.get(request_id):
            table = _Table(slot, by_block(block_ids), keys[request_id])
            self._tables[request_id] = self._by_slot[slot] = table

    def _take_new_blocks(self, plan: SchedulerOutput) -> None:
        changed = plan.scheduled_cached_reqs
        rows = (changed.slots.tolist(), changed.block_index.tolist(), by_block(changed.block_ids))
        for slot, index, block_ids in zip(*rows, strict=True):
            table = self._by_slot.get(slot)
            if table is not None:
                table.block_ids[index : index + 1] = [block_ids]

    def _complete_blocks(self, plan: SchedulerOutput) -> list[Save]:
        saves = []
        rows = (plan.request_ids, plan.num_computed_tokens.tolist(), plan.num_tokens.tolist())
        for request_id, num_computed, num_tokens in zip(*rows, strict=True):
            table = self._tables.get(request_id)
            if table is None:
                continue
            num_complete = min(len(table.keys), (num_computed + num_tokens) // self._block_size)
            if num_computed + num_tokens >= table.keys.num_tokens:
                num_complete = len(table.keys)
            new = range(table.num_reported, num_complete)
            blocks = [(table.keys[index], table.block_ids[index]) for index in new]
            num_read = -(-num_computed // self._block_size)
            trusted = [ids[0] for ids in table.block_ids[:num_read]]
            saves.append(Save(request_id, new.start, blocks, trusted))
            table.num_reported = num_complete
            if num_complete == len(table.keys):
                self.forget(request_id)
        return saves


def by_block(block_ids: IntArray) -> list[BlockIds]:
    """Return blocks [G, blocks] one by one."""
    return list(zip(*block_ids.tolist(), strict=True))
