"""The grammar of answers that call tools as a request wants it."""

from __future__ import annotations

import json
from collections.abc import Callable

from quire.dialogue.formats import ToolCallFormat
from quire.dialogue.grammar_writing import GrammarWriter
from quire.dialogue.tools import ToolUse
from quire.errors import InvalidRequestError
from quire.structured_outputs import StructuredOutputsParams


def structure_of_answer(
    call_format: ToolCallFormat,
    use: ToolUse,
    token_id_of: Callable[[str], int | None],
    *,
    content: StructuredOutputsParams | None = None,
) -> StructuredOutputsParams:
    """Return what an answer must be so that it calls tools as `use` says, with valid arguments.

    Unless it must call, it may be content, or content and then calls.

    Args:
        call_format: in which the model calls tools.
        use: of tools by the answer.
        token_id_of: the id of the token that was added to the model's vocabulary as a text, if any.
        content: what the answer must be if it calls no tools; None: any text.

    Raises:
        InvalidRequestError: the schemas are too large, or of a kind that the format cannot enforce.
    """
    writer = GrammarWriter(call_format.marks, token_id_of)
    notation = call_format.notation
    call = writer.one_of(notation.grammar(writer, tool) for tool in use.callable_tools)
    layout = call_format.layout_for(writer)
    head, tail = (writer.literal(text) for text in (layout.head, layout.tail))
    more = f" ({writer.literal(layout.separator)} {call})*" if use.several else ""
    calls = f"{call}{more} {tail}"
    if use.must_call:
        start = f"{head} {calls}"
    elif content is not None:
        start = f"{head} {calls} | {_content(writer, content)}"
    elif call_format.start:
        start = f'{writer.text_without(call_format.openings, call_format.start)} | {head} {calls} | ""'
    else:
        opening = call_format.opening_of(layout)
        rest = writer.literal(layout.head[len(opening) :])
        text = writer.text_without(call_format.openings)
        start = f"{writer.text_up_to(opening, call_format.openings)} {rest} {calls} | {text}"
    try:
        return StructuredOutputsParams(grammar=writer.grammar(start))
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"the parameters of the tools are too large to be enforced: {error}; send fewer tools, or "
            "neither tool_choice nor strict",
            param="tools",
        ) from None


def _content(writer: GrammarWriter, content: StructuredOutputsParams) -> str:
    """Return the expression for content of a structure.

    Raises:
        InvalidRequestError: it is of a kind that does not go together with tools.
    """
    if content.json is None:
        raise InvalidRequestError(
            "structured_outputs and tools go together only where it is a JSON schema; leave out one of them, "
            "or set tool_choice to none",
            param="structured_outputs",
        )
    assert isinstance(content.json, str)
    return writer.json(json.loads(content.json))
