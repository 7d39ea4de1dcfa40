"""Blocks of an answer: one at a time is open, and each ends."""

from quire.dialogue.calls.tools import Tool, ToolUse
from quire.dialogue.formats import FORMATS
from quire.request_output import CompletionOutput
from quire.server.calls.blocks import AnswerReader, BlockBegin, BlockEnd, BlockKind
from quire.status import FinishReason

PING = ToolUse((Tool("ping", "", {"type": "object"}, False),), frozenset({"ping"}), False, several=True)
CALL = '<tool_call>\n{"name": "ping", "arguments": {"host": "a"}}\n</tool_call>'


def completion_of(text, reason=None):
    return CompletionOutput(0, text, [1], None, finish_reason=reason)


def events_of(reader, text):
    """Return the events of a text that comes character by character."""
    events = []
    for end in range(1, len(text)):
        events += reader.events(text[end - 1], completion_of(text[:end]))
    return events + reader.events(text[-1], completion_of(text, FinishReason.STOP))


def test_blocks_begin_and_end_one_after_the_other():
    events = events_of(AnswerReader(FORMATS["hermes"], PING), f"Hi. {CALL}{CALL}")
    edges = [event for event in events if isinstance(event, BlockBegin | BlockEnd)]
    assert [type(event) for event in edges] == [BlockBegin, BlockEnd] * 3
    blocks = [event.block for event in edges[::2]]
    kinds = [BlockKind.TEXT, BlockKind.CALL, BlockKind.CALL]
    assert [(block.kind, block.index) for block in blocks] == list(zip(kinds, range(3), strict=True))
    assert [block.call_index for block in blocks[1:]] == [0, 1]
    assert bytes(blocks[1].arguments) == b'{"host": "a"}'


def test_a_call_that_a_limit_cuts_off_is_kept_and_is_incomplete():
    text = f"{CALL[:-20]}"
    [cut] = AnswerReader(FORMATS["hermes"], PING).whole(completion_of(text, FinishReason.LENGTH))
    assert (cut.kind, cut.name, cut.is_complete) == (BlockKind.CALL, "ping", False)


def test_text_without_a_format_is_one_block():
    reader = AnswerReader()
    assert reader.events("", completion_of("")) == []
    [block] = AnswerReader().whole(completion_of("Hi.", FinishReason.LENGTH))
    assert (block.text, block.is_complete) == ("Hi.", False)
