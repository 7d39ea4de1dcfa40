"""Received messages, processed in pieces that take a bounded time."""

from __future__ import annotations

import time
from collections import deque

import msgspec

from quire.engine.messages import FromEngine, StepOutputs
from quire.front.process.supervision import EngineCrashed, EngineSuspended
from quire.scheduling.outputs import EngineCoreOutput

OUTPUTS_AT_ONCE = 16
"""Outputs of a step that are processed between looks at the clock."""

POSITIONS_AT_ONCE = 256
"""Prompt tokens whose log-probabilities (up to 20 each) are processed between looks at the clock."""

MAX_OUTPUTS = 64
"""Maximum number of outputs processed in a turn of the event loop; each may wake a task."""

MAX_SECONDS = 0.004
"""Maximum length of a turn, in seconds."""


class MessageBacklog(deque[FromEngine | EngineCrashed | EngineSuspended]):
    """A queue of messages; the outputs of a step can be taken in pieces."""

    def take(self, max_outputs: int | None = None) -> FromEngine | EngineCrashed | EngineSuspended:
        """Remove and return the first message, or its first outputs; only the last piece has statistics."""
        message = self.popleft()
        if max_outputs is None or not isinstance(message, StepOutputs):
            return message
        first, others = _split(message.outputs, max_outputs)
        if not others:
            return message
        self.appendleft(StepOutputs(others, message.stats))
        return StepOutputs(first)


def _split(
    outputs: list[EngineCoreOutput], max_outputs: int
) -> tuple[list[EngineCoreOutput], list[EngineCoreOutput]]:
    """Return the outputs to process next, and the rest; long prompt log-probabilities are split."""
    num_positions = 0
    for index, output in enumerate(outputs[:max_outputs]):
        num_positions += len(output.prompt_logprobs or ())
        if num_positions > POSITIONS_AT_ONCE and index:
            return outputs[:index], outputs[index:]
        if num_positions > POSITIONS_AT_ONCE:
            first, rest = _parts(output)
            return [first], [rest, *outputs[1:]]
    return outputs[:max_outputs], outputs[max_outputs:]


def _parts(output: EngineCoreOutput) -> tuple[EngineCoreOutput, EngineCoreOutput]:
    """Split an output: the prompt's first log-probabilities, and everything else."""
    assert output.prompt_logprobs is not None
    first = EngineCoreOutput(
        output.request_id,
        [],
        num_cached_tokens=output.num_cached_tokens,
        first_scheduled_time=output.first_scheduled_time,
        prompt_logprobs=output.prompt_logprobs[:POSITIONS_AT_ONCE],
    )
    rest = output.prompt_logprobs[POSITIONS_AT_ONCE:]
    return first, msgspec.structs.replace(output, prompt_logprobs=rest)


class Turn:
    """A turn of the event loop in which messages are processed."""

    def __init__(self) -> None:
        self._num_outputs = 0
        self._ends_at = time.monotonic() + MAX_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether it is time to yield to other tasks."""
        return self._num_outputs >= MAX_OUTPUTS or time.monotonic() >= self._ends_at

    def note(self, message: FromEngine | EngineCrashed | EngineSuspended) -> None:
        """Count a message that is processed in this turn."""
        self._num_outputs += len(message.outputs) if isinstance(message, StepOutputs) else 1
