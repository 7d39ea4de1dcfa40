"""What /v1/completions and /v1/chat/completions have in common: one call, answered whole or as a stream."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.request_output import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.server.access_log import access_record_of
from quire.server.context import context_of, request_id_of, tenant_of
from quire.server.generation import OutputStream, SequenceProgress, generate, usage_of
from quire.server.protocol import GenerationRequest
from quire.server.responses import (
    SSE_DONE,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    TokenUsage,
    json_response,
    sse_event,
)
from quire.server.streaming import event_stream, unless_disconnected

PROMPTS_PER_TURN = 32
"""Prompts whose part of the answer is made in one turn of the event loop."""

if TYPE_CHECKING:
    from quire.front.input_processor import ProcessedRequest

BodyT = TypeVar("BodyT", bound=GenerationRequest)


class GenerationCall(abc.ABC, Generic[BodyT]):
    """One call: its parameters, and the building of its answer.

    Args:
        request: whose body is `body`.
        body: what the client asks for.

    Raises:
        ApiError: 404, another model is asked for; 403, the tenant has no right to what is asked for.
        InvalidRequestError: parameters that are out of range or contradict each other.
    """

    id_prefix: ClassVar[str]
    answer_type: ClassVar[type[Completion | ChatCompletion]]
    event_type: ClassVar[type[Completion | ChatCompletionChunk]]

    def __init__(self, request: Request, body: BodyT) -> None:
        self._request = request
        self._body = body
        self._context = context_of(request)
        self._context.require_model(body.model)
        self._id = f"{self.id_prefix}-{request_id_of(request)}"
        self._tenant = tenant_of(request)
        self._admit: Callable[[ProcessedRequest], Awaitable[None]] | None = None
        if body.kv_transfer_params is not None:
            self._tenant.require_kv_transfer()
        self._params = self._within_model(body.sampling_params())
        self._include_usage = body.include_usage
        self._head: dict[str, Any] = {
            "id": self._id,
            "created": int(time.time()),
            "model": self._context.model_name,
            "system_fingerprint": self._context.system_fingerprint,
        }

    def _within_model(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with no more output tokens than the model's maximum length, unless it is strict."""
        longest = self._context.llm.info.max_model_len
        if self._context.config.strict or (params.max_tokens or 0) <= longest:
            return params
        return dataclasses.replace(params, max_tokens=longest)

    @property
    def _engine_id(self) -> str:
        """The call's id, as no other tenant's call has it."""
        return self._tenant.engine_id(self._id)

    def _request_options(self) -> dict[str, Any]:
        """Return options of the engine's requests: the client's, and its tenant's."""
        options = self._tenant.request_options(self._body.request_options())
        if not self._context.config.strict:
            options["shorten_output"] = True
        return options if self._admit is None else {**options, "before_submit": self._admit}

    @property
    @abc.abstractmethod
    def _request_ids(self) -> Sequence[str]:
        """The engine's ids, one for each prompt."""

    @abc.abstractmethod
    def _streams(self) -> Sequence[OutputStream]:
        """Return the engine's outputs, one stream for each prompt."""

    @abc.abstractmethod
    def _choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> Any:
        """Return one choice of a whole answer."""

    @abc.abstractmethod
    def _opening(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> list[Any]:
        """Return what a streamed choice begins with."""

    @abc.abstractmethod
    def _continuation(
        self, prompt_index: int, completion: CompletionOutput, new_text: str, first_new_token: int
    ) -> list[Any]:
        """Return what is new in a streamed choice."""

    async def response(self) -> Response:
        """Answer the call, whole or as a stream.

        Raises:
            ClientGoneError: the client left first.
            QuireError: what the engine refused the call with, or ended it with.
        """
        receive = self._request.receive
        if self._body.stream:
            return await event_stream(receive, self._events(), request_id=request_id_of(self._request))
        answer = await unless_disconnected(receive, self._whole_answer())
        return json_response(answer)

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        return self._limited_outputs() if self._tenant.usage.has_limits else self._generate()

    async def _limited_outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Like `_generate`, within the limits of the tenant."""
        params, request_ids = self._params, self._request_ids
        num_sequences = max(params.num_sequences, params.beam_width)
        with self._tenant.usage.call(
            len(request_ids),
            num_sequences,
            len(request_ids) * (1 + num_sequences * (params.max_tokens or 1)),
            has_grammar=params.structured_outputs is not None,
        ) as call:
            self._admit = call.admit
            async with contextlib.aclosing(self._generate()) as outputs:
                async for prompt_index, output in outputs:
                    call.note(request_ids[prompt_index], output)
                    yield prompt_index, output

    def _generate(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        return generate(
            self._streams(),
            call_id=self._engine_id,
            request_ids=self._request_ids,
            num_sequences=self._params.n,
            calls=self._context.calls,
            metrics=self._context.metrics,
            access_record=access_record_of(self._request.scope),
        )

    async def _whole_answer(self) -> Completion | ChatCompletion:
        final: dict[int, RequestOutput] = {}
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                final[prompt_index] = output
        ordered = [final[index] for index in sorted(final)]
        choices: list[Any] = []
        for prompt_index, output in enumerate(ordered):
            completions = sorted(output.outputs, key=lambda completion: completion.index)
            choices += [self._choice(prompt_index, output, completion) for completion in completions]
            if prompt_index % PROMPTS_PER_TURN == PROMPTS_PER_TURN - 1:
                await asyncio.sleep(0)
        return self.answer_type(
            choices=choices,
            usage=self._usage(ordered),
            kv_transfer_params=self._kv_transfer_params(ordered[0]),
            **self._head,
        )

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of the answer."""
        progress: dict[int, SequenceProgress] = {}
        latest: dict[int, RequestOutput] = {}
        so_far = self._body.includes_usage_so_far
        no_usage = None if self._include_usage else UNSET
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                latest[prompt_index] = output
                usage = self._usage([output]) if so_far else no_usage
                events = [
                    self._event([piece], usage)
                    for completion in output.outputs
                    for piece in self._pieces(progress, prompt_index, output, completion)
                ]
                if events and output.finished:
                    events[-1].kv_transfer_params = self._kv_transfer_params(output)
                if events:
                    yield b"".join(map(sse_event, events))
        if self._include_usage:
            yield sse_event(self._event([], self._usage(list(latest.values()))))
        yield SSE_DONE

    def _pieces(
        self,
        progress: dict[int, SequenceProgress],
        prompt_index: int,
        output: RequestOutput,
        completion: CompletionOutput,
    ) -> list[Any]:
        """Return what is new in one sequence, as choices of streamed events."""
        index = self._choice_index(prompt_index, completion)
        pieces: list[Any] = []
        sent = progress.get(index)
        if sent is None:
            sent = progress[index] = SequenceProgress()
            pieces += self._opening(prompt_index, output, completion)
        if not sent.ended:
            new_text, first_new_token = sent.advance(completion)
            pieces += self._continuation(prompt_index, completion, new_text, first_new_token)
        return pieces

    def _choice_index(self, prompt_index: int, completion: CompletionOutput) -> int:
        return prompt_index * self._params.n + completion.index

    def _usage(self, outputs: Sequence[RequestOutput]) -> TokenUsage:
        return usage_of(outputs, count_completion=not self._body.only_scores_prompt)

    def _kv_transfer_params(self, output: RequestOutput) -> Mapping[str, Any] | UnsetType:
        """Return where the KV of the call's prompt is kept; of several prompts, nothing is said."""
        if output.kv_transfer_params is None or len(self._request_ids) > 1:
            return UNSET
        return output.kv_transfer_params

    def _event(
        self, choices: list[Any], usage: TokenUsage | UnsetType | None
    ) -> Completion | ChatCompletionChunk:
        return self.event_type(choices=choices, usage=usage, **self._head)
