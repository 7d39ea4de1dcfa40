"""What every API of conversations has in common: messages and tools to the engine, its text to events."""

from __future__ import annotations

import dataclasses
import secrets
import string
from typing import Any, Protocol

from quire.dialogue.answer_parser import AnswerParser
from quire.dialogue.call_grammar import structure_of_answer
from quire.dialogue.events import AnswerEvent, ContentDelta
from quire.dialogue.formats import ToolCallFormat, has_place_for_tools
from quire.dialogue.tools import ToolUse
from quire.errors import InvalidRequestError
from quire.request_output import CompletionOutput
from quire.sampling_params import SamplingParams
from quire.server.context import ServerContext
from quire.server.generation import OutputStream

_SHORT_ID_CHARACTERS = string.ascii_letters + string.digits
_SHORT_ID_LENGTH = 9


class ConversationBody(Protocol):
    """What a body that asks for the next message of a conversation has, whichever API it is of."""

    def tool_use(self) -> ToolUse | None:
        """Return which tools the answer may or must call; None: none.

        Raises:
            InvalidRequestError: a tool is unusable, there twice, or chosen and not there.
        """

    def template_messages(self, call_format: ToolCallFormat | None) -> list[dict[str, Any]]:
        """Return the messages as chat templates expect them.

        Args:
            call_format: of the model's calls; None if it is unknown.
        """


class Conversation:
    """A conversation that the model is to continue.

    Args:
        context: of the server.
        body: with the messages and tools.
        params: of the answer, without what tools demand of it; None: there is to be none.

    Raises:
        InvalidRequestError: the model cannot call tools, or not as it must.
    """

    def __init__(
        self, context: ServerContext, body: ConversationBody, params: SamplingParams | None = None
    ) -> None:
        self._context = context
        self._messages = body.template_messages(context.tool_call_format)
        self._tool_use = body.tool_use()
        self._call_format: ToolCallFormat | None = None
        self._readers: dict[int, AnswerReader] = {}  # by index of the completion
        self.params = SamplingParams() if params is None else params
        if self._tool_use is not None:
            self._call_format = _required_format(context)
            self.params = _params_with_tools(self.params, self._tool_use, self._call_format, context)

    @property
    def is_structured_by_tools(self) -> bool:
        """Whether the answer has a grammar because of the tools."""
        return self._tool_use is not None and self._tool_use.needs_grammar

    def outputs(self, request_id: str, options: dict[str, Any]) -> OutputStream:
        """Return the engine's outputs.

        Args:
            request_id: of the engine's request.
            options: of the engine's request.
        """
        if self._call_format is not None:
            options = {"marks": self._call_format.marks, **options}
        return self._context.llm.chat(
            self._messages, self.params, request_id=request_id, **self._template_options(), **options
        )

    async def count_prompt_tokens(self) -> int:
        """Return the number of tokens of the prompt."""
        return len(await self._context.llm.tokenize_chat(self._messages, **self._template_options()))

    def _template_options(self) -> dict[str, Any]:
        """Return what the chat template gets to see besides the messages."""
        if self._tool_use is None:
            return {}
        return {"tools": [tool.for_template() for tool in self._tool_use.tools]}

    def reader(self, completion: CompletionOutput) -> AnswerReader:
        """Return what reads the text of one completion."""
        reader = self._readers.get(completion.index)
        if reader is None:
            reader = self._readers[completion.index] = AnswerReader(self._call_format, self._tool_use)
        return reader


class AnswerReader:
    """Reads one answer as it comes.

    Args:
        call_format: in which the model calls tools; None: it calls none.
        use: of tools by the answer.
    """

    def __init__(self, call_format: ToolCallFormat | None, use: ToolUse | None) -> None:
        self._parser: AnswerParser | None = None
        if call_format is not None and use is not None:
            self._parser = AnswerParser(call_format, use.schemas)
        self._short_ids = call_format is not None and call_format.short_ids

    @property
    def has_calls(self) -> bool:
        """Whether the answer has called a tool so far."""
        return self._parser is not None and self._parser.num_calls > 0

    def events(self, new_text: str, *, is_last: bool) -> list[AnswerEvent]:
        """Return what is new with a piece of the text."""
        if self._parser is None:
            return [ContentDelta(new_text)] if new_text else []
        return self._parser.feed(new_text) + (self._parser.finish() if is_last else [])

    def new_call_id(self, prefix: str = "call_") -> str:
        """Return an id for a call: with the prefix, unless the template wants short ones."""
        if self._short_ids:
            return "".join(secrets.choice(_SHORT_ID_CHARACTERS) for _ in range(_SHORT_ID_LENGTH))
        return prefix + secrets.token_hex(12)


def _required_format(context: ServerContext) -> ToolCallFormat:
    """Return the format in which the served model calls tools.

    Raises:
        InvalidRequestError: its chat template has no place for tools, or the format is unknown.
    """
    template = context.llm.tokenizer.chat_template_source
    if template is None or not has_place_for_tools(template):
        raise InvalidRequestError(
            "the model's chat template has no place for tools; leave them out, or serve a model that was "
            "trained to call tools",
            param="tools",
        )
    call_format = context.tool_call_format
    if call_format is None:
        raise InvalidRequestError(
            "the format in which the model calls tools is not known from its chat template; start the server "
            "with --tool-call-format",
            param="tools",
        )
    return call_format


def _params_with_tools(
    params: SamplingParams, use: ToolUse, call_format: ToolCallFormat, context: ServerContext
) -> SamplingParams:
    """Return the parameters of an answer that calls tools as it may or must.

    Raises:
        InvalidRequestError: that cannot be enforced.
    """
    if not use.needs_grammar and params.structured_outputs is None:
        return params
    token_id_of = context.llm.tokenizer.added_token_id
    structure = structure_of_answer(call_format, use, token_id_of, content=params.structured_outputs)
    return dataclasses.replace(params, structured_outputs=structure)
