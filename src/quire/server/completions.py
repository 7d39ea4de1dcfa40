"""POST /v1/completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.request_output import CompletionOutput, RequestOutput
from quire.server.context import ServerContext, context_of, request_id_of
from quire.server.generation import SequenceProgress, end_reason, generate, naming_fields, usage_of
from quire.server.logprobs import CompletionLogprobsWriter, joined
from quire.server.protocol import CompletionRequest
from quire.server.responses import (
    SSE_DONE,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    encode,
    sse_event,
)
from quire.server.streaming import event_stream, unless_disconnected
from quire.server.validation import read_model


async def create_completion(request: Request) -> Response:
    """Answer a completion request, whole or as a stream."""
    context = context_of(request)
    body = await read_model(request, CompletionRequest, max_body_bytes=context.config.max_body_bytes)
    context.require_model(body.model)
    call = _CompletionCall(context, body, request_id_of(request))
    if body.stream:
        return await event_stream(request.receive, call.events(), request_id=request_id_of(request))
    completion = await unless_disconnected(request.receive, call.completion())
    return Response(encode(completion), media_type="application/json")


class _Choice:
    """One choice's progress, and its log-probabilities if they were asked for."""

    __slots__ = ("logprobs", "progress")

    def __init__(self, logprobs: CompletionLogprobsWriter | None) -> None:
        self.progress = SequenceProgress()
        self.logprobs = logprobs


class _CompletionCall:
    """One call: its parameters, and the building of its answer."""

    def __init__(self, context: ServerContext, body: CompletionRequest, request_id: str) -> None:
        self._context = context
        self._body = body
        self._id = f"cmpl-{request_id}"
        self._params = body.sampling_params()
        context.require_room(len(body.prompts) * self._params.num_sequences)
        self._include_usage = body.include_usage
        self._created = int(time.time())

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        body, llm = self._body, self._context.llm
        request_ids = [f"{self._id}/{i}" for i in range(len(body.prompts))]
        streams = [
            llm.generate(
                prompt,
                self._params,
                request_id=request_id,
                **body.request_options(),
            )
            for prompt, request_id in zip(body.prompts, request_ids, strict=True)
        ]
        if len(streams) > 1:
            streams = [
                naming_fields({"prompt": f"prompt[{index}]"}, stream) for index, stream in enumerate(streams)
            ]
        return generate(
            streams,
            call_id=self._id,
            request_ids=request_ids,
            num_sequences=self._params.n,
            lifecycle=self._context.lifecycle,
            metrics=self._context.metrics,
        )

    async def completion(self) -> Completion:
        """Return the whole answer."""
        final: dict[int, RequestOutput] = {}
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                final[prompt_index] = output
        ordered = [final[index] for index in sorted(final)]
        choices = [
            self._whole_choice(prompt_index, output, completion)
            for prompt_index, output in enumerate(ordered)
            for completion in sorted(output.outputs, key=lambda completion: completion.index)
        ]
        answer = self._answer(choices)
        answer.usage = usage_of(ordered, count_completion=not self._body.only_scores_prompt)
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of the answer."""
        choices: dict[int, _Choice] = {}
        latest: dict[int, RequestOutput] = {}
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                latest[prompt_index] = output
                events = b"".join(
                    sse_event(self._answer([piece]))
                    for completion in output.outputs
                    for piece in self._pieces(choices, prompt_index, output, completion)
                )
                if events:
                    yield events
        if self._include_usage:
            last = self._answer([])
            last.usage = usage_of(list(latest.values()), count_completion=not self._body.only_scores_prompt)
            yield sse_event(last)
        yield SSE_DONE

    def _answer(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._context.model_name,
            system_fingerprint=self._context.system_fingerprint,
            choices=choices,
            usage=None if self._include_usage else UNSET,
        )

    def _choice_index(self, prompt_index: int, completion: CompletionOutput) -> int:
        return prompt_index * self._params.n + completion.index

    def _logprobs_writer(self) -> CompletionLogprobsWriter | None:
        if self._body.logprobs is None:
            return None
        return CompletionLogprobsWriter(
            self._context.llm.tokenizer,
            self._body.logprobs,
            skip_special_tokens=self._params.skip_special_tokens,
        )

    def _echoed(
        self, prompt_index: int, output: RequestOutput, writer: CompletionLogprobsWriter | None
    ) -> tuple[str, CompletionLogprobs | None]:
        """Return the prompt's text and its log-probabilities, as they begin an echoing choice."""
        if not self._body.echo:
            return "", None
        prompt = self._body.prompts[prompt_index]
        if not isinstance(prompt, str):
            decode = self._context.llm.tokenizer.decode
            prompt = decode(prompt, skip_special_tokens=self._params.skip_special_tokens)
        return prompt, writer.prompt(output, prompt) if writer else None

    def _whole_choice(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        writer = self._logprobs_writer()
        echoed, logprobs = self._echoed(prompt_index, output, writer)
        index = self._choice_index(prompt_index, completion)
        if self._body.only_scores_prompt:
            return CompletionChoice(index=index, text=echoed, logprobs=logprobs, finish_reason="length")
        generated = writer.output(completion, 0) if writer else None
        return CompletionChoice(
            index=index,
            text=echoed + completion.text,
            logprobs=joined([logprobs, generated]),
            finish_reason=end_reason(completion),
        )

    def _pieces(
        self,
        choices: dict[int, _Choice],
        prompt_index: int,
        output: RequestOutput,
        completion: CompletionOutput,
    ) -> list[CompletionChoice]:
        """Return what is new in one sequence, as choices of streamed events."""
        index = self._choice_index(prompt_index, completion)
        pieces: list[CompletionChoice] = []
        choice = choices.get(index)
        if choice is None:
            choice = choices[index] = _Choice(self._logprobs_writer())
            if self._body.echo:
                text, logprobs = self._echoed(prompt_index, output, choice.logprobs)
                pieces.append(CompletionChoice(index=index, text=text, logprobs=logprobs))
        progress = choice.progress
        if progress.ended:
            return pieces
        text, start = progress.advance(completion)
        if self._body.only_scores_prompt:
            if progress.ended:
                pieces.append(CompletionChoice(index=index, text="", finish_reason="length"))
            return pieces
        logprobs = choice.logprobs.output(completion, start) if choice.logprobs else None
        if text or progress.ended or (logprobs and logprobs.tokens):
            reason = end_reason(completion)
            pieces.append(CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason))
        return pieces
