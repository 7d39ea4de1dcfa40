"""Base of the calls whose prompts become rows: one after the other in the answer."""

from __future__ import annotations

import abc
import asyncio
import base64
import contextlib
import functools
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Discriminator, Field, Tag
from typing_extensions import override

from quire.pooling_params import PoolingParams
from quire.request_options import RequestOptions, ShortText
from quire.request_output import CompletionOutput, PoolingRequestOutput, RequestOutput
from quire.sampling_params import ONE_TOKEN, SamplingParams
from quire.server.calls.call import GenerationCall
from quire.server.calls.outputs import OutputStream
from quire.server.openai.bodies import OptionFields, TokenIds, prompt_form
from quire.server.sampling_defaults import SamplingDefaults
from quire.server.wire.answers import Answer, PoolingUsage, RowList
from quire.server.wire.strict_model import Unsupported, optional_field

MAX_INPUTS = 2048  # as OpenAI's
NUMBERS_PER_TURN = 65_536
"""Numbers that are added to an answer per turn of the event loop."""

Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
_TokenLists = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
Inputs = Annotated[
    Annotated[str, Tag("=text")]
    | Annotated[Texts, Tag("=texts")]
    | Annotated[TokenIds, Tag("=tokens")]
    | Annotated[_TokenLists, Tag("=token_lists")],
    Discriminator(
        prompt_form,
        custom_error_type="form",
        custom_error_message="it must be text, token ids, or a list of either",
    ),
]
EncodingFormat = Literal["float", "base64"]
Prompt = str | Sequence[int]
Row = npt.NDArray[np.float32]


class PooledBody(OptionFields):
    """Fields of all bodies whose texts become rows."""

    user: ShortText | None = optional_field(RequestOptions, "tenant")
    add_special_tokens: bool | None = Field(
        None, description="Add the model's special tokens to texts. Default: true."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="Number of tokens to keep of each input; -1: as many as fit. Default: all."
    )
    prompt_name: ShortText | None = Field(
        None,
        description="Name of the model's prompt that comes before texts; empty: none. Default: the model's.",
    )
    stream: Unsupported = None
    stream_options: Unsupported = None

    @override
    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        return ONE_TOKEN


class ModelBody(PooledBody):
    """A body that names the model."""

    model: str = Field(description="The served model's name, as /v1/models lists it.")


class RowsBody(PooledBody):
    """A body of inputs that each become a row."""

    input_field: ClassVar[str] = "input"

    @property
    @abc.abstractmethod
    def inputs(self) -> Sequence[Prompt]:
        """The inputs, of which there is at least one."""

    @property
    @abc.abstractmethod
    def cut_side(self) -> Literal["left", "right"]:
        """Which side of inputs that are too long is cut off."""


class InputBody(RowsBody, ModelBody):
    """A body of inputs and how they are cut, as in OpenAI's and vLLM's APIs."""

    input: Inputs = Field(
        description=f"Text, token ids, or a list of either, which may have {MAX_INPUTS} entries."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Which side truncate_prompt_tokens cuts off. Default: right."
    )

    @property
    @override
    def inputs(self) -> Sequence[Prompt]:
        return inputs_of(self.input)

    @property
    @override
    def cut_side(self) -> Literal["left", "right"]:
        return self.truncation_side or "right"


def inputs_of(given: Any) -> Sequence[Prompt]:
    """Return what was given in one of the forms of `Inputs`, as a list."""
    is_one = isinstance(given, str) or isinstance(given[0], int)
    inputs: Sequence[Prompt] = [given] if is_one else given
    return inputs


PooledT = TypeVar("PooledT", bound=PooledBody)
InputT = TypeVar("InputT", bound=RowsBody)


class PooledCall(GenerationCall[PooledT]):
    """A call whose prompts become rows."""

    is_pooled = True
    _params_of_rows = PoolingParams()

    @abc.abstractmethod
    def _names(self) -> Sequence[str]:
        """Return the body's name of each prompt."""

    @abc.abstractmethod
    def _pooled(self, index: int, **options: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Return what the engine makes of a prompt."""

    @abc.abstractmethod
    def _entry(self, index: int, row: Row) -> Any:
        """Return what the answer says of a row."""

    @abc.abstractmethod
    def _shaped(self, entries: list[Any], usage: PoolingUsage) -> Answer:
        """Return the complete answer, from what it says of the rows."""

    async def _answer(self, rows: Sequence[Row], usage: PoolingUsage) -> Answer:
        """Return the complete answer."""
        data, num_numbers = [], 0
        for index, row in enumerate(rows):
            data.append(self._entry(index, row))
            num_numbers += row.size
            if num_numbers >= NUMBERS_PER_TURN:
                num_numbers = 0
                await asyncio.sleep(0)
        return self._shaped(data, usage)

    @functools.cached_property
    def _rows(self) -> dict[int, Row]:
        """The row of each prompt that has one."""
        return {}

    @functools.cached_property
    def _request_ids(self) -> Sequence[str]:
        return [f"{self._engine_id}/{index}" for index in range(len(self._names()))]

    @override
    def _request_options(self) -> dict[str, Any]:
        options = super()._request_options()
        for name in ("add_special_tokens", "truncate_prompt_tokens", "prompt_name"):
            if (value := getattr(self._body, name)) is not None:
                options[name] = value
        return options

    def _streams(self) -> Sequence[OutputStream]:
        options = self._request_options()
        return [
            self._noted(index, self._pooled(index, request_id=request_id, **options))
            for index, request_id in enumerate(self._request_ids)
        ]

    async def _noted(
        self, index: int, rows: AsyncGenerator[PoolingRequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Keep the row of a prompt; yield its outputs as those of a request that generates nothing."""
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
        return [{"prompt": name} for name in self._names()]

    @override
    async def whole_answer(self) -> Answer:
        outputs = await self._final_outputs()
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        usage = PoolingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
        return await self._answer([self._rows[index] for index in range(len(outputs))], usage)

    def _events(self) -> NoReturn:
        raise AssertionError("rows are answered whole")


class ListedRows(PooledCall[PooledT]):
    """A call that is answered by a list of rows, as in OpenAI's and vLLM's APIs."""

    answer_type: ClassVar[type[RowList[Any]]]

    @override
    def _shaped(self, entries: list[Any], usage: PoolingUsage) -> RowList[Any]:
        model = self._body.model or self._context.model_name
        return self.answer_type(id=self._id, created=self._created, model=model, data=entries, usage=usage)


class InputCall(PooledCall[InputT], Generic[InputT]):
    """A call whose inputs each become a row."""

    task: ClassVar[str | None] = None
    """What the rows are to be; None: any."""

    @override
    def _request_options(self) -> dict[str, Any]:
        return super()._request_options() | {"truncation_side": self._body.cut_side}

    def _names(self) -> Sequence[str]:
        count, field = len(self._body.inputs), self._body.input_field
        return [f"{field}[{index}]" if count > 1 else field for index in range(count)]

    def _pooled(self, index: int, **options: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        return self._context.llm.encode(
            self._body.inputs[index], self._params_of_rows, task=self.task, **options
        )


def encoded_row(row: Row, encoding_format: EncodingFormat | None) -> Any:
    """Return the numbers of a row, or of the rows of all tokens, as lists; or their bytes in base64."""
    if encoding_format == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    return row.tolist()
