"""Messages that have been received and not processed, in pieces that take a bounded time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from quire.engine.messages import FromEngine, StepOutputs
from quire.front.supervision import EngineCrashed, EngineSuspended

OUTPUTS_AT_ONCE = 16
"""Outputs of a step that are processed without a look at the clock."""

MAX_OUTPUTS = 64
"""Outputs that are processed in a turn of the event loop: each may wake a task, which takes longer."""

MAX_SECONDS = 0.004
"""Seconds for which a turn goes on."""


class MessageBacklog:
    """A queue of messages; the outputs of a step can be taken in pieces."""

    def __init__(self) -> None:
        self._messages: deque[FromEngine | EngineCrashed | EngineSuspended] = deque()

    def __bool__(self) -> bool:
        return bool(self._messages)

    def extend(self, messages: Iterable[FromEngine | EngineCrashed | EngineSuspended]) -> None:
        """Add messages at the end."""
        self._messages.extend(messages)

    def take(self, max_outputs: int | None = None) -> FromEngine | EngineCrashed | EngineSuspended:
        """Remove and return the first message, or its first outputs; the last piece has its statistics."""
        message = self._messages.popleft()
        if max_outputs is None or not isinstance(message, StepOutputs) or len(message.outputs) <= max_outputs:
            return message
        self._messages.appendleft(StepOutputs(message.outputs[max_outputs:], message.stats))
        return StepOutputs(message.outputs[:max_outputs])

    def clear(self) -> None:
        """Remove all."""
        self._messages.clear()


class Turn:
    """How long messages have been processed without anybody else's turn."""

    def __init__(self) -> None:
        self._num_outputs = 0
        self._ends_at = time.monotonic() + MAX_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether others are to have their turn."""
        return self._num_outputs >= MAX_OUTPUTS or time.monotonic() >= self._ends_at

    def note(self, message: FromEngine | EngineCrashed | EngineSuspended) -> None:
        """Count a message that is processed in this turn."""
        self._num_outputs += len(message.outputs) if isinstance(message, StepOutputs) else 1
