"""Bodies of POST /v1/files and /v1/batches, and the queries of lists."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from quire.server.responses.body import Metadata
from quire.server.wire.strict_model import Ignored, StrictModel

BatchUrl = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Cursor = Annotated[str, Field(max_length=128)]
Time = Annotated[int, Field(ge=0, lt=1 << 40)]


class FileUpload(BaseModel):
    """Body of POST /v1/files, as multipart/form-data."""

    file: bytes = Field(description="JSONL, a request in each line.")
    purpose: Literal["batch"]


class BatchRequest(StrictModel):
    """Body of POST /v1/batches."""

    input_file_id: str = Field(description="A file of the purpose batch: JSONL, a request in each line.")
    endpoint: BatchUrl = Field(description="Of all requests.")
    completion_window: Literal["24h"] = Field(description="Requests not answered within this time fail.")
    metadata: Metadata | None = Field(None, description="Returned with the batch.")
    output_expires_after: Ignored = None


class BatchQuery(BaseModel):
    """The query of GET /v1/batches."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    after: Cursor | None = None
    from_time: Time | None = None


class FileQuery(BaseModel):
    """The query of GET /v1/files."""

    limit: Annotated[int, Field(ge=1, le=10_000)] = 1_000
    after: Cursor | None = None
    from_time: Time | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: Annotated[str, Field(max_length=64)] | None = None
