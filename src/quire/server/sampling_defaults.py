"""Default sampling parameters, from the model's `generation_config.json`.

The keys that count are those that vLLM reads.
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
_FIELDS = {  # of SamplingParams, by key
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
        fields: by name; each is valid.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = dict(fields)
        self._fields_of_beams = {name: fields[name] for name in ("max_tokens",) if name in fields}

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a request; beam search, which does not sample, has other defaults.

        Raises:
            InvalidRequestError: a value out of range, or two that contradict each other.
        """
        defaults = self._fields_of_beams if given.get("beam_width") else self.fields
        return SamplingParams(**{**defaults, **given})

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.fields.items())


QUIRES_OWN = SamplingDefaults({})


def read_sampling_defaults(config: ServerConfig, model_path: Path) -> SamplingDefaults:
    """Return the defaults that a server's configuration asks for.

    Args:
        config: of the server.
        model_path: of the model's directory or GGUF file.

    Raises:
        ConfigError: there is no such file, or no such key or value to override.
        ModelError: the file cannot be read, or holds a value that is out of range.
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
    """Return the file that `where` stands for, which need not exist if it is the model's; None: no file."""
    if where == "vllm":
        return None
    if where == "auto":
        return (model_path if model_path.is_dir() else model_path.parent) / FILE
    file = Path(where).expanduser() / FILE
    if not file.is_file():
        raise ConfigError(
            f"ServerConfig.generation_config is {where!r:.200}, which is no directory with a {FILE}; give "
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
    """Return entries as fields of `SamplingParams`; one that is null is none.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    fields = {_FIELDS[key]: value for key, value in entries.items() if value is not None}
    if fields.get("top_k") == -1:  # all tokens, for other servers
        fields["top_k"] = 0
    for name, value in fields.items():
        SamplingParams(**{name: value})
    return fields
