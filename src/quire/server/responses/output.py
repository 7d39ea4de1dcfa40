"""The items of a response, as its text comes."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterator
from typing import Any

from quire.dialogue import events as dialogue
from quire.server.calls.conversation import AnswerReader
from quire.server.responses.answers import (
    ArgumentsDelta,
    ArgumentsDone,
    ItemAdded,
    ItemDone,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningText,
    ResponseEvent,
    TextDelta,
    TextDone,
)
from quire.server.wire.answers import TokenLogprob


class ResponseOutput:
    """Turns an answer's text into items, and tells what is new as events.

    Args:
        reader: of the answer.
        numbers: of the response's events.
    """

    def __init__(self, reader: AnswerReader, numbers: Iterator[int]) -> None:
        self.items: list[OutputItem] = []
        self._reader = reader
        self._numbers = numbers
        self._is_open = False
        self._pieces: list[str] = []  # of the open item
        self._logprobs: list[TokenLogprob] = []
        self._unsent_logprobs: list[TokenLogprob] = []  # of tokens whose text is held back

    def feed(
        self, text: str, logprobs: list[TokenLogprob], *, is_last: bool, is_complete: bool
    ) -> list[ResponseEvent]:
        """Return what is new with a piece of the text.

        Args:
            text: of the answer.
            logprobs: of its tokens; only text has them.
            is_last: whether nothing follows.
            is_complete: whether the model ended the answer, rather than a limit.
        """
        new: list[ResponseEvent] = []
        self._unsent_logprobs += logprobs
        for event in self._reader.events(text, is_last=is_last, is_cut_off=not is_complete):
            match event:
                case dialogue.ContentDelta(text=piece):
                    new += self._more_text(piece)
                case dialogue.ReasoningDelta(text=piece):
                    new += self._more_thought(piece)
                case dialogue.CallBegin(name=name):
                    new += self._begin_call(name)
                case dialogue.ArgumentsDelta(text=piece):
                    new += self._more_arguments(piece)
                case dialogue.CallEnd(is_complete=has_all):
                    new += self._end_item(is_complete=has_all)
        if is_last:
            new += self._end_item(is_complete=is_complete)
        return new

    def _more_text(self, text: str) -> list[ResponseEvent]:
        new: list[ResponseEvent] = []
        if not self._is_open or not isinstance(self.items[-1], OutputMessage):
            new += self._begin(OutputMessage(id=f"msg_{secrets.token_hex(16)}", content=[]))
            new.append(PartAdded(**self._place(), part=OutputText(text="")))
        logprobs, self._unsent_logprobs = self._unsent_logprobs, []
        self._pieces.append(text)
        self._logprobs += logprobs
        return [*new, TextDelta(**self._place(), delta=text, logprobs=logprobs)]

    def _more_thought(self, text: str) -> list[ResponseEvent]:
        new: list[ResponseEvent] = []
        if not self._is_open or not isinstance(self.items[-1], OutputReasoning):
            new += self._begin(OutputReasoning(id=f"rs_{secrets.token_hex(16)}", content=[]))
            new.append(PartAdded(**self._place(), part=ReasoningText(text="")))
        self._unsent_logprobs = []
        self._pieces.append(text)
        return [*new, ReasoningDelta(**self._place(), delta=text)]

    def _begin_call(self, name: str) -> list[ResponseEvent]:
        self._unsent_logprobs = []
        call_id = self._reader.new_call_id()
        return self._begin(
            OutputCall(id=f"fc_{secrets.token_hex(16)}", call_id=call_id, name=name, arguments="")
        )

    def _more_arguments(self, text: str) -> list[ResponseEvent]:
        self._pieces.append(text)
        return [ArgumentsDelta(**self._place(), delta=text)]

    def _begin(self, item: OutputItem) -> list[ResponseEvent]:
        ended = self._end_item()
        self.items.append(item)
        self._pieces, self._logprobs = [], []
        self._is_open = True
        number, index = next(self._numbers), len(self.items) - 1
        return [*ended, ItemAdded(sequence_number=number, output_index=index, item=copy.deepcopy(item))]

    def _end_item(self, *, is_complete: bool = True) -> list[ResponseEvent]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        item.status = "completed" if is_complete else "incomplete"
        new = self._end_content(item, "".join(self._pieces))
        number, index = next(self._numbers), len(self.items) - 1
        return [*new, ItemDone(sequence_number=number, output_index=index, item=item)]

    def _end_content(self, item: OutputItem, written: str) -> list[ResponseEvent]:
        """Put what was written into its item; return the events that tell of it."""
        if isinstance(item, OutputCall):
            item.arguments = written
            if item.status == "incomplete":
                return []
            return [ArgumentsDone(**self._place(), name=item.name, arguments=written)]
        if isinstance(item, OutputReasoning):
            item.content.append(thought := ReasoningText(text=written))
            return [ReasoningDone(**self._place(), text=written), PartDone(**self._place(), part=thought)]
        item.content.append(part := OutputText(text=written, logprobs=self._logprobs))
        return [
            TextDone(**self._place(), text=written, logprobs=self._logprobs),
            PartDone(**self._place(), part=part),
        ]

    def _place(self) -> dict[str, Any]:
        """Return where an event about the last item belongs."""
        return {
            "sequence_number": next(self._numbers),
            "output_index": len(self.items) - 1,
            "item_id": self.items[-1].id,
        }
