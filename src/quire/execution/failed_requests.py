"""Which requests of a step have invalid KV, so that none of it is stored outside of the cache."""

from __future__ import annotations

from collections.abc import Callable, Container

from quire.step import IntArray, SchedulerOutput


class FailedRequests:
    """Remembers requests from the step that failed them until the scheduler takes them out of their slots.

    Steps that were planned before the failure was known go on computing them.

    Args:
        block_size: tokens per KV block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._failed: set[str] = set()

    def begin(self, output: SchedulerOutput) -> None:
        """Forget the requests that have left their slots, also if they are back in one."""
        if self._failed:
            self._failed.difference_update(output.finished_req_ids, output.preempted_req_ids)
            self._failed.difference_update(new.request_id for new in output.scheduled_new_reqs)
            self._failed.difference_update(back.request_id for back in output.scheduled_cached_reqs.resumed)

    def end(
        self, output: SchedulerOutput, errors: Container[str], block_table: Callable[[int], IntArray]
    ) -> frozenset[str]:
        """Return the requests of a computed step whose KV is invalid.

        They have failed, in this step or before, or read what such a request has written in this step.

        Args:
            output: the step; a row reads only what its own or an earlier row writes.
            errors: the requests that failed in it.
            block_table: returns the blocks of a slot, [blocks].
        """
        if not errors and not self._failed:
            return frozenset()
        self._failed.update(name for name in output.request_ids if name in errors)
        invalid_blocks: set[int] = set()
        starts = (output.num_computed_tokens // self._block_size).tolist()
        for request_id, slot, start in zip(output.request_ids, output.slots.tolist(), starts, strict=True):
            block_ids = block_table(slot).tolist()
            if not invalid_blocks.isdisjoint(block_ids[:start]):
                self._failed.add(request_id)
            if request_id in self._failed:
                invalid_blocks.update(block_ids[start:])
        return frozenset(self._failed.intersection(output.request_ids))
