"""Where a model's GGUF file is, if it has one."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ModelError

SUFFIX = ".gguf"


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that `path` is, or that is the only one in directory `path` without a config.json.

    Raises:
        ModelError: the directory holds several.
    """
    if path.suffix == SUFFIX and path.is_file():
        return path
    if (path / "config.json").is_file():
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise ModelError(
            f"{path} holds {len(files)} GGUF files, {files[0].name} among them; give the path of the one to "
            "serve"
        )
    return files[0] if files else None
