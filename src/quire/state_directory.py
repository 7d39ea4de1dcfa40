"""Where Quire keeps what outlives a run and is no model: histories and logs."""

from __future__ import annotations

import os
from pathlib import Path


def state_directory() -> Path:
    """Return the directory, which may not exist yet: quire in the user's state directory.

    Raises:
        RuntimeError: the user has no home directory.
    """
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "quire"
