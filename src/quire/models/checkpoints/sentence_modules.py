"""What sentence-transformers publishes beside a model: how its states become a row, in `modules.json`.

The transformer comes first, then how its states are pooled, dense layers, and whether the row is normalized,
each with a folder of its own; or, of a reranker that is a generating model, whose logits are the score.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ModelError, nearest_name
from quire.models.checkpoints.json_files import entry, read_json, read_json_objects
from quire.models.classification import label_activation, scored_by_tokens
from quire.models.config import SIMILARITIES, ModelConfig, RowLayer
from quire.models.config_entries import SENTENCE_RULES, check_entry
from quire.pooling_params import PoolingParams, PoolingType

_MODULES_FILE = "modules.json"
_TRANSFORMER_FILE = "sentence_bert_config.json"
_CONFIG_FILE = "config.json"
_SENTENCE_FILE = "config_sentence_transformers.json"
_MAX_PROMPTS, _MAX_PROMPT_LENGTH = 1024, 16384
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")
_FOLDER = re.compile(r"\w[\w.-]{0,99}")
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
_MODES: dict[str, PoolingType] = {  # by the name of the mode, and of the entry that is true
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "lasttoken": "last",
    "weightedmean": "weighted_mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
}
_DENSE_ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu"}


def with_sentence_modules(config: ModelConfig, path: Path) -> ModelConfig:
    """Return the config of a model directory with what is published of its texts and rows.

    Raises:
        ModelError: a file is damaged, or asks for what Quire does not compute.
    """
    return _with_prompts(_with_rows(config, path), path)


def _with_rows(config: ModelConfig, path: Path) -> ModelConfig:
    modules = _modules(path)
    kinds = [kind for kind, _ in modules]
    if kinds == ["Transformer", "LogitScore"]:
        return _scored_by_tokens(config, path, path / modules[1][1] / _CONFIG_FILE)
    if "Pooling" not in kinds and "LogitScore" not in kinds:
        return _with_activation(config, path)
    if kinds != sorted(kinds, key=_ORDER.index) or kinds.count("Pooling") != 1 or "LogitScore" in kinds:
        raise ModelError(f"{path / _MODULES_FILE} has {', '.join(kinds)}; the order must be as in {_ORDER}")
    [pooling] = [_pooling_type(path / folder / _CONFIG_FILE) for kind, folder in modules if kind == "Pooling"]
    dense = tuple(_dense(path, folder) for kind, folder in modules if kind == "Dense")
    size = config.hidden_size
    for layer in dense:
        if layer.inputs != size:
            raise ModelError(f"{layer.name} in {path} reads {layer.inputs} features; there are {size}")
        size = layer.outputs
    own = path / _TRANSFORMER_FILE
    settings = _checked(own, read_json(own) or {})
    if settings.get("do_lower_case"):
        raise ModelError(f"{own} has do_lower_case true; only the tokenizer may change letters")
    return dataclasses.replace(
        config,
        pooling=PoolingParams(pooling_type=pooling, normalize="Normalize" in kinds),
        row_layers=(*config.row_layers, *dense),
        max_model_len=min(config.max_model_len, settings.get("max_seq_length") or config.max_model_len),
    )


def _with_prompts(config: ModelConfig, path: Path) -> ModelConfig:
    """Return a model with the prompts published to come before its texts, and how its rows are compared."""
    settings, file = _sentence_settings(path), path / _SENTENCE_FILE
    prompts = tuple(
        (name, "" if text is None else text) for name, text in (settings.get("prompts") or {}).items()
    )
    if len(prompts) > _MAX_PROMPTS or not all(
        isinstance(text, str)
        and len(name) <= 256
        and len(text) <= _MAX_PROMPT_LENGTH
        and not _LONE_SURROGATES.search(name + text)
        for name, text in prompts
    ):
        raise ModelError(
            f"{file} has {len(prompts)} prompts; there may be {_MAX_PROMPTS} texts of up to "
            f"{_MAX_PROMPT_LENGTH} characters in valid Unicode, with names of up to 256"
        )
    default = settings.get("default_prompt_name") or ""
    if default and default not in dict(prompts):
        raise ModelError(f"{file} has default_prompt_name {default!r:.100}, and no such prompt")
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise ModelError(
            f"{file} has similarity_fn_name {similarity!r:.100}; it must be one of {', '.join(SIMILARITIES)}"
        )
    return dataclasses.replace(config, prompts=prompts, prompt_name=default, similarity=similarity)


def _scored_by_tokens(config: ModelConfig, path: Path, file: Path) -> ModelConfig:
    """Return a model whose score is a logit, or the difference of two, which then becomes a probability."""
    values = _checked(file, read_json(file))
    true, false = values.get("true_token_id"), values.get("false_token_id")
    if true is None:
        raise ModelError(f"{file} has no true_token_id")
    if false is not None:
        return scored_by_tokens(config, (false, true))
    return _with_activation(scored_by_tokens(config, (true,)), path)


def _with_activation(config: ModelConfig, path: Path) -> ModelConfig:
    """Return a model with what is published to make a probability of the score of its one label."""
    named = _sentence_settings(path).get("activation_fn") if len(config.labels) == 1 else None
    if named is None:
        return config
    return dataclasses.replace(config, label_activation=label_activation(named, path / _SENTENCE_FILE))


def _sentence_settings(path: Path) -> Mapping[str, Any]:
    file = path / _SENTENCE_FILE
    return _checked(file, read_json(file) or {})


def dense_folders(path: Path) -> list[str]:
    """Return the folders of a model directory's dense layers, in order; errors as above."""
    return [folder for kind, folder in _modules(path) if kind == "Dense"]


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return kind and folder of each module."""
    file = path / _MODULES_FILE
    found = []
    for module in read_json_objects(file) or ():
        kind = (entry(module, "type", str, file) or "").rpartition(".")[2]
        folder = entry(module, "path", str, file) or ""
        if kind not in _ORDER:
            raise ModelError(f"{file} has a module {module.get('type')!r:.100}; {nearest_name(kind, _ORDER)}")
        if kind == "Transformer" and folder:
            raise ModelError(f"{file} has the transformer in {folder!r:.100}; it must be beside that file")
        if kind != "Transformer" and not _FOLDER.fullmatch(folder):
            raise ModelError(f"{file} has a module in {folder!r:.100}; it must be a folder beside that file")
        found.append((kind, folder))
    return found


def _pooling_type(file: Path) -> PoolingType:
    values = _checked(file, read_json(file))
    if values.get("include_prompt") is False:
        raise ModelError(f"{file} has include_prompt false; rows are of all tokens, prompts included")
    on = [name for name, value in values.items() if name.startswith("pooling_mode_") and value]
    named = values.get("pooling_mode")
    on = on if named is None else named if isinstance(named, list) else [named]
    if len(on) != 1 or on[0] not in _MODES:
        raise ModelError(f"{file} pools by {on or 'nothing'!s:.200}; it must be one of {', '.join(_MODES)}")
    return _MODES[on[0]]


def _dense(path: Path, folder: str) -> RowLayer:
    file = path / folder / _CONFIG_FILE
    values = _checked(file, read_json(file))
    activation = str(values.get("activation_function") or "torch.nn.modules.activation.Tanh").rpartition(".")[
        2
    ]
    if activation not in _DENSE_ACTIVATIONS:
        raise ModelError(
            f"{file} has activation_function {activation!r:.100}; "
            f"{nearest_name(activation, _DENSE_ACTIVATIONS)}"
        )
    for name in ("in_features", "out_features"):
        if values.get(name) is None:
            raise ModelError(f"{file} has no {name}")
    return RowLayer(
        name=f"{folder}.linear",
        inputs=values["in_features"],
        outputs=values["out_features"],
        bias=values.get("bias") is not False,
        activation=_DENSE_ACTIVATIONS[activation],
    )


def _checked(file: Path, values: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the entries of a module's file, checked."""
    if values is None:
        raise ModelError(f"{file} is missing; {_MODULES_FILE} names its folder")
    for name, rule in SENTENCE_RULES.items():
        check_entry(f"{file} has {name}", values.get(name), rule)
    return values
