"""Bodies and answers in the shapes of text-embeddings-inference (TEI)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType
from pydantic import Discriminator, Field, Tag
from typing_extensions import override

from quire.errors import InvalidRequestError
from quire.pooling_params import PoolingParams
from quire.server.openai.pooled import MAX_INPUTS, Inputs, PooledBody, Prompt, RowsBody, inputs_of
from quire.server.wire.answers import ErrorDetail
from quire.server.wire.errors import ApiError, ErrorShape
from quire.server.wire.strict_model import optional_field

ErrorType = Literal["Validation", "Overloaded", "Unhealthy", "Backend"]
_Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=2)]


class TruncatedBody(PooledBody):
    """Fields that say whether and how texts are cut; the model may be left out."""

    model: str | None = Field(
        None, description="The served model's name, as /v1/models lists it. Default: the only one."
    )
    truncate: bool | None = Field(
        None,
        description="Cut texts that are longer than the model takes. Default: false, which refuses them.",
    )
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = Field(
        None, description="Which side is cut off. Default: Right."
    )

    @property
    def cut_side(self) -> Literal["left", "right"]:
        """Which side of texts that are too long is cut off."""
        return "left" if (self.truncation_direction or "").lower() == "left" else "right"

    def require_cut_ends(self) -> None:
        """Raise `InvalidRequestError` if the beginnings of texts are to be cut off."""
        if self.cut_side == "left":
            raise InvalidRequestError(
                "truncation_direction is Left, but of two texts only the end of the second is cut",
                param="truncation_direction",
            )

    @override
    def request_options(self) -> dict[str, Any]:
        options = super().request_options()
        return options | {"truncate_prompt_tokens": -1} if self.truncate else options


class EmbedRequest(TruncatedBody, RowsBody):
    """Body of POST /embed."""

    input_field = "inputs"

    given: Inputs = Field(
        alias="inputs",
        description=f"Text, token ids, or a list of either, which may have {MAX_INPUTS} entries.",
    )
    normalize: bool | None = Field(None, description="Divide rows by their Euclidean norms. Default: true.")
    dimensions: int | None = optional_field(PoolingParams, "dimensions")

    @property
    @override
    def inputs(self) -> Sequence[Prompt]:
        return inputs_of(self.given)


def _predict_form(value: Any) -> str | None:
    if not isinstance(value, list):
        return "=text" if isinstance(value, str) else None
    return "=batch" if value and isinstance(value[0], list) else "=pair"


class PredictRequest(TruncatedBody):
    """Body of POST /predict."""

    inputs: Annotated[
        Annotated[str, Tag("=text")]
        | Annotated[_Texts, Tag("=pair")]
        | Annotated[list[_Texts], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS), Tag("=batch")],
        Discriminator(
            _predict_form,
            custom_error_type="form",
            custom_error_message="it must be a text, a list of one or two, or a list of such lists",
        ),
    ] = Field(
        description="A text, two as a list, or a list of lists of one or two, which may have "
        f"{MAX_INPUTS} entries."
    )
    raw_scores: bool | None = Field(
        None, description="Return scores that are not made probabilities. Default: false."
    )

    @property
    def is_batch(self) -> bool:
        """Whether the answer has a list for each input."""
        return isinstance(self.inputs, list) and isinstance(self.inputs[0], list)

    def given_texts(self) -> list[list[str]]:
        """Return the one or two texts of each input.

        Raises:
            InvalidRequestError: the ends of two texts are to be kept.
        """
        given: Any = [[self.inputs]] if isinstance(self.inputs, str) else self.inputs
        texts: list[list[str]] = given if isinstance(given[0], list) else [given]
        if any(len(each) > 1 for each in texts):
            self.require_cut_ends()
        return texts


class Rank(Struct, kw_only=True):
    """A text by its place in the request, and how well it goes with the query."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class Prediction(Struct, kw_only=True):
    """A label and its score."""

    score: float
    label: str


class TEIError(Struct, kw_only=True):
    """Body of every error answer."""

    error: str
    error_type: ErrorType


class RerankError(Struct, kw_only=True):
    """Body of an error answer of /rerank: in OpenAI's shape, or with `texts` in TEI's."""

    error: ErrorDetail | str
    error_type: ErrorType | UnsetType = UNSET


_TYPES: dict[int, Literal["Overloaded", "Unhealthy"]] = {429: "Overloaded", 503: "Unhealthy"}


def _tei_error(error: ApiError) -> TEIError:
    kind = _TYPES.get(error.status) or ("Backend" if error.status >= 500 else "Validation")
    return TEIError(error=error.message, error_type=kind)


TEI_ERRORS = ErrorShape(TEIError, _tei_error, ("/embed", "/predict"))
