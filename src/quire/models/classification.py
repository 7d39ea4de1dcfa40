"""Models that score labels: of a text or its tokens, or how well two go together (rerankers, rewards)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from quire.errors import ModelError, nearest_name
from quire.models.config import ModelConfig, RowLayer
from quire.models.ropes import HFConfig
from quire.pooling_params import PoolingParams, PoolingType

Head = Callable[[HFConfig, ModelConfig, int], tuple[PoolingType, tuple[RowLayer, ...]]]
"""Returns, for a number of labels, the pooling and the layers that make scores of them."""
ENDINGS = ("ForSequenceClassification", "ForTokenClassification")
MAX_LABELS = 4096
MAX_TOKEN_LABELS = 256  # of models that score those of each token
_ACTIVATIONS = {"Identity": "", "Sigmoid": "sigmoid"}
_OF_PROBLEMS = {
    "regression": "",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def with_labels(hf: HFConfig, base: ModelConfig, head: Head) -> ModelConfig:
    """Return a model whose prompts, or their tokens, become scores of the labels that config.json names."""
    labels = _labels(hf)
    pooling_type, layers = head(hf, base, len(labels))
    activation = _activation(hf, len(labels))
    if base.architecture.endswith(ENDINGS[1]):
        if len(labels) > MAX_TOKEN_LABELS:
            raise ModelError(
                f"config.json has {len(labels)} labels of tokens; at most {MAX_TOKEN_LABELS} are supported"
            )
        pooling_type, layers, activation = "all", _of_tokens(layers), "softmax"
    return dataclasses.replace(
        base,
        pooling=PoolingParams(pooling_type=pooling_type, normalize=False),
        row_layers=layers,
        labels=labels,
        label_activation=activation,
    )


def _of_tokens(layers: tuple[RowLayer, ...]) -> tuple[RowLayer, ...]:
    """Return the head that scores tokens, given that of texts: all of ModernBERT's, or the last layer."""
    if layers[0].norm:
        return layers
    name, _, _ = layers[-1].name.partition(".")
    return (dataclasses.replace(layers[-1], name=name, bias=True),)


def scored_by_tokens(base: ModelConfig, tokens: tuple[int, ...], activation: str = "sigmoid") -> ModelConfig:
    """Return a model that generates as one that scores texts by the logits of one or two tokens.

    The score of one is its logit; that of two is the logit of the second less that of the first, and the
    probability made of it by sigmoid that of the second beside the first.

    Raises:
        ModelError: the model does not generate, has logits that are no products of its states alone, or no
            such tokens.
    """
    what = f"{base.architecture} is to score texts by the logits of tokens"
    if base.pooling is not None:
        raise ModelError(f"{what}, but makes no logits")
    if base.logits_softcap or base.output_bias or base.logits_divisor != 1:
        raise ModelError(f"{what}, which is supported only where these are neither capped, scaled nor biased")
    if len(set(tokens)) != len(tokens) or not all(0 <= token < base.vocab_size for token in tokens):
        raise ModelError(f"{what} {tokens}; they must differ and be from 0 to {base.vocab_size - 1}")
    score = RowLayer(name="score", inputs=base.hidden_size, outputs=1, tokens=tokens)
    return dataclasses.replace(
        base,
        pooling=PoolingParams(pooling_type="last", normalize=False),
        row_layers=(score,),
        labels=("LABEL_0",),
        label_activation=activation,
    )


def label_activation(named: object, file: object = "config.json") -> str:
    """Return what a class of torch makes of scores, by the name that a file of sentence-transformers has.

    Raises:
        ModelError: Quire does not compute it.
    """
    kind = str(named).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise ModelError(f"{file} has the activation {kind!r:.100}; {nearest_name(kind, _ACTIVATIONS)}")
    return _ACTIVATIONS[kind]


def one_matrix(hf: HFConfig, base: ModelConfig, num_labels: int) -> tuple[PoolingType, tuple[RowLayer, ...]]:
    """Return the head of decoders, which reads the last token."""
    return "last", (RowLayer(name="score", inputs=base.hidden_size, outputs=num_labels),)


def dense_head(first: str, last: str, activation: str) -> Head:
    """Return the head of encoders, which reads the first token; `activation` is behind the first layer."""
    return lambda hf, base, num_labels: (
        "cls",
        two_layers(base, first, last, num_labels, activation=activation),
    )


def two_layers(
    base: ModelConfig, first: str, last: str, num_labels: int, **fields: object
) -> tuple[RowLayer, ...]:
    """Return a dense layer of the hidden size and one of the labels; `fields` are of the first."""
    size = base.hidden_size
    hidden = RowLayer(name=first, inputs=size, outputs=size, **{"bias": True, **fields})  # type: ignore[arg-type]
    return hidden, RowLayer(name=last, inputs=size, outputs=num_labels, bias=True)


def _labels(hf: HFConfig) -> tuple[str, ...]:
    named = hf.get("id2label")
    if named is None:
        return tuple(f"LABEL_{number}" for number in range(hf.get("num_labels") or 2))
    labels = tuple(named.get(str(number)) for number in range(min(len(named), MAX_LABELS + 1)))
    if not 1 <= len(labels) <= MAX_LABELS or not all(
        isinstance(one, str) and len(one) < 256 for one in labels
    ):
        raise ModelError(
            f"config.json has {len(named)} entries of id2label; these must be texts for the numbers from 0 "
            f"on, from 1 to {MAX_LABELS} of them"
        )
    return labels


def _activation(hf: HFConfig, num_labels: int) -> str:
    """Return what makes probabilities of scores; of one label as in sentence-transformers."""
    named = (hf.get("sentence_transformers") or {}).get("activation_fn")
    named = named or hf.get("sbert_ce_default_activation_function")
    if named is not None:
        return label_activation(named)
    problem = hf.get("problem_type")
    if problem is None:
        return "sigmoid" if num_labels == 1 else "softmax"
    if problem not in _OF_PROBLEMS:
        raise ModelError(
            f"config.json has problem_type {problem!r:.100}; {nearest_name(problem, _OF_PROBLEMS)}"
        )
    return _OF_PROBLEMS[problem]
