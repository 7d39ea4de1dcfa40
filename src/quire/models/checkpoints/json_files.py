"""Reading the JSON files of a model directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from quire.errors import ModelError
from quire.models.checkpoints.model_files import find_file, read_text

Value = TypeVar("Value")

_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}

MAX_BYTES = 64 << 20  # the largest published ones, indexes of thousands of experts, have about 10 MB


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of a model directory, or None if there is no such file.

    Raises:
        ModelError: it holds anything else, or see `find_file` and `read_text`.
    """
    return _read(file, dict)


def read_json_objects(file: Path) -> list[dict[str, Any]] | None:
    """Return a list of JSON objects; arguments and errors as for `read_json`."""
    values = _read(file, list)
    for value in values or ():
        if not isinstance(value, dict):
            raise ModelError(f"{file} holds {value!r:.100} in its list; there must be objects")
    return values


def _read(file: Path, kind: type[Value]) -> Value | None:
    if find_file(file.parent, file.name) is None:
        return None
    text = read_text(file, MAX_BYTES)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, kind):
        raise ModelError(f"{file} holds {type(values).__name__}, not {_NAMES[kind]}")
    return values


def entry(values: Mapping[str, Any], key: str, kind: type[Value], file: Path) -> Value | None:
    """Return an entry of a file's object; None if it is missing or null.

    Raises:
        ModelError: its type is not `kind`.
    """
    value = values.get(key)
    if value is not None and not isinstance(value, kind):
        raise ModelError(f"{file}: {key} is {value!r:.100}; it must be {_NAMES[kind]}")
    return value
