"""Aliases of fields from other servers, and their value formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

TWO_NAMES = "two_names"
"""Type of the validation error about two names with different values (`name`, `own_name`)."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "ebnf": ("structured_outputs", "grammar"),
    "grammar": ("structured_outputs", "grammar"),
    "guided_choice": ("structured_outputs", "choice"),
    "guided_grammar": ("structured_outputs", "grammar"),
    "guided_json": ("structured_outputs", "json"),
    "guided_regex": ("structured_outputs", "regex"),
    "json_schema": ("structured_outputs", "json"),
    "max_new_tokens": ("max_tokens",),
    "max_tokens_to_sample": ("max_tokens",),
    "min_new_tokens": ("min_tokens",),
    "n_cmpl": ("n",),
    "n_predict": ("max_tokens",),
    "num_predict": ("max_tokens",),
    "regex": ("structured_outputs", "regex"),
    "repeat_penalty": ("repetition_penalty",),
    "return_tokens": ("return_token_ids",),
    "stop_sequences": ("stop",),
}
"""Paths of Quire's fields by names in vLLM, SGLang, llama.cpp, TGI or Ollama."""

NAMES_IN_COMPLETIONS: Mapping[str, tuple[str, ...]] = {**_NAMES, "n_probs": ("logprobs",)}
NAMES_IN_CHATS: Mapping[str, tuple[str, ...]] = {**_NAMES, "n_probs": ("top_logprobs",)}

_NOTHING = {"grammar": "", "n_probs": 0}  # values that ask for nothing
_LIMITS = ("max_tokens", "max_completion_tokens")
_UNLIMITED = -1
_AS_MANY_AS_FIT = 2**31 - 1  # beyond any model's maximum
_BANNED = -100.0  # OpenAI's bias to ban a token


def with_own_names(values: dict[str, Any], others: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Move a body's values from other servers' names to Quire's.

    Args:
        values: by name.
        others: the path of each name.

    Raises:
        PydanticCustomError: two names of one thing have different values.
    """
    if others.keys().isdisjoint(values):
        return values
    own = {name: value for name, value in values.items() if name not in others}
    for name, path in others.items():
        value, there = values.get(name), own.get(path[0])
        is_weak = path[0] in _LIMITS and value == _UNLIMITED and there is not None
        if value is not None and value != _NOTHING.get(name) and not is_weak:
            own[path[0]] = _placed(there, path, name, value)
    return own


def take_other_values(values: dict[str, Any]) -> None:
    """Convert values of sampling parameters for which Quire has another form, in place."""
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if values.get("seed") == -1:
        values["seed"] = None
    values.update({name: _AS_MANY_AS_FIT for name in _LIMITS if values.get(name) == _UNLIMITED})
    if isinstance(pairs := values.get("logit_bias"), list):
        values["logit_bias"] = _biases_of(pairs)
    if values.get("top_p") == 0 and values["top_p"] is not False:
        values.update(top_p=None, temperature=0)
    stop = values.get("stop")
    if isinstance(stop, str | list) and not any(stop):
        values["stop"] = None


def _biases_of(pairs: list[Any]) -> Any:
    """Return llama.cpp's list of token ids and biases as an object; other values are refused later."""
    biases: dict[str, Any] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) is not int:
            return pairs
        biases[str(pair[0])] = _BANNED if pair[1] is False else pair[1]
    return biases


def _placed(there: Any, path: tuple[str, ...], name: str, value: Any) -> Any:
    """Return the value to set at the first part of `path`, merged with `there`."""
    if len(path) == 1:
        if there is not None and there != value:
            raise PydanticCustomError(
                TWO_NAMES, "two names of one thing differ", {"name": name, "own_name": path[0]}
            )
        return value
    outer, inner = path
    if there is not None and not isinstance(there, dict):
        return there  # refused later
    parts = there or {}
    if parts.get(inner) not in (None, value):
        own_name = f"{outer}.{inner}"
        raise PydanticCustomError(
            TWO_NAMES, "two names of one thing differ", {"name": name, "own_name": own_name}
        )
    return {**parts, inner: value}
