"""Files that are written from the code: one function writes or checks them."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(path: Path, text: str) -> int:
    """Write `text` to `path`, or with `--check` only say if it differs; return the exit status."""
    if "--check" not in sys.argv[1:]:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.read_text(encoding="utf-8") != text:
        print(f"{path} is not current; run: python {sys.argv[0]}", file=sys.stderr)
        return 1
    return 0
