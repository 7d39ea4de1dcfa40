"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from quire.request_output import CompletionOutput, RequestOutput
from quire.server.generation import OutputStream, end_reason, naming_fields
from quire.server.generation_call import GenerationCall
from quire.server.logprobs import chat_logprobs
from quire.server.protocol import ChatCompletionRequest
from quire.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
)


async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation, whole or, with `stream`, as server-sent events."""
    return await _ChatCall(request, body).response()


class _ChatCall(GenerationCall[ChatCompletionRequest]):
    id_prefix = "chatcmpl"
    answer_type = ChatCompletion
    event_type = ChatCompletionChunk

    @property
    def _request_ids(self) -> Sequence[str]:
        return [self._engine_id]

    def _streams(self) -> Sequence[OutputStream]:
        body = self._body
        stream = self._context.llm.chat(
            [message.for_template() for message in body.messages],
            self._params,
            request_id=self._engine_id,
            **self._request_options(),
        )
        fields = {"prompt": "messages"}
        if body.response_format is not None and body.structured_outputs is None:
            fields["structured_outputs"] = "response_format"
        return [naming_fields(fields, stream)]

    def _logprobs(self, completion: CompletionOutput, first_token: int) -> ChatLogprobs | None:
        return chat_logprobs(completion, first_token, self._body.top_logprobs or 0)

    def _choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=completion.index,
            message=AssistantMessage(content=completion.text),
            logprobs=self._logprobs(completion, 0),
            finish_reason=end_reason(completion),
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
        pieces = []
        logprobs = self._logprobs(completion, first_new_token)
        if new_text or (logprobs and logprobs.content):
            pieces.append(ChatChunkChoice(index=index, delta=ChatDelta(content=new_text), logprobs=logprobs))
        if reason := end_reason(completion):
            pieces.append(ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason))
        return pieces
