"""A streamed answer as blocks of text, reasoning and tool calls, one of which is open at a time."""

from __future__ import annotations

import dataclasses
import enum
import random
import re
import string
from typing import TypeAlias

from msgspec import Raw

from quire.dialogue.answer_parser import AnswerParser
from quire.dialogue.calls.tool_call_format import ToolCallFormat
from quire.dialogue.calls.tools import ToolUse
from quire.dialogue.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ContentDelta,
    ReasoningDelta,
)
from quire.dialogue.reasoning.formats import ExpectedReasoning
from quire.request_output import CompletionOutput
from quire.server.calls.outputs import is_cut_off
from quire.status import FinishReason

_SHORT_ID_CHARACTERS = string.ascii_letters + string.digits
_SHORT_ID_LENGTH = 9
_LINE_BREAKS = re.compile(r"[\r\n]+")


class BlockKind(enum.Enum):
    """Kind of block."""

    TEXT = enum.auto()
    REASONING = enum.auto()
    CALL = enum.auto()


@dataclasses.dataclass(slots=True)
class Block:
    """A part of an answer.

    Attributes:
        kind: kind of the block.
        index: index among the answer's blocks.
        name: name of the called tool.
        call_index: index of a call among the answer's calls.
        is_complete: whether the model finished it; an unfinished call does not count.
        pieces: pieces of its text so far; for a call, of its arguments, JSON once complete.
    """

    kind: BlockKind
    index: int
    name: str = ""
    call_index: int = 0
    is_complete: bool = True
    pieces: list[str] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> Raw:
        """A complete call's arguments as a JSON object without line breaks."""
        return Raw(_LINE_BREAKS.sub(" ", self.text))  # in JSON, line breaks are only between values


@dataclasses.dataclass(frozen=True, slots=True)
class BlockBegin:
    """A block begins."""

    block: Block


@dataclasses.dataclass(frozen=True, slots=True)
class BlockDelta:
    """More of a block."""

    block: Block
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class BlockEnd:
    """A block has ended."""

    block: Block


BlockEvent: TypeAlias = BlockBegin | BlockDelta | BlockEnd


class AnswerReader:
    """Parses one answer incrementally.

    Args:
        call_format: format of the model's tool calls; None: it calls none.
        use: which tools the answer may call.
        reasoning: the reasoning that the answer may begin with; None: none.
        content_marks: around content, and no part of it.
        shows_reasoning: whether the client sees the reasoning.
        seed: of the ids; another server makes the same with the same seed. None: a random one.
    """

    def __init__(
        self,
        call_format: ToolCallFormat | None = None,
        use: ToolUse | None = None,
        reasoning: ExpectedReasoning | None = None,
        *,
        content_marks: tuple[str, ...] = (),
        shows_reasoning: bool = True,
        seed: str | None = None,
    ) -> None:
        self._parser: AnswerParser | None = None
        self._must_call = use is not None and use.must_call
        if call_format is not None or reasoning is not None or content_marks:
            schemas = {} if use is None else use.schemas
            self._parser = AnswerParser(call_format, schemas, reasoning, content_marks)
        self._shows_reasoning = shows_reasoning
        self._ids = random.Random(seed)
        self._short_ids = call_format is not None and call_format.short_ids
        self._blocks: list[Block] = []
        self._is_open = False  # the last block

    @property
    def has_calls(self) -> bool:
        """Whether the answer has called tools so far, and all calls are complete."""
        return self._parser is not None and self._parser.has_calls

    def events(self, new_text: str, completion: CompletionOutput) -> list[BlockEvent]:
        """Return the events of a completion's new text."""
        events: list[BlockEvent] = []
        for event in self._parsed(new_text, completion):
            match event:
                case ContentDelta(text=text) if not self._must_call:  # else it is the start of a call
                    events += self._more(BlockKind.TEXT, text)
                case ReasoningDelta(text=text) if self._shows_reasoning:
                    events += self._more(BlockKind.REASONING, text)
                case CallBegin(index=index, name=name):
                    events += self._begin(BlockKind.CALL, name, index)
                case ArgumentsDelta(text=text):
                    events += self._more(BlockKind.CALL, text)
                case CallEnd(is_complete=is_complete):
                    events += self._end(is_complete=is_complete)
        if completion.finished:
            events += self._end(is_complete=completion.finish_reason is not FinishReason.LENGTH)
        return events

    def whole(self, completion: CompletionOutput) -> list[Block]:
        """Return the blocks of a whole answer, without a call cut off by a stop string."""
        self.events(completion.text, completion)
        blocks: list[Block] = []
        for block in self._blocks:
            is_call = block.kind is BlockKind.CALL
            if is_call and not block.is_complete and completion.finish_reason is not FinishReason.LENGTH:
                continue
            if blocks and blocks[-1].kind is block.kind and not is_call:
                blocks[-1].pieces += block.pieces
            else:
                blocks.append(block)
        return blocks

    def new_call_id(self, prefix: str = "call_") -> str:
        """Return an id for a call, with the prefix unless the template needs short ids."""
        if self._short_ids:
            return "".join(self._ids.choices(_SHORT_ID_CHARACTERS, k=_SHORT_ID_LENGTH))
        return self.new_id(prefix, 12)

    def new_id(self, prefix: str, num_bytes: int = 16) -> str:
        """Return an id with a prefix and so many bytes in hexadecimal digits."""
        return prefix + self._ids.randbytes(num_bytes).hex()

    def _parsed(self, new_text: str, completion: CompletionOutput) -> list[AnswerEvent]:
        if self._parser is None:
            return [ContentDelta(new_text)] if new_text else []
        events = self._parser.feed(new_text)
        if completion.finished:
            events += self._parser.finish(is_cut_off=is_cut_off(completion))
        return events

    def _more(self, kind: BlockKind, text: str) -> list[BlockEvent]:
        begun = [] if self._is_open and self._blocks[-1].kind is kind else self._begin(kind)
        block = self._blocks[-1]
        block.pieces.append(text)
        return [*begun, BlockDelta(block, text)]

    def _begin(self, kind: BlockKind, name: str = "", call_index: int = 0) -> list[BlockEvent]:
        ended = self._end()
        self._blocks.append(Block(kind, len(self._blocks), name, call_index))
        self._is_open = True
        return [*ended, BlockBegin(self._blocks[-1])]

    def _end(self, *, is_complete: bool = True) -> list[BlockEvent]:
        if not self._is_open:
            return []
        self._is_open = False
        self._blocks[-1].is_complete = is_complete
        return [BlockEnd(self._blocks[-1])]
