"""How the hidden states of a prompt become one row, for models that do not generate."""

from __future__ import annotations

from typing import Literal

from quire.config import config, knob
from quire.errors import InvalidRequestError
from quire.limits import PositiveInt, violation

PoolingType = Literal["last", "cls", "mean", "weighted_mean", "max", "all"]


@config
class PoolingParams:
    """How the last layer's hidden states of a prompt become one row, such as an embedding.

    Raises:
        InvalidRequestError: a value is outside its limits.
        ConfigError: there is no field of that name.
    """

    pooling_type: PoolingType | None = knob(
        default=None,
        help="What the row is: the hidden state of the last token (last), of the first one (cls), the mean "
        "over all tokens (mean), that with weights that rise from 1 by 1 (weighted_mean), the largest "
        "numbers (max), or the states of all tokens (all), only as the model was trained. None: as it was.",
    )
    normalize: bool | None = knob(
        default=None, help="Divide the row by its Euclidean norm. None: as the model was trained."
    )

    dimensions: PositiveInt | None = knob(
        default=None,
        help="Numbers of the row that are kept, the first ones, before it is normalized; of models that were "
        "trained for it (Matryoshka, Kusupati et al. 2022). None: all.",
    )

    activation: bool | None = knob(
        default=None,
        help="Make probabilities of the scores of labels. None: as the model was trained.",
    )
    second_text_at: PositiveInt | None = knob(
        default=None,
        help="Position of the first token of a second text, for models that tell two texts apart by types of "
        "tokens. None: there is one text.",
    )

    def __post_init__(self) -> None:
        if (found := violation(self)) is not None:
            name, refusal = found
            raise InvalidRequestError(f"{name} {refusal}", param=name)

    def resolved(self, default: PoolingParams) -> PoolingParams:
        """Return these with the values of `default` for those that are None."""
        return PoolingParams(
            pooling_type=self.pooling_type or default.pooling_type,
            normalize=default.normalize if self.normalize is None else self.normalize,
            dimensions=self.dimensions,
            activation=self.activation,
            second_text_at=self.second_text_at,
        )
