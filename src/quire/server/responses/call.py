"""The generation of a response."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel
from starlette.requests import Request
from typing_extensions import override

from quire.errors import InvalidRequestError
from quire.request_output import CompletionOutput, RequestOutput
from quire.server.calls.call import ConversationCall
from quire.server.calls.outputs import SequenceProgress
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
from quire.server.wire.bodies import CONTINUATION
from quire.server.wire.errors import ApiError
from quire.status import FinishReason


class ResponsesCall(ConversationCall[ResponsesRequest]):
    """The generation of one response.

    Args:
        request: the HTTP request.
        body: its parsed body.
        items: all items of the conversation.
        keeping: stores the response; None: it is not stored.
    """

    id_prefix = "resp"
    prompt_field = "input"
    effort_field = "reasoning.effort"
    other_fields: ClassVar[Mapping[str, str]] = {"max_tokens": "max_output_tokens"}
    _structure_field = "text.format"

    def __init__(
        self, request: Request, body: ResponsesRequest, items: Sequence[Item], keeping: Keeping | None
    ) -> None:
        super().__init__(request, body)
        if self._so_far is None:
            self._id = f"resp_{secrets.token_hex(16)}"  # clients may reuse the request's id
        elif body.background:  # else it would replace a live response of the same id before it is refused
            raise InvalidRequestError(
                "a response in the background cannot be continued; leave out background", param=CONTINUATION
            )
        self._keeping = keeping
        self._numbers = itertools.count()
        self._converse(body, messages_of(body.instructions, items))
        self._conversation.note_without_effect(self._leniency, self.effort_field)

    @property
    def id(self) -> str:
        """The response's id."""
        return self._id

    @override
    async def whole_answer(self) -> ResponseAnswer:
        [output] = await self._final_outputs()
        [completion] = output.outputs
        items = ResponseOutput(self._conversation.reader(completion), self._numbers)
        items.feed(completion.text, completion, await self._logprobs(completion, 0))
        return await self._ended(output, completion, items.items)

    @override
    async def _events(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self.events()) as pieces:
            async for events in pieces:
                yield b"".join(map(named_event, events))

    @override
    def _is_continuable(self) -> bool:
        """Whether another server makes the same events: the last ones repeat all log-probabilities."""
        return super()._is_continuable() and self._params.logprobs is None and not self._body.background

    def queued_events(self) -> list[ResponseEvent]:
        """Return the events that precede `events` for a background response."""
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
                events += items.feed(new_text, completion, await self._logprobs(completion, first_new_token))
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
        """Return the last events of a failed response."""
        told = StreamError(
            sequence_number=next(self._numbers),
            code=error.code or error.kind,
            message=error.message,
            param=error.param,
        )
        last = Failed(sequence_number=next(self._numbers), response=self.failed(error))
        return [told, last]

    async def _logprobs(self, completion: CompletionOutput, first_token: int) -> list[TokenLogprob]:
        written = await self._chat_logprobs(completion, first_token)
        return [] if written is None else written.content

    async def _ended(
        self, output: RequestOutput, completion: CompletionOutput, items: list[OutputItem]
    ) -> ResponseAnswer:
        answer = self.answer("completed", items)
        if completion.finish_reason is FinishReason.LENGTH:
            answer.status = "incomplete"
            answer.incomplete_details = IncompleteDetails("max_output_tokens")
        num_input, num_output = len(output.prompt_token_ids), len(completion.token_ids)
        answer.usage = Usage(
            input_tokens=num_input,
            input_tokens_details=InputTokensDetails(output.num_cached_tokens),
            output_tokens=num_output,
            output_tokens_details=OutputTokensDetails(
                self._conversation.num_reasoning_tokens(completion) or 0
            ),
            total_tokens=num_input + num_output,
        )
        if self._keeping is not None:
            await self._keeping.keep(answer)
        return answer

    def failed(self, error: ApiError) -> ResponseAnswer:
        """Return the failed response."""
        failed = self.answer("failed", [])
        failed.error = ResponseError(error.code or error.kind, error.message)
        return failed

    def answer(self, status: ResponseStatus, items: list[OutputItem]) -> ResponseAnswer:
        """Return the response with this status and these items."""
        body = self._body
        text = {} if body.text is None else _dumped(body.text)
        return ResponseAnswer(
            id=self._id,
            created_at=self._created,
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


def _dumped(value: Any) -> Any:
    """Return a part of the body as plain data."""
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_unset=True)
    return value
