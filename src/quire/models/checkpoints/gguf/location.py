"""Locating a model's GGUF file."""

from __future__ import annotations

import re
from pathlib import Path

from quire.errors import ModelError
from quire.models.checkpoints.model_files import find_file

SUFFIX = ".gguf"


_PART = re.compile(r"(?P<model>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file `path`, or the only one in a directory `path` without a config.json.

    Of a model in several files, it is the first.

    Raises:
        ModelError: the directory holds several, or see `find_file`.
    """
    if path.suffix == SUFFIX and path.is_file():
        return parts_of(path)[0]
    if not path.is_dir() or find_file(path, "config.json") is not None:
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len({_first_part(file) for file in files}) > 1:
        raise ModelError(
            f"{path} holds {len(files)} GGUF files, {files[0].name} among them; give the path of the one to "
            "serve"
        )
    return _found(path / _first_part(files[0])) if files else None


def parts_of(path: Path) -> list[Path]:
    """Return the GGUF files of the model that `path` belongs to, in order; usually one.

    Raises:
        ModelError: one is missing, or see `find_file`.
    """
    match = _PART.fullmatch(path.name)
    if match is None or not int(match["count"]):
        return [path]
    return [_found(path.with_name(_part_name(match, number))) for number in range(1, int(match["count"]) + 1)]


def _first_part(path: Path) -> str:
    match = _PART.fullmatch(path.name)
    return path.name if match is None else _part_name(match, 1)


def _part_name(match: re.Match[str], number: int) -> str:
    return f"{match['model']}-{number:05}-of-{match['count']}{SUFFIX}"


def _found(path: Path) -> Path:
    found = find_file(path.parent, path.name)
    if found is None:
        raise ModelError(f"{path} is missing: the model is in several files, which must be side by side")
    return found
