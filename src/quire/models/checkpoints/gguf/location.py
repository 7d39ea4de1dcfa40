"""Where a model's GGUF file is, if it has one."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ModelError
from quire.models.checkpoints.model_files import find_file

SUFFIX = ".gguf"


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that `path` is, or that is the only one in directory `path` without a config.json.

    Raises:
        ModelError: the directory holds several, or see `find_file`.
    """
    if path.suffix == SUFFIX and path.is_file():
        return path
    if not path.is_dir() or find_file(path, "config.json") is not None:
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise ModelError(
            f"{path} holds {len(files)} GGUF files, {files[0].name} among them; give the path of the one to "
            "serve"
        )
    return find_file(path, files[0].name) if files else None
