"""Which requests of a step have invalid KV, which must not be stored outside of the cache.

On a device, that is known only after the step has been launched.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection
from typing import Protocol

from quire.step import IntArray, SchedulerOutput

BlockTables = Callable[[], IntArray]
"""Returns the block tables of a step's rows, [R, B]; what is behind a row's last block means nothing."""


class StepErrors(Protocol):
    """The requests that have failed in a step."""

    @property
    def have_arrived(self) -> bool:
        """Whether `failed_ids` returns or raises at once."""

    def failed_ids(self) -> Collection[str]:
        """Return them as soon as they are known; may be called from any thread.

        Raises:
            Exception: whatever the device has failed with.
        """


@dataclasses.dataclass(slots=True, frozen=True)
class KnownErrors:
    """`StepErrors` of a step that has been computed."""

    requests: Collection[str]

    @property
    def have_arrived(self) -> bool:
        """Whether `failed_ids` returns at once."""
        return True

    def failed_ids(self) -> Collection[str]:
        """Return the requests."""
        return self.requests


class FailedRequests:
    """Remembers failed requests until the scheduler takes them out of their slots.

    Steps that were planned before the failure was known go on computing them.

    Args:
        block_size: tokens per KV block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._newest: StepVerdict | None = None

    def begin(self, output: SchedulerOutput) -> None:
        """Begin a step: until `end` says otherwise, all of its requests count as failed.

        Those that have left their slots are forgotten, also if they are back in one.
        """
        if self._newest is not None:
            self._newest.settle_if_known()
        self._newest = StepVerdict(self._newest, output, self._block_size)

    def end(self, errors: StepErrors, block_tables: BlockTables) -> StepVerdict:
        """Return the requests of the step whose KV is invalid; the step has been computed or launched.

        Args:
            errors: of the step.
            block_tables: returns those at present.
        """
        assert self._newest is not None, "begin() comes first"
        self._newest.end(errors, block_tables)
        return self._newest


class StepVerdict:
    """Whose KV of a step is invalid: known with the tokens of this step and of those before.

    Args:
        before: of the step before.
        output: the step; a row reads only what its own or an earlier row writes.
        block_size: tokens per KV block.
    """

    def __init__(self, before: StepVerdict | None, output: SchedulerOutput, block_size: int) -> None:
        self._before = before
        self._output = output
        self._block_size = block_size
        self._errors: StepErrors = KnownErrors(output.request_ids)
        self._block_tables: BlockTables | None = None
        self._failed: frozenset[str] | None = None  # in this step or before, and not out of their slots
        self._lock = threading.Lock()

    def end(self, errors: StepErrors, block_tables: BlockTables) -> None:
        """See `FailedRequests.end`."""
        self._errors, self._block_tables = errors, block_tables
        if self.is_known:
            self.failed_ids()
        else:  # the rows may be others' by then
            tables = block_tables()
            self._block_tables = lambda: tables

    @property
    def is_known(self) -> bool:
        """Whether `failed_ids` returns at once."""
        before = self._before
        return (before is None or before.is_known) and self._errors.have_arrived

    def failed_ids(self) -> frozenset[str]:
        """Return the requests of the step whose KV is invalid as soon as that is known.

        They have failed, in this step or before, or read what such a request has written in this step; all
        have if the device has failed. May be called from any thread.
        """
        failed = self._failed_so_far()
        return failed.intersection(self._output.request_ids) if failed else failed

    def settle_if_known(self) -> None:
        """Drop the steps before of which everything is known."""
        before = self._before
        if self.is_known:
            self._failed_so_far()
        elif before is not None:
            before.settle_if_known()

    def _failed_so_far(self) -> frozenset[str]:
        with self._lock:
            if self._failed is None:
                before = frozenset() if self._before is None else self._before._failed_so_far()
                self._failed = self._failed_ids(before)
                self._before = None
            return self._failed

    def _failed_ids(self, failed_before: frozenset[str]) -> frozenset[str]:
        output = self._output
        try:
            errors = set(self._errors.failed_ids())
        except Exception:  # which the `result` of the step raises, too
            errors = set(output.request_ids)
        if not errors and not failed_before:
            return failed_before
        failed = (failed_before - _leaving(output)) | errors.intersection(output.request_ids)
        if failed and self._block_tables is not None:
            failed |= self._readers(failed, self._block_tables())
        return failed

    def _readers(self, failed: frozenset[str], block_tables: IntArray) -> set[str]:
        """Return the requests that read what one of `failed`, or of these, has written in this step."""
        output, size = self._output, self._block_size
        starts = output.num_computed_tokens // size
        ends = -(-(output.num_computed_tokens + output.num_tokens) // size)
        readers: set[str] = set()
        invalid_blocks: set[int] = set()
        rows = zip(output.request_ids, block_tables.tolist(), starts.tolist(), ends.tolist(), strict=True)
        for request_id, block_ids, start, end in rows:
            if not invalid_blocks.isdisjoint(block_ids[:start]):
                readers.add(request_id)
            if request_id in failed or request_id in readers:
                invalid_blocks.update(block_ids[start:end])
        return readers


def _leaving(output: SchedulerOutput) -> set[str]:
    """Return the requests that have left their slots before a step, also if they are back in one."""
    entering = [new.request_id for new in output.scheduled_new_reqs]
    entering += [resumed.request_id for resumed in output.scheduled_cached_reqs.resumed]
    return {*output.finished_req_ids, *output.preempted_req_ids, *entering}
