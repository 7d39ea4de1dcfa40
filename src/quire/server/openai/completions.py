"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from quire.errors import InvalidRequestError
from quire.front.text.detokenizer import DecoderFactory
from quire.front.text.input_processor import ProcessedRequest
from quire.request_output import CompletionOutput, RequestOutput
from quire.server.calls.logprobs import CompletionLogprobsWriter, joined
from quire.server.calls.outputs import OutputStream, end_reason, without_output
from quire.server.openai.bodies import CompletionRequest
from quire.server.openai.call import CompletionsCall
from quire.server.wire.answers import Completion, CompletionChoice, CompletionLogprobs


async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue one or several prompts, whole or (with `stream`) as server-sent events."""
    return await CompletionCall(request, body).response()


class CompletionCall(CompletionsCall[CompletionRequest]):
    """A call of /v1/completions."""

    id_prefix = "cmpl"
    operation = "text_completion"
    answer_type = event_type = Completion

    def __init__(self, request: Request, body: CompletionRequest) -> None:
        super().__init__(request, body)
        self._context.require_room(len(body.prompts) * self._params.num_sequences)
        if body.kv_transfer_params is not None and len(body.prompts) > 1:
            raise InvalidRequestError(
                f"kv_transfer_params applies to one prompt's KV, but there are {len(body.prompts)} prompts; "
                "send a request for each",
                param="kv_transfer_params",
            )
        self._starts: dict[int, Sequence[int] | None] = {}  # by index of the prompt
        self._writers: dict[int, CompletionLogprobsWriter] = {}  # by index of the choice

    @functools.cached_property
    def _request_ids(self) -> Sequence[str]:
        return [f"{self._engine_id}/{index}" for index in range(len(self._body.prompts))]

    def _streams(self) -> Sequence[OutputStream]:
        options = self._request_options()
        streams: list[OutputStream] = [
            self._context.llm.generate(prompt, self._params, request_id=request_id, **options)
            for prompt, request_id in zip(self._body.prompts, self._request_ids, strict=True)
        ]
        if self._body.only_scores_prompt:
            streams = [without_output(stream) for stream in streams]
        return streams

    def _prepared(self, options: dict[str, Any]) -> Sequence[Awaitable[ProcessedRequest]]:
        return [
            self._context.llm.prepare(prompt, self._params, request_id=request_id, **options)
            for prompt, request_id in zip(self._body.prompts, self._request_ids, strict=True)
        ]

    @override
    def _request_options(self) -> dict[str, Any]:
        options = super()._request_options()
        if self._body.add_special_tokens is not None:
            options["add_special_tokens"] = self._body.add_special_tokens
        return options

    def _fields(self) -> Sequence[Mapping[str, str]]:
        num_prompts = len(self._body.prompts)
        return [{"prompt": f"prompt[{index}]"} if num_prompts > 1 else {} for index in range(num_prompts)]

    async def _choice(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        text, logprobs = await self._echoed(prompt_index, output, completion)
        index = self._choice_index(prompt_index, completion)
        return CompletionChoice(
            index=index,
            text=text + completion.text,
            logprobs=joined([logprobs, await self._logprobs(prompt_index, completion, 0)]),
            finish_reason=end_reason(completion),
            token_ids=self._token_ids(completion, 0),
            **self._prompt_fields(prompt_index, output),
        )

    async def _opening(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> list[CompletionChoice]:
        text, logprobs = await self._echoed(prompt_index, output, completion)
        if not (self._body.echo or self._body.return_token_ids):
            return []
        index = self._choice_index(prompt_index, completion)
        fields = self._prompt_fields(prompt_index, output)
        return [CompletionChoice(index=index, text=text, logprobs=logprobs, **fields)]

    async def _continuation(
        self, prompt_index: int, completion: CompletionOutput, new_text: str, first_new_token: int
    ) -> list[CompletionChoice]:
        index = self._choice_index(prompt_index, completion)
        reason = end_reason(completion)
        if self._body.only_scores_prompt:
            return [CompletionChoice(index=index, text="", finish_reason=reason)] if reason else []
        logprobs = await self._logprobs(prompt_index, completion, first_new_token)
        token_ids = self._token_ids(completion, first_new_token)
        if not (new_text or reason or token_ids or (logprobs and logprobs.tokens)):
            return []
        return [
            CompletionChoice(
                index=index, text=new_text, logprobs=logprobs, finish_reason=reason, token_ids=token_ids
            )
        ]

    async def _echoed(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> tuple[str, CompletionLogprobs | None]:
        """Return the prompt's text and log-probabilities, with which an echoing choice begins."""
        writer = self._new_writer(prompt_index, output, completion)
        if not self._body.echo:
            return "", None
        tokenizer, token_ids = self._context.llm.tokenizer, output.prompt_token_ids
        starts = None
        if isinstance(self._body.prompts[prompt_index], str):
            prompt = output.prompt or ""
            if writer:
                starts = await self._token_starts(prompt_index, prompt, token_ids)
        else:
            prompt = tokenizer.decode(token_ids, skip_special_tokens=self._params.skip_special_tokens)
        return prompt, await writer.prompt(output, prompt, starts) if writer else None

    async def _token_starts(
        self, prompt_index: int, prompt: str, token_ids: Sequence[int]
    ) -> Sequence[int] | None:
        """Return the text offsets of an echoed prompt's tokens, shared by its choices."""
        if prompt_index not in self._starts:
            places = asyncio.to_thread(self._context.llm.tokenizer.token_starts, prompt, token_ids)
            self._starts[prompt_index] = await places
        return self._starts[prompt_index]

    async def _logprobs(
        self, prompt_index: int, completion: CompletionOutput, first_token: int
    ) -> CompletionLogprobs | None:
        writer = self._writers.get(self._choice_index(prompt_index, completion))
        return await writer.output(completion, first_token) if writer else None

    def _new_writer(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionLogprobsWriter | None:
        """Return the writer of a new choice, which tracks the text offset."""
        if self._body.logprobs is None:
            return None
        writer = CompletionLogprobsWriter(
            self._context.llm.tokenizer,
            self._decoders,
            self._body.logprobs,
            prompt_token_ids=output.prompt_token_ids,
            skip_special_tokens=self._params.skip_special_tokens,
            is_verbatim=self._params.is_verbatim,
            names_ids=bool(self._body.return_tokens_as_token_ids),
        )
        self._writers[self._choice_index(prompt_index, completion)] = writer
        return writer

    @functools.cached_property
    def _decoders(self) -> DecoderFactory:
        return DecoderFactory(self._context.llm.tokenizer)
