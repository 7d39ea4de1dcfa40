"""POST /v1/embeddings."""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from quire.pooling_params import PoolingParams
from quire.server.openai.pooled import (
    EncodingFormat,
    InputBody,
    InputCall,
    ListedRows,
    Row,
    encoded_row,
)
from quire.server.wire.answers import Embedding, EmbeddingList
from quire.server.wire.strict_model import optional_field


class EmbeddingRequest(InputBody):
    """Body of POST /v1/embeddings."""

    encoding_format: EncodingFormat | None = Field(
        None, description="Numbers, or the bytes of float32, little-endian, in base64. Default: float."
    )
    dimensions: int | None = optional_field(PoolingParams, "dimensions")


async def create_embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """Return the embeddings of texts."""
    return await EmbeddingCall(request, body).response()


class EmbeddingCall(InputCall[EmbeddingRequest], ListedRows[EmbeddingRequest]):
    """A call of /v1/embeddings."""

    id_prefix = "embd"
    operation = "embeddings"
    task = "embed"
    answer_type = EmbeddingList

    def __init__(self, request: Request, body: EmbeddingRequest) -> None:
        super().__init__(request, body)
        self._params_of_rows = PoolingParams(dimensions=body.dimensions)

    @override
    def _entry(self, index: int, row: Row) -> Embedding:
        return Embedding(index=index, embedding=encoded_row(row, self._body.encoding_format))
