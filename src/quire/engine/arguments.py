"""The loose arguments of `LLM` and `ContinuousBatchingPipeline`, brought into one form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from quire.config import EngineConfig, SchedulerConfig
from quire.errors import ConfigError, InvalidRequestError, nearest_name

T = TypeVar("T")


def engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration for `model` with fields of `EngineConfig` and `SchedulerConfig` by name.

    Raises:
        ConfigError: a name is neither's field, or a value is unusable.
    """
    scheduler_names = _field_names(SchedulerConfig)
    engine_names = [name for name in _field_names(EngineConfig) if name != "model"]
    for name in options:
        if name not in scheduler_names and name not in engine_names:
            known = [*engine_names, *scheduler_names]
            raise ConfigError(
                f"neither EngineConfig nor SchedulerConfig has a field {name!r}; {nearest_name(name, known)}"
            )
    scheduler = options.get("scheduler", SchedulerConfig())
    if not isinstance(scheduler, SchedulerConfig):
        raise ConfigError(f"scheduler must be a SchedulerConfig, not {type(scheduler).__name__}")
    changes = {name: value for name, value in options.items() if name in scheduler_names}
    engine_fields = {name: value for name, value in options.items() if name in engine_names}
    engine_fields["scheduler"] = dataclasses.replace(scheduler, **changes)
    return EngineConfig(model=model, **engine_fields)


def _field_names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def is_one_prompt(prompts: Any) -> bool:
    """Whether `prompts` is one prompt, text or token ids, rather than a sequence of them."""
    return isinstance(prompts, str) or bool(len(prompts) and type(prompts[0]) is int)


def one_for_each(batch: Sequence[Any], given: T | Sequence[T] | None, kind: type[T], name: str) -> list[T]:
    """Return a list as long as `batch`: `given` repeated, or itself if it is a sequence, or the default.

    Raises:
        InvalidRequestError: `given` is a sequence of another length; `name` is what the caller calls it.
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
    return list(given)
