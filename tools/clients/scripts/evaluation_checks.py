"""What the scripts of clients that evaluate embeddings measure, and what they compare it with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Titles and the texts under them, held out from the training of mini-embed.
PAIRS = Path(__file__).parents[3] / "src" / "quire" / "mini-embed" / "pairs.jsonl"
TITLES = [pair for pair in map(json.loads, PAIRS.read_text().splitlines()) if pair["task"] == "titles"]
QUERIES, PASSAGES = [pair["query"] for pair in TITLES], [pair["passage"] for pair in TITLES]
# Each title with its own text, 1, and with the next one's, 0.
JUDGED = [
    *((query, passage, 1.0) for query, passage in zip(QUERIES, PASSAGES, strict=True)),
    *((query, passage, 0.0) for query, passage in zip(QUERIES, PASSAGES[1:] + PASSAGES[:1], strict=True)),
]


def rows_of_library() -> dict[str, list[float]]:
    """The rows that `LLM.embed` returns, by text, from a process with Quire's own environment."""
    texts = QUERIES + PASSAGES
    program = [os.environ["QUIRE_PYTHON"], str(Path(__file__).with_name("library_rows.py"))]
    written = subprocess.run(program, input=json.dumps(texts), stdout=subprocess.PIPE, text=True, check=True)
    return dict(zip(texts, json.loads(written.stdout), strict=True))


def same_scores(found: Sequence[float], expected: Sequence[float], by_chance: Sequence[float]) -> None:
    """Fail unless scores are those with the library's rows, and twice those with random ones, or more."""
    print(f"scores: {found}; with the library's rows: {expected}; by chance: {by_chance}", file=sys.stderr)
    for score, of_library, of_random in zip(found, expected, by_chance, strict=True):
        if not (abs(score - of_library) <= 1e-5 and score >= 2 * of_random):
            raise AssertionError(f"{score}, with the library's rows {of_library}, by chance {of_random}")
