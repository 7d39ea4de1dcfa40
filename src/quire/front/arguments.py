"""Normalizing the arguments of `LLM` and `ContinuousBatchingPipeline`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from quire.config import EngineConfig
from quire.errors import ConfigError, InvalidRequestError, nearest_name
from quire.limits import limits_of

T = TypeVar("T")

TextOrTokenIds = str | Sequence[int]
PromptForm = TextOrTokenIds | Mapping[str, Any]
"""Text, token ids, or a mapping with either."""

Tools = Sequence[Mapping[str, Any]]
"""Functions, as OpenAI's API describes them."""

_BYTES = (bytes, bytearray, memoryview)  # undecoded text, not token ids
_PROMPT_KEYS = ("prompt_token_ids", "prompt")  # keys of a mapping; the first one present counts

_PARTS: dict[str, Any] = {  # classes by the field of EngineConfig that holds them
    name: limits.kind
    for name, limits in limits_of(EngineConfig).items()
    if dataclasses.is_dataclass(limits.kind)
}


def engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration for `model`; `options` are fields of `EngineConfig` and of its parts.

    Raises:
        ConfigError: there is no field of that name, or a value is invalid.
    """
    engine_names = [name for name in _field_names(EngineConfig) if name != "model"]
    known = [*engine_names, *(name for cls in _PARTS.values() for name in _field_names(cls))]
    for name in options:
        if name not in known:
            raise ConfigError(
                f"EngineConfig has no field {name!r}, nor has a part of it; {nearest_name(name, known)}"
            )
    engine_fields = {name: value for name, value in options.items() if name in engine_names}
    for part, cls in _PARTS.items():
        given = options.get(part, cls())
        if not isinstance(given, cls):
            raise ConfigError(f"{part} must be a {cls.__name__}, not {type(given).__name__}")
        changes = {name: value for name, value in options.items() if name in _field_names(cls)}
        engine_fields[part] = dataclasses.replace(given, **changes)
    return EngineConfig(model=model, **engine_fields)


def _field_names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def prompts_of(given: Any) -> list[Any]:
    """Return one prompt or a sequence of prompts as a list; each is text or token ids.

    A prompt may also be a mapping with `prompt` or `prompt_token_ids`, as vLLM has them.

    Raises:
        InvalidRequestError: it is none of these.
    """
    if isinstance(given, Mapping):
        return [_unwrapped(given)]
    _require_sequence(given, "prompts", "a string, a list of token ids, a mapping, or a sequence of these")
    is_one = isinstance(given, str) or bool(given and type(given[0]) is int)
    return [given] if is_one else [_unwrapped(one) for one in given]


def _unwrapped(prompt: Any) -> Any:
    """Return the prompt in a mapping, or any other prompt unchanged."""
    if not isinstance(prompt, Mapping):
        return prompt
    for name in prompt:
        if name not in _PROMPT_KEYS:
            raise InvalidRequestError(
                f"a prompt has {name!r:.80}; it may have {' or '.join(_PROMPT_KEYS)}", param="prompts"
            )
    given = [prompt[name] for name in _PROMPT_KEYS if prompt.get(name) is not None]
    if not given:
        raise InvalidRequestError(f"a prompt has neither of {' and '.join(_PROMPT_KEYS)}", param="prompts")
    return given[0]


def conversations_of(given: Any) -> list[Any]:
    """Return one conversation (a list of messages) or a sequence of conversations as a list.

    Raises:
        InvalidRequestError: it is neither.
    """
    _require_sequence(given, "messages", "a list of messages, or a sequence of such lists")
    is_one = bool(given) and isinstance(given[0], Mapping)
    return [given] if is_one else list(given)


def _require_sequence(given: Any, name: str, meaning: str) -> None:
    if not isinstance(given, Sequence) or isinstance(given, _BYTES):
        raise InvalidRequestError(f"{name} must be {meaning}, not {type(given).__name__}", param=name)


def require_chat(messages: Any, tools: Any, variables: Any) -> None:
    """Raise `InvalidRequestError` unless the types are those of a conversation, tools and a dictionary."""
    _require_mappings(messages, "messages")
    if tools is not None:
        _require_mappings(tools, "tools")
    if not isinstance(variables, Mapping):
        raise InvalidRequestError(
            f"chat_template_kwargs must be a dictionary, not {type(variables).__name__}",
            param="chat_template_kwargs",
        )


def _require_mappings(given: Any, name: str) -> None:
    meaning = "a list of dictionaries"
    if not isinstance(given, Sequence) or isinstance(given, (str, *_BYTES)):
        raise InvalidRequestError(f"{name} must be {meaning}, not {type(given).__name__}", param=name)
    for one in given:
        if not isinstance(one, Mapping):
            raise InvalidRequestError(
                f"{name} must be {meaning}; one of them is {type(one).__name__}", param=name
            )


def text_pairs(**named: Any) -> list[tuple[Any, Any]]:
    """Return pairs of the texts of two arguments: one with each of the others, or each with its counterpart.

    Raises:
        InvalidRequestError: they are no texts, or not equally many.
    """
    for name, texts in named.items():
        _require_sequence(texts, name, "a text, or a list of texts")
    first, second = ([texts] if isinstance(texts, str) else list(texts) for texts in named.values())
    if len(first) not in (1, len(second)):
        one, other = named
        raise InvalidRequestError(
            f"{one} has {len(first)} texts and {other} {len(second)}; there must be one in {one}, or as many",
            param=one,
        )
    return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def one_for_each(batch: Sequence[Any], given: T | Sequence[T] | None, kind: type[T], name: str) -> list[T]:
    """Return one value for each item of `batch`: `given` itself if it is a sequence, else `given` repeated.

    Args:
        batch: the prompts.
        given: one value, a sequence of them, or None for the default.
        kind: type of the values.
        name: name of the argument, for error messages.

    Raises:
        InvalidRequestError: the type is wrong, or the sequence is not as long as `batch`.
    """
    if given is None or isinstance(given, kind):
        return [kind() if given is None else given] * len(batch)
    if not isinstance(given, Sequence):
        raise InvalidRequestError(
            f"{name} must be {kind.__name__} or a sequence of them, not {type(given).__name__}", param=name
        )
    if len(given) != len(batch):
        raise InvalidRequestError(
            f"there are {len(batch)} prompts but {len(given)} {name}; give one, or one for each", param=name
        )
    for one in given:
        if not isinstance(one, kind):
            raise InvalidRequestError(
                f"{name} must be {kind.__name__} or a sequence of them; one of them is {type(one).__name__}",
                param=name,
            )
    return list(given)


def tools_for_each(batch: Sequence[Any], given: Any) -> list[Tools | None]:
    """Return the tools of each conversation of `batch`: `given` for all, or one list (or None) for each.

    Raises:
        InvalidRequestError: it is neither, or the number of lists is not that of the conversations.
    """
    if given is None:
        return [None] * len(batch)
    meaning = "a list of tools, or a sequence of such lists"
    _require_sequence(given, "tools", meaning)
    if all(isinstance(one, Mapping) for one in given):
        return [given] * len(batch)
    for one in given:
        if one is not None:
            _require_sequence(one, "tools", meaning)
    if len(given) != len(batch):
        raise InvalidRequestError(
            f"there are {len(batch)} conversations but {len(given)} lists of tools; give one list, or one "
            "for each",
            param="tools",
        )
    return list(given)


def prompt_text_or_ids(prompt: Any) -> str | list[int]:
    """Return a prompt as text or as a list of token ids.

    Raises:
        InvalidRequestError: it is neither.
    """
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, _BYTES):
        raise InvalidRequestError(
            f"a prompt must be a string or a list of token ids, not {type(prompt).__name__}", param="prompt"
        )
    for token in prompt:
        if type(token) is not int:
            raise InvalidRequestError(
                f"a prompt that is a list must hold token ids, each an int, not {type(token).__name__}",
                param="prompt",
            )
    return list(prompt)
