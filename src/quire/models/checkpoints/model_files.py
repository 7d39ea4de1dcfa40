"""The files of a model directory: only regular files inside it, as their names are untrusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePath

from quire.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_TEMPLATE_BYTES = 256 << 10  # of a chat template; the longest published ones have about 30 kB
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"  # in the hub's cache: links, and their targets


def find_file(directory: Path, name: str) -> Path | None:
    """Return a file of the model in `directory`; None if it does not exist.

    Args:
        directory: directory of the model; itself it may be a link.
        name: name of the file, relative to `directory`.

    Raises:
        ModelError: the name or a link leads out of the directory, or to something that is no regular file.
            Links into the blobs of the hub's cache are as good as files.
    """
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise ModelError(f"{directory} refers to {name!r:.300}; a model's files must be in its directory")
    file = directory / name
    try:
        root, real = directory.resolve(), file.resolve()
        state = file.stat()
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or an invalid name
        raise ModelError(
            f"{directory} refers to {name!r:.300}, which cannot be read: {error!s:.500}"
        ) from error
    roots = [root, root.parent.parent / _BLOBS] if root.parent.name == _SNAPSHOTS else [root]
    if not any(real.is_relative_to(allowed) for allowed in roots):
        raise ModelError(f"{file} leads to {real}, outside of the model's directory; copy that file into it")
    if not stat.S_ISREG(state.st_mode):
        raise ModelError(f"{file} is not a regular file")
    return file


def read_text(file: Path, max_bytes: int) -> str:
    """Return the text of a file that `find_file` has found.

    Raises:
        ModelError: it cannot be read, is not UTF-8, or is longer than `max_bytes`.
    """
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > max_bytes:
                raise ModelError(f"{file} has {size} bytes; at most {max_bytes} are read of such a file")
            return opened.read(size).decode()
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
