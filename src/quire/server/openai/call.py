"""Base of /v1/completions and /v1/chat/completions: the shapes of OpenAI's answers."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from typing_extensions import override

from quire.errors import InvalidRequestError
from quire.front.text.input_processor import ProcessedRequest
from quire.front.text.tokenized_prompt import HEADER, TokenizedPrompt
from quire.request_output import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.server.calls.call import GenerationCall
from quire.server.calls.logprobs import prompt_logprobs
from quire.server.calls.outputs import SequenceProgress, usage_of
from quire.server.openai.bodies import GenerationRequest
from quire.server.wire.answers import (
    SSE_DONE,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    PromptLogprobs,
    RenderedRequest,
    TokenUsage,
    sse_event,
)
from quire.structured_outputs import STRUCTURE_KINDS

_DEFAULTS = SamplingParams()

TOKENS_PER_TURN = 4096
"""Tokens and log-probabilities added to the answer per turn of the event loop."""

RequestT = TypeVar("RequestT", bound=GenerationRequest)


class CompletionsCall(GenerationCall[RequestT]):
    """A call whose answer has one or several choices per prompt."""

    answer_type: ClassVar[type[Completion | ChatCompletion]]
    event_type: ClassVar[type[Completion | ChatCompletionChunk]]

    def __init__(self, request: Request, body: RequestT) -> None:
        super().__init__(request, body)
        self._include_usage = body.include_usage
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}  # by index of the prompt
        self._head: dict[str, Any] = {
            "id": self._id,
            "created": self._created,
            "model": body.model,
            "system_fingerprint": self._context.system_fingerprint,
        }

    @abc.abstractmethod
    async def _choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> Any:
        """Return one choice of a whole answer."""

    @abc.abstractmethod
    async def _opening(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> list[Any]:
        """Return the first event of a streamed choice."""

    @abc.abstractmethod
    async def _continuation(
        self, prompt_index: int, completion: CompletionOutput, new_text: str, first_new_token: int
    ) -> list[Any]:
        """Return the new part of a streamed choice."""

    @abc.abstractmethod
    def _prepared(self, options: dict[str, Any]) -> Sequence[Awaitable[ProcessedRequest]]:
        """Return the engine's requests of the call, one for each prompt, without making them."""

    async def rendered(self) -> list[RenderedRequest]:
        """Return what /inference/v1/generate answers with the same tokens, one for each prompt."""
        options = self._request_options()
        del options["before_submit"]
        return [self._rendered(await prepared) for prepared in self._prepared(options)]

    def _rendered(self, processed: ProcessedRequest) -> RenderedRequest:
        if processed.reasoning is not None:
            raise InvalidRequestError(
                "the answer may begin with reasoning, and what of the request applies only after it "
                "(structured output, stop strings, a thinking budget) cannot be rendered; leave that out"
            )
        options = processed.core_request.options
        return RenderedRequest(
            request_id=processed.request_id,
            token_ids=processed.core_request.prompt_token_ids,
            sampling_params=_given_fields(dataclasses.replace(processed.params, seed=self._params.seed)),
            model=self._context.model_name,
            stream=bool(self._body.stream),
            stream_options=None if (given := self._body.stream_options) is None else given.model_dump(),
            cache_salt=options.cache_salt or None,
            priority=options.priority,
            kv_transfer_params=options.kv_transfer_params,
        )

    @override
    async def whole_answer(self) -> Completion | ChatCompletion:
        ordered = await self._final_outputs()
        choices: list[Any] = []
        num_tokens = 0  # of this turn
        for prompt_index, output in enumerate(ordered):
            if (count := self._body.prompt_logprobs) is not None:
                self._prompt_logprobs[prompt_index] = await prompt_logprobs(output, count)
            for completion in sorted(output.outputs, key=lambda completion: completion.index):
                choices.append(await self._choice(prompt_index, output, completion))
                num_tokens += self._num_tokens(output, completion)
                if num_tokens >= TOKENS_PER_TURN:
                    num_tokens = 0
                    await asyncio.sleep(0)
        return self.answer_type(
            choices=choices,
            usage=self._usage(ordered),
            kv_transfer_params=self._kv_transfer_params(ordered[0]),
            **self._answer_fields(ordered[0]),
            **self._head,
        )

    def _num_tokens(self, output: RequestOutput, completion: CompletionOutput) -> int:
        """Return how many tokens and log-probabilities a choice has."""
        num_positions = len(output.prompt_token_ids) + len(completion.token_ids)
        return num_positions * (1 + (self._params.logprobs or 0))

    @override
    def _request_options(self) -> dict[str, Any]:
        options = super()._request_options()
        for name in ("truncate_prompt_tokens", "truncation_side"):
            if (value := getattr(self._body, name)) is not None:
                options[name] = value
        if (tokenized := self._tokenized()) is not None:
            options["tokenized"] = tokenized
        return options

    def _tokenized(self) -> TokenizedPrompt | None:
        """Return the prompt as a router has tokenized it, if this server would make the same tokens."""
        data: bytes | None = self._request.scope["state"].get("tokenized")
        if data is None:
            return None
        if len(self._request_ids) > 1:
            raise InvalidRequestError(f"{HEADER} is for requests of one prompt", param=HEADER)
        tokenized = TokenizedPrompt.decoded(data)
        return tokenized if tokenized.digest == self._context.prompt_digest else None

    def _answer_fields(self, first: RequestOutput) -> dict[str, Any]:
        """Return more fields of a whole answer."""
        return {}

    def _prompt_fields(self, prompt_index: int, output: RequestOutput) -> dict[str, Any]:
        """Return the fields of a prompt that the client asked for."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        if prompt_index in self._prompt_logprobs:
            fields["prompt_logprobs"] = self._prompt_logprobs[prompt_index]
        return fields

    def _token_ids(self, completion: CompletionOutput, first_token: int) -> list[int] | UnsetType:
        """Return a completion's tokens from `first_token` on, if the client asked for them."""
        if not self._body.return_token_ids:
            return UNSET
        return list(completion.token_ids[first_token:])

    @override
    async def _events(self) -> AsyncGenerator[bytes, None]:
        progress: dict[int, SequenceProgress] = {}
        latest: dict[int, RequestOutput] = {}
        so_far = self._body.includes_usage_so_far
        no_usage = None if self._include_usage else UNSET
        async with self._outputs() as outputs:
            async for prompt_index, output in outputs:
                latest[prompt_index] = output
                usage = self._usage([output]) if so_far else no_usage
                events = [
                    self._event([piece], usage)
                    for completion in output.outputs
                    for piece in await self._pieces(progress, prompt_index, output, completion)
                ]
                if events and output.finished:
                    events[-1].kv_transfer_params = self._kv_transfer_params(output)
                if events:
                    yield b"".join(map(sse_event, events))
        if self._include_usage:
            yield sse_event(self._event([], self._usage(list(latest.values()))))
        yield SSE_DONE

    async def _pieces(
        self,
        progress: dict[int, SequenceProgress],
        prompt_index: int,
        output: RequestOutput,
        completion: CompletionOutput,
    ) -> list[Any]:
        """Return the new part of one sequence, as choices of streamed events."""
        index = self._choice_index(prompt_index, completion)
        pieces: list[Any] = []
        sent = progress.get(index)
        if sent is None:
            if _awaits_prompt_logprobs(output):
                return []
            sent = progress[index] = SequenceProgress()
            pieces += await self._opening(prompt_index, output, completion)
        if not sent.ended:
            new_text, first_new_token = sent.advance(completion)
            pieces += await self._continuation(prompt_index, completion, new_text, first_new_token)
        return pieces

    def _choice_index(self, prompt_index: int, completion: CompletionOutput) -> int:
        return prompt_index * self._params.n + completion.index

    def _usage(self, outputs: Sequence[RequestOutput]) -> TokenUsage:
        return usage_of(outputs)

    def _kv_transfer_params(self, output: RequestOutput) -> Mapping[str, Any] | UnsetType:
        """Return where the KV of the call's prompt is kept; unset with several prompts."""
        if output.kv_transfer_params is None or len(self._request_ids) > 1:
            return UNSET
        return output.kv_transfer_params

    def _event(
        self, choices: list[Any], usage: TokenUsage | UnsetType | None
    ) -> Completion | ChatCompletionChunk:
        return self.event_type(choices=choices, usage=usage, **self._head)


def _given_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of parameters that are not the defaults, as bodies have them."""
    given = {
        field.name: value
        for field in dataclasses.fields(SamplingParams)
        if (value := getattr(params, field.name)) != getattr(_DEFAULTS, field.name)
    }
    if (structure := params.structured_outputs) is not None:
        given["structured_outputs"] = {
            name: value for name in STRUCTURE_KINDS if (value := getattr(structure, name)) is not None
        }
    return given


def _awaits_prompt_logprobs(output: RequestOutput) -> bool:
    """Whether more prompt log-probabilities will follow, as they arrive chunk by chunk."""
    known = output.prompt_logprobs
    return known is not None and len(known) < len(output.prompt_token_ids) and not output.finished
