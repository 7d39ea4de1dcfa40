"""POST /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import Field, Tag
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from quire.pooling_params import PoolingParams
from quire.server.ollama.options import OllamaOptions
from quire.server.openai.pooled import InputCall, ModelBody, Prompt, Row, RowsBody, Texts
from quire.server.wire.answers import PoolingUsage
from quire.server.wire.strict_model import Ignored, optional_field, text_or_list


class _Body(RowsBody, ModelBody):
    truncate: bool | None = Field(
        None, description="Cut the ends of texts that are longer than the model takes. Default: true."
    )
    options: OllamaOptions | None = Field(None, description="Without effect: nothing is sampled.")
    keep_alive: Ignored = None

    @property
    @override
    def cut_side(self) -> Literal["left", "right"]:
        return "right"

    @override
    def request_options(self) -> dict[str, Any]:
        options = super().request_options()
        return options if self.truncate is False else {"truncate_prompt_tokens": -1, **options}


class OllamaEmbedRequest(_Body):
    """Body of POST /api/embed."""

    input: Annotated[
        Annotated[str, Tag("=text")] | Annotated[Texts, Tag("=texts")],
        text_or_list("=texts", "a text or a list of texts"),
    ] = Field(description="A text, or a list of texts.")
    dimensions: int | None = optional_field(PoolingParams, "dimensions")

    @property
    @override
    def inputs(self) -> Sequence[Prompt]:
        return [self.input] if isinstance(self.input, str) else self.input


class OllamaEmbeddingsRequest(_Body):
    """Body of POST /api/embeddings."""

    input_field = "prompt"

    prompt: str = Field(description="The text.")

    @property
    @override
    def inputs(self) -> Sequence[Prompt]:
        return [self.prompt]


class OllamaEmbedded(msgspec.Struct, kw_only=True):
    """Answer of /api/embed, with durations in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct, kw_only=True):
    """Answer of /api/embeddings."""

    embedding: list[float]


async def embed(request: Request, body: OllamaEmbedRequest) -> Response:
    """Return the normalized embeddings of texts, in Ollama's form."""
    return await _EmbedCall(request, body).response()


async def embeddings(request: Request, body: OllamaEmbeddingsRequest) -> Response:
    """Return the embedding of a text, in Ollama's older form."""
    return await _EmbeddingsCall(request, body).response()


_BodyT = TypeVar("_BodyT", bound=_Body)


class _Call(InputCall[_BodyT]):
    id_prefix, operation, task = "ollama", "embeddings", "embed"

    @override
    def _entry(self, index: int, row: Row) -> list[float]:
        numbers: list[float] = row.tolist()
        return numbers


class _EmbedCall(_Call[OllamaEmbedRequest]):
    def __init__(self, request: Request, body: OllamaEmbedRequest) -> None:
        super().__init__(request, body)
        self._params_of_rows = PoolingParams(normalize=True, dimensions=body.dimensions)

    @override
    def _shaped(self, entries: list[Any], usage: PoolingUsage) -> OllamaEmbedded:
        return OllamaEmbedded(
            model=self._body.model,
            embeddings=entries,
            total_duration=round((time.monotonic() - self._begun_at) * 1e9),
            prompt_eval_count=usage.prompt_tokens,
        )


class _EmbeddingsCall(_Call[OllamaEmbeddingsRequest]):
    @override
    def _shaped(self, entries: list[Any], usage: PoolingUsage) -> OllamaEmbedding:
        return OllamaEmbedding(embedding=entries[0])
