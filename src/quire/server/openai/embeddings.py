"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from quire.pooling_params import PoolingParams
from quire.request_options import RequestOptions, ShortText
from quire.request_output import CompletionOutput, PoolingRequestOutput, RequestOutput
from quire.sampling_params import ONE_TOKEN, SamplingParams
from quire.server.calls.call import GenerationCall
from quire.server.calls.outputs import OutputStream
from quire.server.openai.bodies import OptionFields, TokenIds, prompt_form
from quire.server.sampling_defaults import SamplingDefaults
from quire.server.wire.answers import Embedding, EmbeddingList, EmbeddingUsage
from quire.server.wire.strict_model import Unsupported, optional_field

MAX_INPUTS = 2048  # as OpenAI's
NUMBERS_PER_TURN = 65_536
"""Numbers that are added to the answer per turn of the event loop."""

_Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
_TokenLists = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
Inputs = Annotated[
    Annotated[str, Tag("=text")]
    | Annotated[_Texts, Tag("=texts")]
    | Annotated[TokenIds, Tag("=tokens")]
    | Annotated[_TokenLists, Tag("=token_lists")],
    Discriminator(
        prompt_form,
        custom_error_type="form",
        custom_error_message="it must be text, token ids, or a list of either",
    ),
]


class EmbeddingRequest(OptionFields):
    """Body of POST /v1/embeddings."""

    model: str = Field(description="The served model's name, as /v1/models lists it.")
    input: Inputs = Field(
        description=f"Text, token ids, or a list of either, which may have {MAX_INPUTS} entries."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Numbers, or the bytes of float32, little-endian, in base64. Default: float."
    )
    dimensions: int | None = optional_field(PoolingParams, "dimensions")
    user: ShortText | None = optional_field(RequestOptions, "tenant")
    add_special_tokens: bool | None = Field(
        None, description="Add the model's special tokens to texts. Default: true."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="Number of tokens to keep of each input; -1: as many as fit. Default: all."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Which side truncate_prompt_tokens cuts off. Default: right."
    )
    stream: Unsupported = None
    stream_options: Unsupported = None

    @property
    def inputs(self) -> Sequence[str | Sequence[int]]:
        """The inputs, of which there is at least one."""
        given: Any = self.input
        is_one = isinstance(given, str) or isinstance(given[0], int)
        inputs: Sequence[str | Sequence[int]] = [given] if is_one else given
        return inputs

    @override
    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        return ONE_TOKEN


async def create_embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """Return the embeddings of texts."""
    return await EmbeddingCall(request, body).response()


class EmbeddingCall(GenerationCall[EmbeddingRequest]):
    """A call of /v1/embeddings."""

    id_prefix = "embd"
    operation = "embeddings"
    is_pooled = True

    def __init__(self, request: Request, body: EmbeddingRequest) -> None:
        super().__init__(request, body)
        self._pooling = PoolingParams(dimensions=body.dimensions)
        self._rows: dict[int, npt.NDArray[np.float32]] = {}

    @functools.cached_property
    def _request_ids(self) -> Sequence[str]:
        return [f"{self._engine_id}/{index}" for index in range(len(self._body.inputs))]

    @override
    def _request_options(self) -> dict[str, Any]:
        options = super()._request_options()
        for name in ("add_special_tokens", "truncate_prompt_tokens"):
            if (value := getattr(self._body, name)) is not None:
                options[name] = value
        options["truncation_side"] = self._body.truncation_side or "right"
        return options

    def _streams(self) -> Sequence[OutputStream]:
        options = self._request_options()
        return [
            self._noted(
                index, self._context.llm.embed(given, self._pooling, request_id=request_id, **options)
            )
            for index, (given, request_id) in enumerate(
                zip(self._body.inputs, self._request_ids, strict=True)
            )
        ]

    async def _noted(
        self, index: int, rows: AsyncGenerator[PoolingRequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Keep the row of an input; yield its outputs as those of a request that generates nothing."""
        async with contextlib.aclosing(rows) as outputs:
            async for output in outputs:
                pooled = output.outputs
                if pooled.data is not None:
                    self._rows[index] = pooled.data
                completion = CompletionOutput(
                    index=0,
                    text="",
                    token_ids=[],
                    finish_reason=pooled.finish_reason,
                    error=pooled.error,
                    error_type=pooled.error_type,
                    error_param=pooled.error_param,
                )
                yield RequestOutput(
                    request_id=output.request_id,
                    prompt=output.prompt,
                    prompt_token_ids=output.prompt_token_ids,
                    outputs=[completion],
                    num_cached_tokens=output.num_cached_tokens,
                    finished=output.finished,
                )

    def _fields(self) -> Sequence[Mapping[str, str]]:
        count = len(self._body.inputs)
        return [{"prompt": f"input[{index}]" if count > 1 else "input"} for index in range(count)]

    @override
    async def whole_answer(self) -> EmbeddingList:
        outputs = await self._final_outputs()
        data, num_numbers = [], 0
        for index, _ in enumerate(outputs):
            row = self._rows[index]
            data.append(Embedding(index=index, embedding=self._encoded(row)))
            num_numbers += len(row)
            if num_numbers >= NUMBERS_PER_TURN:
                num_numbers = 0
                await asyncio.sleep(0)
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return EmbeddingList(
            id=self._id,
            created=self._created,
            model=self._body.model,
            data=data,
            usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        )

    def _encoded(self, row: npt.NDArray[np.float32]) -> list[float] | str:
        if self._body.encoding_format == "base64":
            return base64.b64encode(row.astype("<f4").tobytes()).decode()
        numbers: list[float] = row.tolist()
        return numbers

    def _events(self) -> NoReturn:
        raise AssertionError("embeddings are answered whole")
