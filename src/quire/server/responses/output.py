"""The items of a response, built from streamed text."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from quire.request_output import CompletionOutput
from quire.server.calls.blocks import AnswerReader, Block, BlockBegin, BlockDelta, BlockEnd, BlockKind
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
    """Turns an answer's text into items and events.

    Args:
        reader: parses the answer.
        numbers: numbers of the response's events.
    """

    def __init__(self, reader: AnswerReader, numbers: Iterator[int]) -> None:
        self.items: list[OutputItem] = []
        self._reader = reader
        self._numbers = numbers
        self._logprobs: list[TokenLogprob] = []  # of the open item
        self._unsent_logprobs: list[TokenLogprob] = []  # of tokens whose text is withheld

    def feed(
        self, text: str, completion: CompletionOutput, logprobs: list[TokenLogprob]
    ) -> list[ResponseEvent]:
        """Return the events of new text.

        Args:
            text: new text of the answer.
            completion: the completion so far.
            logprobs: log-probabilities of the text's tokens; only text has them.
        """
        new: list[ResponseEvent] = []
        self._unsent_logprobs += logprobs
        for event in self._reader.events(text, completion):
            match event:
                case BlockBegin(block):
                    new += self._begin(block)
                case BlockDelta(block, piece):
                    new.append(self._more(block, piece))
                case BlockEnd(block):
                    new += self._end(block)
        return new

    def _begin(self, block: Block) -> list[ResponseEvent]:
        self._logprobs = []
        item, part = self._item_of(block)
        self.items.append(item)
        number, index = next(self._numbers), block.index
        added = ItemAdded(sequence_number=number, output_index=index, item=copy.deepcopy(item))
        return [added] if part is None else [added, PartAdded(**self._place(), part=part)]

    def _item_of(self, block: Block) -> tuple[OutputItem, OutputText | ReasoningText | None]:
        """Return the new item, and its new part."""
        if block.kind is BlockKind.TEXT:
            return OutputMessage(id=self._reader.new_id("msg_"), content=[]), OutputText(text="")
        self._unsent_logprobs = []
        if block.kind is BlockKind.REASONING:
            return OutputReasoning(id=self._reader.new_id("rs_"), content=[]), ReasoningText(text="")
        item_id, call_id = self._reader.new_id("fc_"), self._reader.new_call_id()
        return OutputCall(id=item_id, call_id=call_id, name=block.name, arguments=""), None

    def _more(self, block: Block, text: str) -> ResponseEvent:
        if block.kind is BlockKind.CALL:
            return ArgumentsDelta(**self._place(), delta=text)
        logprobs, self._unsent_logprobs = self._unsent_logprobs, []
        if block.kind is BlockKind.REASONING:
            return ReasoningDelta(**self._place(), delta=text)
        self._logprobs += logprobs
        return TextDelta(**self._place(), delta=text, logprobs=logprobs)

    def _end(self, block: Block) -> list[ResponseEvent]:
        item = self.items[-1]
        item.status = "completed" if block.is_complete else "incomplete"
        new = self._end_content(item, block.text)
        number = next(self._numbers)
        return [*new, ItemDone(sequence_number=number, output_index=block.index, item=item)]

    def _end_content(self, item: OutputItem, written: str) -> list[ResponseEvent]:
        """Add new text to its item; return the events for it."""
        if isinstance(item, OutputCall):
            item.arguments = written
            if item.status == "incomplete":
                return []
            return [ArgumentsDone(**self._place(), name=item.name, arguments=written)]
        if isinstance(item, OutputReasoning):
            item.content.append(reasoning := ReasoningText(text=written))
            return [ReasoningDone(**self._place(), text=written), PartDone(**self._place(), part=reasoning)]
        item.content.append(part := OutputText(text=written, logprobs=self._logprobs))
        return [
            TextDone(**self._place(), text=written, logprobs=self._logprobs),
            PartDone(**self._place(), part=part),
        ]

    def _place(self) -> dict[str, Any]:
        """Return the fields that locate an event about the last item."""
        return {
            "sequence_number": next(self._numbers),
            "output_index": len(self.items) - 1,
            "item_id": self.items[-1].id,
        }
