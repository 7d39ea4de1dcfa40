"""What the scripts of clients for embeddings embed and expect; `report` and `same` are those of checks.py."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence

from checks import BASE_URL

MODEL = "mini-embed"
TEXTS = (
    "A fixed-size piece of the KV cache that holds the keys and values of a few tokens.",
    "The number of calculations done for each byte read from memory.",
    "It hides later positions, so each prediction depends only on what came before.",
)
QUESTION = "Please explain what a KV block is."
FOUND = TEXTS[0]
SIZE, SHORT_SIZE = 192, 64


def rows_of(texts: Sequence[str], **fields: object) -> list[list[float]]:
    """The rows that the server sends if it is asked by hand."""
    body = json.dumps({"model": MODEL, "input": list(texts), **fields}).encode()
    asked = urllib.request.Request(
        f"{BASE_URL}/embeddings", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(asked) as answer:
        return [entry["embedding"] for entry in json.load(answer)["data"]]


def same_rows(found: Sequence[Sequence[float]], texts: Sequence[str], **fields: object) -> None:
    """Fail unless rows are those of the texts, in their order, but for what float32 loses."""
    expected = rows_of(texts, **fields)
    if [len(row) for row in found] != [len(row) for row in expected]:
        raise AssertionError(f"rows of {[len(row) for row in found]} numbers")
    pairs = zip(found, expected, strict=True)
    most = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
    if most > 1e-6:
        raise AssertionError(f"rows that differ by {most}")
