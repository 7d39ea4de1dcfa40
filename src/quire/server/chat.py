"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.dialogue.formats import ToolCallFormat
from quire.request_output import CompletionOutput, RequestOutput
from quire.server.completions_call import CompletionsCall
from quire.server.generation import OutputStream, end_reason, naming_fields
from quire.server.logprobs import chat_logprobs
from quire.server.protocol import ChatCompletionRequest
from quire.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatEndReason,
    ChatLogprobs,
)
from quire.server.template_messages import messages_for_template
from quire.server.tool_answers import ToolAnswer, known_format, params_with_tools, tool_call_format


async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation, whole or, with `stream`, as server-sent events."""
    return await _ChatCall(request, body).response()


class _ChatCall(CompletionsCall[ChatCompletionRequest]):
    id_prefix = "chatcmpl"
    answer_type = ChatCompletion
    event_type = ChatCompletionChunk

    def __init__(self, request: Request, body: ChatCompletionRequest) -> None:
        super().__init__(request, body)
        self._tool_use = body.tool_use()
        self._call_format: ToolCallFormat | None = None
        self._answers: dict[int, ToolAnswer] = {}  # by index of the choice
        if self._tool_use is not None:
            self._call_format = tool_call_format(self._context)
            self._params = params_with_tools(self._params, self._tool_use, self._call_format, self._context)

    @property
    def _request_ids(self) -> Sequence[str]:
        return [self._engine_id]

    def _streams(self) -> Sequence[OutputStream]:
        body = self._body
        stream = self._context.llm.chat(
            messages_for_template(body.messages, self._format_of_messages()),
            self._params,
            request_id=self._engine_id,
            **self._tool_options(),
            **self._request_options(),
        )
        fields = {"prompt": "messages"}
        if self._tool_use is not None and self._tool_use.needs_grammar:
            fields["structured_outputs"] = "tools"
        elif body.response_format is not None and body.structured_outputs is None:
            fields["structured_outputs"] = "response_format"
        return [naming_fields(fields, stream)]

    def _format_of_messages(self) -> ToolCallFormat | None:
        has_calls = any(message.tool_calls for message in self._body.messages)
        return known_format(self._context) if has_calls else None

    def _tool_options(self) -> dict[str, Any]:
        if self._tool_use is None or self._call_format is None:
            return {}
        tools = [tool.for_template() for tool in self._tool_use.tools]
        return {"tools": tools, "marks": self._call_format.marks}

    def _answer(self, completion: CompletionOutput) -> ToolAnswer | None:
        """Return the reader of one choice, if it may call tools."""
        if self._tool_use is None or self._call_format is None:
            return None
        if completion.index not in self._answers:
            self._answers[completion.index] = ToolAnswer(self._call_format, self._tool_use)
        return self._answers[completion.index]

    def _end_reason(self, completion: CompletionOutput) -> ChatEndReason | None:
        reason = end_reason(completion)
        answer = self._answers.get(completion.index)
        return "tool_calls" if reason == "stop" and answer is not None and answer.has_calls else reason

    def _logprobs(self, completion: CompletionOutput, first_token: int) -> ChatLogprobs | None:
        return chat_logprobs(completion, first_token, self._body.top_logprobs or 0)

    def _choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> ChatChoice:
        answer = self._answer(completion)
        text = completion.text
        return ChatChoice(
            index=completion.index,
            message=AssistantMessage(content=text) if answer is None else answer.message(text),
            logprobs=self._logprobs(completion, 0),
            finish_reason=self._end_reason(completion),
        )

    def _opening(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> list[ChatChunkChoice]:
        delta = ChatDelta(role="assistant", content="")
        return [ChatChunkChoice(index=completion.index, delta=delta)]

    def _continuation(
        self, prompt_index: int, completion: CompletionOutput, new_text: str, first_new_token: int
    ) -> list[ChatChunkChoice]:
        index = completion.index
        logprobs = self._logprobs(completion, first_new_token)
        deltas = self._deltas(completion, new_text)
        if not deltas and logprobs and logprobs.content:
            deltas = [ChatDelta(content="")]
        pieces = [ChatChunkChoice(index=index, delta=delta) for delta in deltas]
        if pieces:
            pieces[0].logprobs = logprobs
        if reason := self._end_reason(completion):
            pieces.append(ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason))
        return pieces

    def _deltas(self, completion: CompletionOutput, new_text: str) -> list[ChatDelta]:
        answer = self._answer(completion)
        if answer is not None:
            return answer.deltas(new_text, is_last=completion.finish_reason is not None)
        return [ChatDelta(content=new_text)] if new_text else []
