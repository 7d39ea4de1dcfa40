"""How often `mini-embed` finds the passage of a held-out query: `python tools/mini/retrieval.py`.

Each query of the model's pairs.jsonl is compared with the passages of all pairs, and counts as answered at k
if its own is among the k nearest. The same is counted for BM25, and for words hashed to as many numbers as a
row has.
"""

from __future__ import annotations

import argparse
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from quire import LLM
from quire.models.checkpoints.hub import resolve_model

NEAREST = (1, 10)
BM25_SATURATION, BM25_LENGTH_SHARE = 1.2, 0.75  # k1 and b as usual


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def bm25(queries: Sequence[str], passages: Sequence[str]) -> np.ndarray:
    """Scores [queries, passages] of Okapi BM25 (Robertson and Zaragoza 2009)."""
    counts = [Counter(words(passage)) for passage in passages]
    lengths = np.array([sum(one.values()) for one in counts])
    damping = BM25_SATURATION * (1 - BM25_LENGTH_SHARE + BM25_LENGTH_SHARE * lengths / lengths.mean())
    weights: dict[str, np.ndarray] = {}
    for word in {word for one in counts for word in one}:
        found = np.array([one[word] for one in counts])
        holding = np.count_nonzero(found)
        rarity = np.log(1 + (len(counts) - holding + 0.5) / (holding + 0.5))
        weights[word] = rarity * found * (BM25_SATURATION + 1) / (found + damping)
    none = np.zeros(len(counts))
    return np.stack([sum((weights.get(word, none) for word in words(query)), none) for query in queries])


def hashed(texts: Sequence[str], size: int) -> np.ndarray:
    """Rows [texts, size] of counted words, each at a place and with a sign by its hash."""
    rows = np.zeros((len(texts), size))
    for row, text in zip(rows, texts, strict=True):
        for word in words(text):
            code = zlib.crc32(word.encode())
            row[code // 2 % size] += 1 - code % 2 * 2
    return rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-9)


def embedded(llm: LLM, texts: Sequence[str]) -> np.ndarray:
    """Rows [texts, size] of the model, of as much of each text as fits."""
    return np.stack([output.outputs.data for output in llm.embed(list(texts), truncate_prompt_tokens=-1)])


def ranks(scores: np.ndarray, right: Sequence[int]) -> np.ndarray:
    """How many passages score at least as well as the right one of each query [queries]."""
    own = scores[np.arange(len(right)), right][:, None]
    return (scores >= own).sum(axis=1) - 1


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini-embed", help="a model that has a pairs.jsonl")
    model = parser.parse_args().model
    pairs = [json.loads(line) for line in (resolve_model(model) / "pairs.jsonl").read_text().splitlines()]
    queries = [pair["query"] for pair in pairs]
    passages = sorted({pair["passage"] for pair in pairs})
    right = [passages.index(pair["passage"]) for pair in pairs]
    with LLM(model) as llm:
        rows = embedded(llm, passages)
        found = {model: ranks(embedded(llm, queries) @ rows.T, right)}
    found["BM25"] = ranks(bm25(queries, passages), right)
    size = rows.shape[1]
    found["hashing"] = ranks(hashed(queries, size) @ hashed(passages, size).T, right)

    tasks = defaultdict[str, list[int]](list)
    for number, pair in enumerate(pairs):
        tasks[pair["task"]].append(number)
    columns = [f"{name}, {k}" for name in found for k in NEAREST]
    print(f"Of {len(passages)} passages, recall in % at {' and '.join(map(str, NEAREST))}\n")
    print(f"| task | queries | {' | '.join(columns)} |\n|{'---|' * (2 + len(columns))}")
    for task, numbers in tasks.items():
        shares = [100 * np.mean(one[numbers] < k) for one in found.values() for k in NEAREST]
        print(f"| {task} | {len(numbers)} | {' | '.join(f'{share:.1f}' for share in shares)} |")


if __name__ == "__main__":
    main()
