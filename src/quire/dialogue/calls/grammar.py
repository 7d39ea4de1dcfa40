"""The grammar of answers with tool calls, by the request's tool_choice."""

from __future__ import annotations

import json
from collections.abc import Callable

from quire.dialogue.calls.grammar_writing import GrammarWriter
from quire.dialogue.calls.tool_call_format import ToolCallFormat
from quire.dialogue.calls.tools import ToolUse
from quire.errors import InvalidRequestError
from quire.structured_outputs import StructuredOutputsParams


def structure_of_answer(
    call_format: ToolCallFormat,
    use: ToolUse,
    token_id_of: Callable[[str], int | None],
    *,
    content: StructuredOutputsParams | None = None,
) -> StructuredOutputsParams:
    """Return the grammar of an answer that calls tools as `use` says, with valid arguments.

    Unless it must call, it may be content, or content and then calls.

    Args:
        call_format: in which the model calls tools.
        use: use of tools by the answer.
        token_id_of: the id of the token that was added to the model's vocabulary as a text, if any.
        content: what the answer must be if it calls no tools; None: any text.

    Raises:
        InvalidRequestError: the schemas are too large, or of a kind that the format cannot enforce.
    """
    writer = GrammarWriter(call_format.marks, token_id_of)
    try:
        expression = None if content is None or use.must_call else _content(writer, content)
        grammar = writer.grammar(call_format.answer_grammar(writer, use, expression))
    except InvalidRequestError:
        raise
    except ValueError as error:
        raise InvalidRequestError(
            f"the parameters of the tools cannot be enforced: {error}; send fewer or smaller tools, or "
            "neither tool_choice nor strict",
            param="tools",
        ) from None
    return StructuredOutputsParams(grammar=grammar)


def _content(writer: GrammarWriter, content: StructuredOutputsParams) -> str:
    """Return the expression for content of a structure.

    Raises:
        InvalidRequestError: it is of a kind that cannot be combined with tools.
    """
    if content.json is None:
        raise InvalidRequestError(
            "structured_outputs can be combined with tools only if it is a JSON schema; leave one out, "
            "or set tool_choice to none",
            param="structured_outputs",
        )
    assert isinstance(content.json, str)
    return writer.json(json.loads(content.json))
