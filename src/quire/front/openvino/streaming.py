"""Streamers: receive the output of `ContinuousBatchingPipeline.generate` as it is generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.errors import InvalidRequestError
from quire.front.openvino.results import Named
from quire.front.text.output_processor import CompletionState


class StreamingStatus(Named):
    """Return value of a streamer after each piece of output."""

    RUNNING = "running"
    STOP = "stop"  # end the request
    CANCEL = "cancel"  # end the request, and leave the turn out of the conversation
    TOOL_CALL_STOP = "tool_call_stop"  # end the request: it calls a tool


class StreamerBase:
    """Base of streamers that take tokens: `write` gets a list of new ones after each step."""

    def write(self, token: int | list[int]) -> StreamingStatus | bool | None:
        """Take new tokens, and return whether to go on; by default calls `put`, the older name, for each."""
        tokens = token if isinstance(token, list) else [token]
        return StreamingStatus.STOP if any(map(self.put, tokens)) else StreamingStatus.RUNNING

    def put(self, token: int) -> bool:
        """Take a new token; return whether to stop."""
        raise NotImplementedError(f"{type(self).__name__} has neither write nor put")

    def end(self) -> None:
        """Called after the last tokens; does nothing by default."""


class TextStreamer(StreamerBase):
    """Passes text to a function as soon as its characters are complete.

    Args:
        tokenizer: with `decode`, which turns token ids into text.
        callback: called with new text; returns whether to go on.
    """

    def __init__(self, tokenizer: Any, callback: Callable[[str], Any]) -> None:
        self._tokenizer = tokenizer
        self._callback = callback
        self._token_ids: list[int] = []
        self._num_shown = 0

    def write(self, token: int | list[int]) -> StreamingStatus:
        """Pass on the text that the tokens complete; returns the callback's status."""
        self._token_ids += token if isinstance(token, list) else [token]
        text = self._tokenizer.decode(self._token_ids)
        return StreamingStatus.RUNNING if text.endswith("\ufffd") else self._show(text)

    def end(self) -> None:
        """Pass on the remaining text, and forget the tokens."""
        self._show(self._tokenizer.decode(self._token_ids))
        self._token_ids, self._num_shown = [], 0

    def _show(self, text: str) -> StreamingStatus:
        new, self._num_shown = text[self._num_shown :], max(self._num_shown, len(text))
        return status_of_answer(self._callback(new)) if new else StreamingStatus.RUNNING


Streamer = StreamerBase | Callable[[str], StreamingStatus | int | bool | None]
"""Called with new text, or with new tokens. If it returns a status other than RUNNING, the number of one, or
any other true value, generation ends."""


class Stream:
    """Passes the new output of a completion to a streamer.

    Args:
        streamer: gets the output until it asks to stop; None: no streamer.

    Attributes:
        status: what the streamer has asked for.

    Raises:
        InvalidRequestError: it is not a streamer.
    """

    def __init__(self, streamer: Streamer | None) -> None:
        if streamer is not None and not isinstance(streamer, StreamerBase) and not callable(streamer):
            raise InvalidRequestError(
                f"streamer must be a function or a StreamerBase, not {type(streamer).__name__}",
                param="streamer",
            )
        self._streamer = streamer
        self._num_given = 0
        self.status = StreamingStatus.RUNNING

    def push(self, completion: CompletionState) -> bool:
        """Pass on new output; return whether the streamer has just asked to stop."""
        if self._streamer is None or self.status is not StreamingStatus.RUNNING:
            return False
        takes_tokens = isinstance(self._streamer, StreamerBase)
        output: Sequence[Any] = completion.token_ids if takes_tokens else completion.text
        new, self._num_given = output[self._num_given :], max(self._num_given, len(output))
        if new:
            self.status = status_of_answer(self._give(new))
        return self.status is not StreamingStatus.RUNNING

    def end(self) -> None:
        """Tell the streamer that the output is complete."""
        if isinstance(self._streamer, StreamerBase):
            self._streamer.end()

    def _give(self, new: Any) -> Any:
        if isinstance(self._streamer, StreamerBase):
            return self._streamer.write(list(new))
        assert self._streamer is not None
        return self._streamer(new)


def status_of_answer(answer: Any) -> StreamingStatus:
    """Convert a streamer's return value to a status."""
    if isinstance(answer, StreamingStatus):
        return answer
    if type(answer) is int and answer in range(len(StreamingStatus)):
        return list(StreamingStatus)[answer]
    return StreamingStatus.STOP if answer else StreamingStatus.RUNNING
