"""What an answer says, as Ollama's messages have it: calls of tools are whole."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from quire.dialogue.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ContentDelta,
    ReasoningDelta,
)
from quire.request_output import CompletionOutput
from quire.server.calls.conversation import AnswerReader
from quire.server.calls.outputs import is_cut_off
from quire.server.calls.tool_answers import object_of
from quire.server.ollama.answers import CalledTool, OllamaAnswerMessage, OllamaToolCall


class MessageReader:
    """Turns one answer's text into messages.

    Args:
        reader: of the answer.
    """

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._name = ""
        self._arguments: list[str] = []  # pieces of the call that is being read
        self._num_calls = 0

    def pieces(self, new_text: str, completion: CompletionOutput) -> list[OllamaAnswerMessage]:
        """Return what is new with a piece of the text."""
        is_last = completion.finished
        events = self._reader.events(new_text, is_last=is_last, is_cut_off=is_cut_off(completion))
        return [message for event in events if (message := self._message(event)) is not None]

    def whole(self, completion: CompletionOutput) -> OllamaAnswerMessage:
        """Return the message that all of the text is."""
        return _joined(self.pieces(completion.text, completion))

    def _message(self, event: AnswerEvent) -> OllamaAnswerMessage | None:
        match event:
            case ContentDelta(text=text):
                return OllamaAnswerMessage(content=text)
            case ReasoningDelta(text=text):
                return OllamaAnswerMessage(thinking=text)
            case CallBegin(name=name):
                self._name, self._arguments = name, []
            case ArgumentsDelta(text=text):
                self._arguments.append(text)
            case CallEnd(is_complete=True):
                return self._call()
        return None

    def _call(self) -> OllamaAnswerMessage:
        """Return the call that has ended."""
        arguments = object_of("".join(self._arguments))
        function = CalledTool(index=self._num_calls, name=self._name, arguments=arguments)
        self._num_calls += 1
        return OllamaAnswerMessage(
            tool_calls=[OllamaToolCall(id=self._reader.new_call_id(), function=function)]
        )


def _joined(pieces: Sequence[OllamaAnswerMessage]) -> OllamaAnswerMessage:
    thinking = [piece.thinking for piece in pieces if piece.thinking is not UNSET]
    calls = [call for piece in pieces if piece.tool_calls is not UNSET for call in piece.tool_calls]
    return OllamaAnswerMessage(
        content="".join(piece.content for piece in pieces),
        thinking="".join(thinking) if thinking else UNSET,
        tool_calls=calls or UNSET,
    )
