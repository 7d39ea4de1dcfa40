"""vLLM's /classify, /score and /pooling, and the /rerank of Jina and Cohere."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from msgspec import UNSET
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from quire.errors import InvalidRequestError
from quire.front.arguments import text_pairs
from quire.front.similarity import different_texts, likeness
from quire.limits import PositiveInt
from quire.pooling_params import PoolingParams
from quire.request_output import PoolingRequestOutput
from quire.server.openai.pooled import (
    MAX_INPUTS,
    NUMBERS_PER_TURN,
    EncodingFormat,
    InputBody,
    InputCall,
    ListedRows,
    ModelBody,
    PooledBody,
    PooledCall,
    Row,
    Texts,
    encoded_row,
)
from quire.server.scores.tei_bodies import TEI_ERRORS, Rank, TruncatedBody
from quire.server.wire.answers import (
    Answer,
    Classification,
    Classifications,
    PairScore,
    PairScores,
    PooledRow,
    PooledRows,
    PoolingUsage,
    RankedDocument,
    RankedDocuments,
    RankedText,
)
from quire.server.wire.strict_model import StrictModel, optional_field, text_or_list

TextOrTexts = Annotated[
    Annotated[str, Tag("=text")] | Annotated[Texts, Tag("=texts")],
    text_or_list("=texts", "a text or a list of texts"),
]


class ClassifyRequest(InputBody):
    """Body of POST /v1/classify."""

    activation: bool | None = optional_field(PoolingParams, "activation")


class PoolingRequest(ClassifyRequest):
    """Body of POST /pooling."""

    normalize: bool | None = optional_field(PoolingParams, "normalize")
    dimensions: int | None = optional_field(PoolingParams, "dimensions")
    encoding_format: EncodingFormat | None = Field(
        None, description="Numbers, or the bytes of float32, little-endian, in base64. Default: float."
    )


class ScoreRequest(ModelBody):
    """Body of POST /v1/score."""

    text_1: TextOrTexts = Field(description="A text, which all of text_2 are scored with, or one for each.")
    text_2: TextOrTexts = Field(description="The others; truncate_prompt_tokens cuts their ends off.")
    activation: bool | None = optional_field(PoolingParams, "activation")


class Document(StrictModel):
    """A document with its text as a field."""

    text: str


Documents = Annotated[
    list[
        Annotated[
            Annotated[str, Tag("=text")] | Annotated[Document, Tag("=document")],
            Discriminator(
                lambda value: "=text" if isinstance(value, str) else "=document",
                custom_error_type="form",
                custom_error_message="it must be a text, or an object with a text",
            ),
        ]
    ],
    Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS),
]


class RerankRequest(TruncatedBody):
    """Body of POST /v1/rerank; with `texts` it is that of text-embeddings-inference."""

    query: str = Field(description="What documents are ranked for.")
    documents: Documents | None = Field(
        None,
        description=f"Texts, or objects with a text, at most {MAX_INPUTS}; truncate_prompt_tokens cuts their "
        "ends off.",
    )
    top_n: PositiveInt | None = Field(None, description="Number of documents to return. Default: all.")
    return_documents: bool | None = Field(None, description="Return the documents' texts. Default: true.")
    texts: Texts | None = Field(
        None, description="In place of documents; the answer is in text-embeddings-inference's form then."
    )
    return_text: bool | None = Field(None, description="With texts: return them. Default: false.")
    raw_scores: bool | None = Field(
        None, description="With texts: return scores that are not made probabilities. Default: false."
    )

    def given_texts(self) -> list[str]:
        """Return the texts that are ranked.

        Raises:
            InvalidRequestError: there are none, or two lists; an option goes with the other; or the ends of
                texts are to be kept.
        """
        if (self.documents is None) == (self.texts is None):
            raise InvalidRequestError(
                "there must be documents, or texts as in text-embeddings-inference, and not both",
                param="documents",
            )
        others = ("return_text", "raw_scores") if self.texts is None else ("return_documents",)
        for name in others:
            if getattr(self, name) is not None:
                given = "documents" if self.texts is None else "texts"
                raise InvalidRequestError(f"{name} does not go with {given}; leave it out", param=name)
        self.require_cut_ends()
        return self.texts or [one if isinstance(one, str) else one.text for one in self.documents or ()]


async def classify(request: Request, body: ClassifyRequest) -> Response:
    """Return the likeliest label of each text, and the probabilities of all labels."""
    return await ClassifyCall(request, body).response()


async def pooling(request: Request, body: PoolingRequest) -> Response:
    """Return the row that the model makes of each text, whatever that is."""
    return await PoolingCall(request, body).response()


async def score(request: Request, body: ScoreRequest) -> Response:
    """Return how well pairs of texts go together."""
    return await ScoreCall(request, body).response()


async def rerank(request: Request, body: RerankRequest) -> Response:
    """Return documents in the order in which they go with a query."""
    if body.texts is not None:
        request.scope["state"]["error_shape"] = TEI_ERRORS
    return await RerankCall(request, body).response()


class ClassifyCall(InputCall[ClassifyRequest], ListedRows[ClassifyRequest]):
    """A call of /v1/classify."""

    id_prefix = operation = task = "classify"
    answer_type = Classifications

    def __init__(self, request: Request, body: ClassifyRequest) -> None:
        super().__init__(request, body)
        self._params_of_rows = PoolingParams(activation=body.activation)

    @override
    def _entry(self, index: int, row: Row) -> Classification:
        labels = self._info.labels
        label = labels[int(row.argmax())]
        return Classification(index=index, label=label, probs=row.tolist(), num_classes=len(labels))


class PoolingCall(InputCall[PoolingRequest], ListedRows[PoolingRequest]):
    """A call of /pooling."""

    id_prefix, operation = "pool", "pooling"
    answer_type = PooledRows

    def __init__(self, request: Request, body: PoolingRequest) -> None:
        super().__init__(request, body)
        self._params_of_rows = PoolingParams(
            activation=body.activation, normalize=body.normalize, dimensions=body.dimensions
        )

    @override
    def _entry(self, index: int, row: Row) -> PooledRow:
        return PooledRow(index=index, data=encoded_row(row, self._body.encoding_format))


PairT = TypeVar("PairT", bound=PooledBody)


class PairCall(PooledCall[PairT]):
    """A call that scores pairs of texts, each with the body's name of the second.

    The prompts are the pairs; with a model that makes embeddings, the different texts of these.
    """

    pairs: Sequence[tuple[str, str]]
    names: Sequence[str]
    first_name: ClassVar[str]

    @functools.cached_property
    def _embedded(self) -> tuple[list[tuple[int, str]], list[tuple[int, int]]]:
        """What `different_texts` says of a model that makes embeddings; nothing: pairs are scored."""
        return different_texts(self.pairs if self._info.makes_embeddings else ())

    def _names(self) -> Sequence[str]:
        texts, numbers = self._embedded
        named = {other: name for (_, other), name in zip(numbers, self.names, strict=False)}
        return [named.get(number, self.first_name) for number in range(len(texts))] or self.names

    def _pooled(self, index: int, **options: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        texts, _ = self._embedded
        if not texts:
            first, second = self.pairs[index]
            return self._context.llm.score(first, second, self._params_of_rows, **options)
        side, text = texts[index]
        if side == 1:
            options.pop("prompt_name", None)
        return self._context.llm.embed(text, self._params_of_rows, truncation_side="right", **options)

    async def _scores(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return the score of each pair, from the rows of the prompts."""
        _, numbers = self._embedded
        if not numbers:
            return rows
        scores: list[Row] = []
        turn = max(1, NUMBERS_PER_TURN // len(rows[0]))
        for one, other in numbers:
            scores.append(likeness(self._info.similarity, rows[one], rows[other]))
            if len(scores) % turn == 0:
                await asyncio.sleep(0)
        return scores

    @override
    async def _answer(self, rows: Sequence[Row], usage: PoolingUsage) -> Answer:
        return await super()._answer(await self._scores(rows), usage)


class ScoreCall(PairCall[ScoreRequest], ListedRows[ScoreRequest]):
    """A call of /v1/score."""

    id_prefix = operation = "score"
    first_name = "text_1"
    answer_type = PairScores

    def __init__(self, request: Request, body: ScoreRequest) -> None:
        super().__init__(request, body)
        self._params_of_rows = PoolingParams(activation=body.activation)
        self.pairs = text_pairs(text_1=body.text_1, text_2=body.text_2)
        self.names = [f"text_2[{index}]" for index in range(len(self.pairs))]

    @override
    def _entry(self, index: int, row: Row) -> PairScore:
        return PairScore(index=index, score=float(row[0]))


class RerankCall(PairCall[RerankRequest]):
    """A call of /v1/rerank."""

    id_prefix = operation = "rerank"
    first_name = "query"

    def __init__(self, request: Request, body: RerankRequest) -> None:
        super().__init__(request, body)
        self._texts = body.given_texts()
        if body.raw_scores:
            self._params_of_rows = PoolingParams(activation=False)
        self.pairs = [(body.query, text) for text in self._texts]
        field = "documents" if body.texts is None else "texts"
        self.names = [f"{field}[{index}]" for index in range(len(self.pairs))]

    @override
    def _entry(self, index: int, row: Row) -> RankedDocument | Rank:
        if self._body.texts is not None:
            text = self._texts[index] if self._body.return_text else UNSET
            return Rank(index=index, score=float(row[0]), text=text)
        ranked = RankedDocument(index=index, relevance_score=float(row[0]))
        if self._body.return_documents is not False:
            ranked.document = RankedText(text=self._texts[index])
        return ranked

    @override
    def _shaped(self, entries: list[Any], usage: PoolingUsage) -> Answer:
        if self._body.texts is not None:
            return entries
        model = self._body.model or self._context.model_name
        return RankedDocuments(id=self._id, model=model, results=entries, usage=usage)

    @override
    async def _answer(self, rows: Sequence[Row], usage: PoolingUsage) -> Answer:
        scores = await self._scores(rows)
        best = np.argsort(-np.concatenate(scores), kind="stable")[: self._body.top_n]
        return self._shaped([self._entry(index, scores[index]) for index in best.tolist()], usage)
