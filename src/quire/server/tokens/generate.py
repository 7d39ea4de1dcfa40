"""vLLM's POST /inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated

from pydantic import Field, create_model
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from quire.errors import InvalidRequestError
from quire.request_output import CompletionOutput
from quire.sampling_params import SamplingParams, TokenId
from quire.server.calls.call import GenerationCall
from quire.server.calls.logprobs import prompt_logprobs, token_id_logprobs
from quire.server.calls.outputs import OutputStream, SequenceProgress, end_reason, usage_of
from quire.server.openai.bodies import OptionFields, SharedSamplingFields
from quire.server.sampling_defaults import SamplingDefaults
from quire.server.wire.answers import (
    SSE_DONE,
    GeneratedTokens,
    GeneratedTokensChoice,
    GeneratedTokensEvent,
    sse_event,
)
from quire.server.wire.other_names import NAMES_IN_COMPLETIONS
from quire.server.wire.strict_model import Unsupported, body_fields

_OwnFields = create_model(
    "_OwnFields",
    __base__=SharedSamplingFields,
    **body_fields(SamplingParams, exclude=SharedSamplingFields.model_fields),
)


class SamplingFields(_OwnFields):  # type: ignore[valid-type, misc]
    """Sampling parameters as a field of a body."""

    path_prefix = "sampling_params."
    names_of_other_servers = NAMES_IN_COMPLETIONS


class GenerateRequest(OptionFields):
    """Body of POST /inference/v1/generate, as /render returns it."""

    model: str | None = Field(None, description="The served model's name. Default: the only one.")
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Returned with the answer. Default: the request's X-Request-Id."
    )
    token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1)] = Field(
        description="The prompt."
    )
    parameters: SamplingFields = Field(
        default_factory=SamplingFields,
        alias="sampling_params",
        description="Sampling parameters. Default: the server's; max_tokens: as many as fit.",
    )
    features: Unsupported = None

    @override
    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        params = defaults.params(self.parameters.sampling_fields())
        if self.stream and (params.is_ranked or params.prompt_logprobs is not None):
            raise InvalidRequestError(
                "stream is true, but prompt_logprobs and ranked completions (beam_width, best_of) are only "
                "in whole answers; set stream to false",
                param="stream",
            )
        return params


async def generate(request: Request, body: GenerateRequest) -> Response:
    """Generate tokens from token ids, whole or (with `stream`) as server-sent events."""
    return await _GenerateCall(request, body).response()


class _GenerateCall(GenerationCall[GenerateRequest]):
    id_prefix = "generate"
    operation = "text_completion"

    def __init__(self, request: Request, body: GenerateRequest) -> None:
        super().__init__(request, body)
        self._request_id = body.request_id or self._id
        self._include_usage = body.include_usage

    def _streams(self) -> Sequence[OutputStream]:
        options = self._request_options()
        return [
            self._context.llm.generate(
                self._body.token_ids, self._params, request_id=self._engine_id, **options
            )
        ]

    def _fields(self) -> Sequence[Mapping[str, str]]:
        own = {name: SamplingFields.path_prefix + name for name in SamplingFields.model_fields}
        return [{"prompt": "token_ids", **own}]

    @override
    async def whole_answer(self) -> GeneratedTokens:
        [output] = await self._final_outputs()
        choices = []
        for completion in sorted(output.outputs, key=lambda one: one.index):
            choices.append(await self._choice(completion, 0))
            await asyncio.sleep(0)
        count = self._params.prompt_logprobs
        return GeneratedTokens(
            request_id=self._request_id,
            model=self._context.model_name,
            created=int(time.time()),
            choices=choices,
            usage=usage_of([output]),
            prompt_logprobs=None if count is None else await prompt_logprobs(output, count),
            kv_transfer_params=output.kv_transfer_params,
        )

    @override
    async def _events(self) -> AsyncGenerator[bytes, None]:
        progress: defaultdict[int, SequenceProgress] = defaultdict(SequenceProgress)
        so_far, usage = self._body.includes_usage_so_far, None
        async with self._outputs() as outputs:
            async for _, output in outputs:
                usage = usage_of([output])
                choices = []
                for completion in output.outputs:
                    sent = progress[completion.index]
                    if not sent.ended:
                        _, first = sent.advance(completion)
                        choices.append(await self._choice(completion, first))
                event = self._event([one for one in choices if one.token_ids or one.finish_reason])
                if so_far:
                    event.usage = usage
                if output.finished and output.kv_transfer_params is not None:
                    event.kv_transfer_params = output.kv_transfer_params
                if event.choices:
                    yield sse_event(event)
        if self._include_usage:
            event = self._event([])
            event.usage = usage
            yield sse_event(event)
        yield SSE_DONE

    def _event(self, choices: list[GeneratedTokensChoice]) -> GeneratedTokensEvent:
        return GeneratedTokensEvent(request_id=self._request_id, choices=choices)

    async def _choice(self, completion: CompletionOutput, first_token: int) -> GeneratedTokensChoice:
        return GeneratedTokensChoice(
            index=completion.index,
            token_ids=list(completion.token_ids[first_token:]),
            logprobs=await token_id_logprobs(completion, first_token, self._params.logprobs or 0),
            finish_reason=end_reason(completion),
        )
