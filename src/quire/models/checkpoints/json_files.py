"""Reading the JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import ModelError


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if there is no such file.

    Raises:
        ModelError: it holds anything else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds {type(values).__name__}, not an object")
    return values
