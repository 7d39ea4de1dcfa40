"""Base of the conversation APIs: passes messages and tools to the engine, and parses its text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from quire.dialogue.calls.grammar import structure_of_answer
from quire.dialogue.calls.tool_call_format import ToolCallFormat
from quire.dialogue.calls.tools import ToolUse
from quire.dialogue.earlier_turns import text_of
from quire.dialogue.formats import has_place_for_tools
from quire.dialogue.reasoning.formats import ExpectedReasoning, expected_reasoning
from quire.dialogue.reasoning.tokens import ReasoningTokens
from quire.errors import InvalidRequestError
from quire.front.text.input_processor import ProcessedRequest
from quire.front.text.reasoning import ReasoningControl
from quire.request_output import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.schemas.json_schemas import enforceable_schema
from quire.server.calls.blocks import AnswerReader
from quire.server.calls.bodies import ConversationBody, template_options
from quire.server.calls.outputs import OutputStream
from quire.server.context import ServerContext
from quire.server.wire.leniency import Leniency
from quire.structured_outputs import StructuredOutputsParams


class Conversation:
    """A conversation for the model to continue.

    Args:
        context: the server's context.
        body: the body, with its tools.
        messages: messages in OpenAI's form.
        params: sampling parameters without those for tools; None: nothing is generated.
        answer_id: of which the ids of the answer's parts are made; None: they are random.

    Raises:
        InvalidRequestError: the model cannot call tools, or tool_choice cannot be enforced.
    """

    def __init__(
        self,
        context: ServerContext,
        body: ConversationBody,
        messages: list[dict[str, Any]],
        params: SamplingParams | None = None,
        answer_id: str | None = None,
    ) -> None:
        self._context = context
        self._answer_id = answer_id
        self._body = body
        self._template = context.chat_template
        self._reasoning_format = context.reasoning_format
        call_format = context.tool_call_format
        self._messages = messages
        self._tool_use = body.tool_use()
        self._call_format: ToolCallFormat | None = None
        self._thinking = body.thinking_options()
        self._prompt_options = body.prompt_options()
        self._reasoning: ExpectedReasoning | None = None  # known with the first output
        self._readers: dict[int, AnswerReader] = {}  # by completion index
        self._reasoning_tokens: dict[int, ReasoningTokens] = {}  # by completion index, too
        self.params = asked = SamplingParams() if params is None else params
        if self._tool_use is not None:
            self._call_format = _required_format(context)
            if self._needs_tool_grammar(self._tool_use, self._call_format):
                _require_grammar_possible(asked)
                self.params = _params_with_tools(asked, self._tool_use, self._call_format, context)
        self._has_tool_grammar = self.params is not asked
        if call_format is not None and call_format.ends:
            self.params = _params_with_ends(self.params, call_format, context)

    def _needs_tool_grammar(self, use: ToolUse, call_format: ToolCallFormat) -> bool:
        """Whether a grammar must structure the answer: its calls, or the message after reasoning."""
        must_follow_reasoning = call_format.in_messages and self._thinking.budget is not None
        return use.needs_grammar or must_follow_reasoning or self.params.structured_outputs is not None

    @property
    def is_structured_by_tools(self) -> bool:
        """Whether the answer has a grammar because of the tools."""
        return self._tool_use is not None and self._tool_use.needs_grammar

    def note_without_effect(
        self, leniency: Leniency, effort_field: str, switch_field: str | None = None
    ) -> None:
        """Report documents, an effort and a reasoning switch that the chat template does not use.

        Args:
            leniency: collects ignored fields.
            effort_field: path of the field with the effort.
            switch_field: path of the field that turns reasoning on; None: there is none.

        Raises:
            InvalidRequestError: the server is strict.
        """
        template, can_think = self._template, self._reasoning_format is not None
        self._prompt_options.note_documents_without_effect(template, leniency)
        self._thinking.note_effort_without_effect(template, leniency, can_think=can_think, param=effort_field)
        if switch_field is not None:
            self._thinking.note_switch_without_effect(
                template, leniency, can_think=can_think, param=switch_field
            )

    def outputs(self, request_id: str, options: dict[str, Any]) -> OutputStream:
        """Return the engine's outputs.

        Args:
            request_id: id of the engine's request.
            options: options of the engine's request.
        """
        return self._context.llm.chat(self._messages, self.params, **self._arguments(request_id, options))

    async def prepared(self, request_id: str, options: dict[str, Any]) -> ProcessedRequest:
        """Return the engine's request without making it; the arguments are those of `outputs`."""
        arguments = self._arguments(request_id, options)
        return await self._context.llm.prepare_chat(self._messages, self.params, **arguments)

    def _arguments(self, request_id: str, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "request_id": request_id,
            "marks": tuple(self._marks()),
            **self._reasoning_options(),
            **self._template_options(),
            **options,
        }

    async def prompt_tokens(self) -> list[int]:
        """Return the tokens of the prompt."""
        return await self._context.llm.tokenize_chat(self._messages, **self._template_options())

    def _reasoning_options(self) -> dict[str, Any]:
        reasoning_format = self._reasoning_format
        budget = self._thinking.budget
        if reasoning_format is None or (
            budget is None and self.params.structured_outputs is None and not self.params.stop
        ):
            return {}
        message = self._context.config.thinking_budget_message
        control = ReasoningControl(
            reasoning_format,
            budget,
            message,
            self._continued,
            leads_to_content=not self._has_tool_grammar,
        )
        return {"reasoning": control}

    @property
    def _continued(self) -> str:
        """The beginning of the answer, already in the prompt."""
        continues = self._prompt_options.continue_final_message
        return text_of(self._messages[-1].get("content")) if continues else ""

    def _marks(self) -> Iterator[str]:
        """Yield the marks that answers are parsed by, which are shown even if they are special tokens."""
        if self._call_format is not None:
            yield from self._call_format.marks
        if (reasoning_format := self._reasoning_format) is not None:
            yield from reasoning_format.marks

    def _template_options(self) -> dict[str, Any]:
        """Return the chat template's inputs besides the messages."""
        options = template_options(self._body, self._tool_use, self._template, self._reasoning_format)
        return {"call_format": self._context.tool_call_format, **options}

    def observe(self, prompt_index: int, output: RequestOutput) -> None:
        """Find out from the prompt of the first output whether the answer begins with reasoning."""
        reasoning_format = self._reasoning_format
        if reasoning_format is not None and self._reasoning is None:
            self._reasoning = expected_reasoning(reasoning_format, output.prompt or "", self._continued)

    def reader(self, completion: CompletionOutput) -> AnswerReader:
        """Return the reader of one completion's text."""
        reader = self._readers.get(completion.index)
        if reader is None:
            reader = AnswerReader(
                self._call_format,
                self._tool_use,
                self._reasoning,
                content_marks=() if self._reasoning_format is None else self._reasoning_format.content_marks,
                shows_reasoning=self._thinking.is_shown,
                seed=None if self._answer_id is None else f"{self._answer_id}/{completion.index}",
            )
            self._readers[completion.index] = reader
        return reader

    def num_reasoning_tokens(self, completion: CompletionOutput) -> int | None:
        """Return the number of reasoning tokens of a completion so far; None: unknown for this model."""
        if self._reasoning_format is None:
            return None
        if self._reasoning is None:
            return 0
        counter = self._reasoning_tokens.get(completion.index)
        if counter is None:
            tokenizer = self._context.llm.tokenizer
            counter = ReasoningTokens(self._reasoning, tokenizer.token_text, tokenizer.added_token_id)
            self._reasoning_tokens[completion.index] = counter
        return counter.update(completion.token_ids)


