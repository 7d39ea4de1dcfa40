"""The scheduler's surroundings, as calls that always answer: they are made in the middle of a plan."""

from __future__ import annotations

import dataclasses
import logging
import math
import operator
import time
from collections.abc import Callable

from quire.kv.blocks.block_hash import BlockKey
from quire.kv.blocks.events import KVEventSink
from quire.scheduling.context import SchedulerContext, no_drafts

logger = logging.getLogger(__name__)


def guarded(context: SchedulerContext) -> SchedulerContext:
    """Return a context whose clock, drafts, growth and events never raise.

    Failures are logged. The time stays the same then, there are no drafts and no further memory, and the
    event is lost.
    """
    return dataclasses.replace(
        context,
        clock=context.clock if context.clock is time.monotonic else SteadyClock(context.clock),
        draft_length=context.draft_length
        if context.draft_length is no_drafts
        else _counting(context.draft_length, "draft_length"),
        commit_blocks=context.commit_blocks and _growing(context.commit_blocks),
        kv_events=context.kv_events and GuardedEvents(context.kv_events),
        state_events=context.state_events and GuardedEvents(context.state_events),
        windows=tuple(
            dataclasses.replace(
                group,
                commit=group.commit and _growing(group.commit),
                events=group.events and GuardedEvents(group.events),
            )
            for group in context.windows
        ),
    )


class SteadyClock:
    """A monotonic clock over one that may go back, which it then follows from where it was.

    It stops while the other one fails. One reading that is too low does not set it forward afterwards.

    Args:
        read: returns seconds; it must not fail here, at first.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._last_read = self._highest_read = read()
        self._offset = 0.0
        self._has_failed = False

    def __call__(self) -> float:
        """Return seconds."""
        try:
            now = self._read()
            if not math.isfinite(now):
                raise ValueError(f"it reads {now}")
            self._has_failed = False
        except Exception:
            if not self._has_failed:
                logger.exception("the clock failed; the time stays the same until it can be read again")
            self._has_failed = True
            now = self._last_read
        if now < self._last_read:
            self._offset += self._last_read - now
        elif self._last_read < self._highest_read <= now:
            self._offset -= self._highest_read - self._last_read
        self._last_read, self._highest_read = now, max(now, self._highest_read)
        return now + self._offset


class StepClock:
    """A clock that only advances with each step, so that a step has one time.

    Args:
        read: returns seconds; called when the clock is made, and once for each step.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self.read = read
        self.now = read()  # seconds

    def advance(self) -> None:
        """Take the time of the step that is planned next."""
        self.now = self.read()


def _counting(count: Callable[[int], int], name: str) -> Callable[[int], int]:
    def guarded_count(number: int) -> int:
        try:
            return max(0, operator.index(count(number)))
        except Exception:
            logger.exception("%s(%d) failed and counts as 0", name, number)
            return 0

    return guarded_count


def _growing(commit: Callable[[int], int]) -> Callable[[int], int]:
    granted = _counting(commit, "commit_blocks")
    return lambda count: min(count, granted(count))


class GuardedEvents:
    """Forwards events; failures are logged, and the event is lost."""

    def __init__(self, sink: KVEventSink) -> None:
        self._sink = sink

    def stored(self, block_id: int, key: BlockKey) -> None:
        """See `KVEventSink.stored`."""
        self._tell(lambda: self._sink.stored(block_id, key))

    def removed(self, block_id: int, key: BlockKey) -> None:
        """See `KVEventSink.removed`."""
        self._tell(lambda: self._sink.removed(block_id, key))

    def cleared(self) -> None:
        """See `KVEventSink.cleared`."""
        self._tell(self._sink.cleared)

    def salted(self, root: bytes, salt: str) -> None:
        """See `KVEventSink.salted`."""
        self._tell(lambda: self._sink.salted(root, salt))

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            logger.exception("a change of the prefix cache could not be noted")
