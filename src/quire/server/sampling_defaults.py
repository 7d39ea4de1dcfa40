"""Default sampling parameters, from the model's `generation_config.json`.

It reads the same keys as vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config import ServerConfig
from quire.errors import ConfigError, InvalidRequestError, ModelError, nearest_name
from quire.models.checkpoints.json_files import read_json
from quire.sampling_params import SamplingParams

FILE = "generation_config.json"
_FIELDS = {  # fields of SamplingParams by key
    "max_new_tokens": "max_tokens",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}


class SamplingDefaults:
    """Default values of `SamplingParams`.

    Args:
        fields: values by name; each is valid.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = dict(fields)
        self._fields_of_beams = {name: fields[name] for name in ("max_tokens",) if name in fields}

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a request; beam search, which does not sample, has other defaults.

        Raises:
            InvalidRequestError: a value is out of range, or two contradict each other.
        """
        defaults = self._fields_of_beams if given.get("beam_width") else self.fields
        return SamplingParams(**{**defaults, **given})

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.fields.items())


QUIRES_OWN = SamplingDefaults({})


def read_sampling_defaults(config: ServerConfig, model_path: Path) -> SamplingDefaults:
    """Return the defaults named by a server's configuration.

    Args:
        config: the server's configuration.
        model_path: path of the model's directory or GGUF file.

    Raises:
        ConfigError: the file does not exist, or a key or value to override is invalid.
        ModelError: the file cannot be read, or a value in it is out of range.
    """
    file = _file(config.generation_config, model_path)
    entries = (None if file is None else read_json(file)) or {}
    try:
        defaults = _valid_fields({key: value for key, value in entries.items() if key in _FIELDS})
    except InvalidRequestError as error:
        raise ModelError(
            f"{file}: {error}; correct it, or set ServerConfig.generation_config to 'vllm', which leaves the "
            "file out"
        ) from None
    return SamplingDefaults({**defaults, **_overrides(config.override_generation_config or {})})


def _file(where: str, model_path: Path) -> Path | None:
    """Return the file that `where` names (the model's own need not exist); None: no file."""
    if where == "vllm":
        return None
    if where == "auto":
        return (model_path if model_path.is_dir() else model_path.parent) / FILE
    file = Path(where).expanduser() / FILE
    if not file.is_file():
        raise ConfigError(
            f"ServerConfig.generation_config is {where!r:.200}, which is not a directory with a {FILE}; give "
            "another, or auto or vllm"
        )
    return file


def _overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    for key in given:
        if key not in _FIELDS:
            raise ConfigError(
                f"ServerConfig.override_generation_config has {key!r:.80}; {nearest_name(key, _FIELDS)}"
            )
    try:
        return _valid_fields(given)
    except InvalidRequestError as error:
        raise ConfigError(f"ServerConfig.override_generation_config: {error}") from None


def _valid_fields(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries as fields of `SamplingParams`, without null entries.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    fields = {_FIELDS[key]: value for key, value in entries.items() if value is not None}
    if fields.get("top_k") == -1:  # other servers' value for all tokens
        fields["top_k"] = 0
    for name, value in fields.items():
        SamplingParams(**{name: value})
    return fields
