"""The generation of a response."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from typing_extensions import override

from quire.dialogue.calls.tools import ToolUse
from quire.request_output import CompletionOutput, RequestOutput
from quire.server.calls.call import GenerationCall
from quire.server.calls.conversation import Conversation
from quire.server.calls.logprobs import chat_logprobs
from quire.server.calls.outputs import OutputHook, OutputStream, SequenceProgress
from quire.server.calls.prompt_options import PromptOptions
from quire.server.calls.reasoning import Thinking
from quire.server.context import leniency_of
from quire.server.responses.answers import (
    Completed,
    Created,
    Failed,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    Queued,
    ResponseAnswer,
    ResponseError,
    ResponseEvent,
    ResponseStatus,
    StreamError,
    Usage,
    named_event,
)
from quire.server.responses.body import ResponsesRequest
from quire.server.responses.items import Item, messages_of
from quire.server.responses.keeping import Keeping
from quire.server.responses.output import ResponseOutput
from quire.server.wire.answers import TokenLogprob
from quire.server.wire.errors import ApiError
from quire.status import FinishReason

_FIELD_NAMES = {"prompt": "input", "max_tokens": "max_output_tokens", "structured_outputs": "text.format"}


class _Input:
    """What the model is to answer.

    Args:
        body: of the request.
        items: of the whole conversation.
    """

    def __init__(self, body: ResponsesRequest, items: Sequence[Item]) -> None:
        self._body = body
        self._items = items

    def tool_use(self) -> ToolUse | None:
        """Return which tools the answer may or must call; None: none."""
        return self._body.tool_use()

    def given_messages(self) -> list[dict[str, Any]]:
        """Return the conversation in OpenAI's form of messages."""
        return messages_of(self._body.instructions, self._items)

    def thinking_options(self) -> Thinking:
        """Return how the model is to think."""
        return self._body.thinking_options()

    def prompt_options(self) -> PromptOptions:
        """Return how the conversation becomes a prompt."""
        return PromptOptions()