def _required_format(context: ServerContext) -> ToolCallFormat:
    """Return the format of the served model's tool calls.

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


def _params_with_ends(
    params: SamplingParams, call_format: ToolCallFormat, context: ServerContext
) -> SamplingParams:
    """Add the format's end marks to the stop parameters."""
    tokenizer = context.llm.tokenizer
    known = {*tokenizer.eos_token_ids, *params.stop_token_ids}
    token_ids = map(tokenizer.added_token_id, call_format.ends)
    more = [token_id for token_id in token_ids if token_id is not None and token_id not in known]
    return dataclasses.replace(params, stop_token_ids=(*params.stop_token_ids, *more)) if more else params


def _require_grammar_possible(params: SamplingParams) -> None:
    """Refuse parameters that are incompatible with a grammar, naming tools as the reason.

    Raises:
        InvalidRequestError: a parameter is incompatible.
    """
    for name in ("beam_width", "min_tokens", "ignore_eos"):
        if value := getattr(params, name):
            raise InvalidRequestError(
                f"{name} is {value!r}, but a grammar enforces tool_choice, parallel_tool_calls, strict or "
                f"the response format; leave {name} or these out",
                param=name,
            )


def _params_with_tools(
    params: SamplingParams, use: ToolUse, call_format: ToolCallFormat, context: ServerContext
) -> SamplingParams:
    """Add what tool use needs to the sampling parameters.

    Stop strings only apply to content, which an answer that must call a tool does not have.

    Raises:
        InvalidRequestError: the tool use cannot be enforced.
    """
    closes_objects = context.llm.config.scheduler.closed_json_objects
    structure = structure_of_answer(
        call_format,
        use.enforceable(closes_objects=closes_objects),
        context.llm.tokenizer.added_token_id,
        content=_enforceable_content(params.structured_outputs, closes_objects=closes_objects),
    )
    stop = () if use.must_call else params.stop
    return dataclasses.replace(params, structured_outputs=structure, stop=stop)


def _enforceable_content(
    content: StructuredOutputsParams | None, *, closes_objects: bool
) -> StructuredOutputsParams | None:
    """Return the structure of an answer without calls, as a grammar can enforce it.

    Raises:
        InvalidRequestError: its schema cannot be enforced.
    """
    if content is None or not isinstance(content.json, str):
        return content
    try:
        schema = enforceable_schema(json.loads(content.json), closes_objects=closes_objects)
    except ValueError as error:
        raise InvalidRequestError(f"the schema cannot be used: {error}", param="structured_outputs") from None
    return dataclasses.replace(content, json=schema)
