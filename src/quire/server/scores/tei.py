"""POST /embed and /predict, as text-embeddings-inference has them; its /rerank is in `calls.py`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from quire.pooling_params import PoolingParams
from quire.request_output import PoolingRequestOutput
from quire.server.openai.pooled import InputCall, PooledCall, Row
from quire.server.scores.tei_bodies import EmbedRequest, Prediction, PredictRequest
from quire.server.wire.answers import Answer, PoolingUsage


async def embed(request: Request, body: EmbedRequest) -> Response:
    """Return the embeddings of texts, as text-embeddings-inference does."""
    return await _EmbedCall(request, body).response()


async def predict(request: Request, body: PredictRequest) -> Response:
    """Return the scores of all labels of texts, the likeliest first, as text-embeddings-inference does."""
    return await _PredictCall(request, body).response()


class _EmbedCall(InputCall[EmbedRequest]):
    id_prefix, operation, task = "embd", "embeddings", "embed"

    def __init__(self, request: Request, body: EmbedRequest) -> None:
        super().__init__(request, body)
        self._params_of_rows = PoolingParams(
            normalize=body.normalize is not False, dimensions=body.dimensions
        )

    @override
    def _entry(self, index: int, row: Row) -> list[float]:
        numbers: list[float] = row.tolist()
        return numbers

    @override
    def _shaped(self, entries: list[Any], usage: PoolingUsage) -> Answer:
        return entries


class _PredictCall(PooledCall[PredictRequest]):
    id_prefix = operation = "classify"

    def __init__(self, request: Request, body: PredictRequest) -> None:
        super().__init__(request, body)
        self._params_of_rows = PoolingParams(activation=False if body.raw_scores else None)
        self._texts = body.given_texts()

    def _names(self) -> Sequence[str]:
        return (
            [f"inputs[{index}]" for index in range(len(self._texts))] if self._body.is_batch else ["inputs"]
        )

    def _pooled(self, index: int, **options: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        first, *others = self._texts[index]
        if others:
            options["second_text"] = others[0]
        else:
            options["truncation_side"] = self._body.cut_side
        return self._context.llm.classify(first, self._params_of_rows, **options)

    @override
    def _entry(self, index: int, row: Row) -> list[Prediction]:
        found = [
            Prediction(score=score, label=label)
            for score, label in zip(row.tolist(), self._info.labels, strict=True)
        ]
        return sorted(found, key=lambda one: one.score, reverse=True)

    @override
    def _shaped(self, entries: list[Any], usage: PoolingUsage) -> Answer:
        return entries if self._body.is_batch else entries[0]