class ResponsesCall(GenerationCall[ResponsesRequest]):
    """The generation of one response.

    Args:
        request: whose body is `body`.
        body: what the client asks for.
        items: of the whole conversation.
        keeping: stores the response; None: it is not stored.
    """

    id_prefix = "resp"

    def __init__(
        self, request: Request, body: ResponsesRequest, items: Sequence[Item], keeping: Keeping | None
    ) -> None:
        super().__init__(request, body)
        self._id = f"resp_{secrets.token_hex(16)}"  # a client may send the request's id again
        self._keeping = keeping
        self._created_at = int(time.time())
        self._numbers = itertools.count()
        self._conversation = Conversation(self._context, _Input(body, items), self._params)
        self._params = self._conversation.params
        can_think = self._context.thought_format is not None
        template, leniency = self._context.chat_template, leniency_of(request)
        body.thinking_options().note_effort_without_effect(
            template, leniency, can_think=can_think, param="reasoning.effort"
        )

    @property
    def id(self) -> str:
        """The response's id."""
        return self._id

    def _streams(self) -> Sequence[OutputStream]:
        return [self._conversation.outputs(self._engine_id, self._request_options())]

    def _fields(self) -> Sequence[Mapping[str, str]]:
        is_by_tools = self._conversation.is_structured_by_tools
        return [{**_FIELD_NAMES, "structured_outputs": "tools"} if is_by_tools else _FIELD_NAMES]

    @override
    def _hooks(self) -> list[OutputHook]:
        return [self._conversation.observe]

    @override
    async def whole_answer(self) -> ResponseAnswer:
        [output] = await self._final_outputs()
        [completion] = output.outputs
        items = ResponseOutput(self._conversation.reader(completion), self._numbers)
        items.feed(
            completion.text,
            await self._logprobs(completion, 0),
            is_last=True,
            is_complete=not _is_cut_off(completion),
        )
        return await self._ended(output, completion, items.items)

    @override
    async def _events(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self.events()) as pieces:
            async for events in pieces:
                yield b"".join(map(named_event, events))

    def queued_events(self) -> list[ResponseEvent]:
        """Return the events before `events` of a response in the background."""
        queued = self.answer("queued", [])
        return [
            Created(sequence_number=next(self._numbers), response=queued),
            Queued(sequence_number=next(self._numbers), response=queued),
        ]

    async def events(self) -> AsyncGenerator[list[ResponseEvent], None]:
        """Yield the events of the response as it is generated."""
        progress = SequenceProgress()
        items: ResponseOutput | None = None
        async with self._outputs() as outputs:
            async for _, output in outputs:
                [completion] = output.outputs
                events: list[ResponseEvent] = []
                if items is None:
                    items = ResponseOutput(self._conversation.reader(completion), self._numbers)
                    begun = self.answer("in_progress", [])
                    if not self._body.background:
                        events.append(Created(sequence_number=next(self._numbers), response=begun))
                    events.append(InProgress(sequence_number=next(self._numbers), response=begun))
                new_text, first_new_token = progress.advance(completion)
                events += items.feed(
                    new_text,
                    await self._logprobs(completion, first_new_token),
                    is_last=completion.finished,
                    is_complete=not _is_cut_off(completion),
                )
                if completion.finished:
                    ended = await self._ended(output, completion, items.items)
                    last = Completed if ended.status == "completed" else Incomplete
                    events.append(last(sequence_number=next(self._numbers), response=ended))
                if events:
                    yield events

    @override
    def _error_event(self, error: ApiError) -> bytes:
        return b"".join(map(named_event, self.failure_events(error)))

    def failure_events(self, error: ApiError) -> list[ResponseEvent]:
        """Return the last events of a response that has failed."""
        told = StreamError(
            sequence_number=next(self._numbers),
            code=error.code or error.kind,
            message=error.message,
            param=error.param,
        )
        last = Failed(sequence_number=next(self._numbers), response=self.failed(error))
        return [told, last]

    async def _logprobs(self, completion: CompletionOutput, first_token: int) -> list[TokenLogprob]:
        tokenizer = self._context.llm.tokenizer
        written = await chat_logprobs(tokenizer, completion, first_token, self._body.top_logprobs or 0)
        return [] if written is None else written.content

    async def _ended(
        self, output: RequestOutput, completion: CompletionOutput, items: list[OutputItem]
    ) -> ResponseAnswer:
        answer = self.answer("completed", items)
        if _is_cut_off(completion):
            answer.status = "incomplete"
            answer.incomplete_details = IncompleteDetails("max_output_tokens")
        num_input, num_output = len(output.prompt_token_ids), len(completion.token_ids)
        answer.usage = Usage(
            input_tokens=num_input,
            input_tokens_details=InputTokensDetails(output.num_cached_tokens),
            output_tokens=num_output,
            output_tokens_details=OutputTokensDetails(self._conversation.num_thought_tokens(completion) or 0),
            total_tokens=num_input + num_output,
        )
        if self._keeping is not None:
            await self._keeping.keep(answer)
        return answer

    def failed(self, error: ApiError) -> ResponseAnswer:
        """Return the response as it is after a failure."""
        failed = self.answer("failed", [])
        failed.error = ResponseError(error.code or error.kind, error.message)
        return failed

    def answer(self, status: ResponseStatus, items: list[OutputItem]) -> ResponseAnswer:
        """Return the response in a status, with the items that it has."""
        body = self._body
        text = {} if body.text is None else _dumped(body.text)
        return ResponseAnswer(
            id=self._id,
            created_at=self._created_at,
            status=status,
            background=bool(body.background),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=body.model,
            output=items,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning={} if body.reasoning is None else _dumped(body.reasoning),
            store=self._keeping is not None,
            temperature=self._params.temperature,
            text={"format": {"type": "text"}, **text},
            tool_choice=_dumped(body.tool_choice) or "auto",
            tools=[_dumped(tool) for tool in body.tools or ()],
            top_logprobs=body.top_logprobs or 0,
            top_p=self._params.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
        )


def _is_cut_off(completion: CompletionOutput) -> bool:
    return completion.finish_reason is FinishReason.LENGTH


def _dumped(value: Any) -> Any:
    """Return a part of the body as it came."""
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_unset=True)
    return value
