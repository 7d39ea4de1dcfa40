"""Cache eviction in plain Python, one layer and one token at a time, written from the rules alone."""

from __future__ import annotations

import math

import numpy as np


class NaiveLayer:
    """One layer of one sequence: the tokens that it holds, oldest first, and what is known of each."""

    def __init__(self, config, block_size: int, random) -> None:
        self.config, self.block = config, block_size
        self.held: list[int] = []
        self.score: dict[int, float] = {}
        self.lifetime: dict[int, int] = {}
        self.queue: list[dict[int, float]] = []
        self.num_vectors = self.num_queries = 0
        self.random = random

    def scored(self) -> list[int]:
        return self.held[self.config.start_size :]

    def see(self, new_tokens: list[int], weight, num_window_queries: int | None) -> None:
        """`weight(token)` is what the step gave a token; a window of None queries is all of them."""
        old = self.scored()
        self.held += new_tokens
        scored = self.scored()
        if not scored:
            return
        raw = [weight(token) for token in scored]
        pooled = self.pooled(raw)
        for token, value in zip(scored, pooled, strict=True):
            self.score[token] = self.score.get(token, 0.0) + value
        self.queue = [*self.queue, dict(zip(scored, raw, strict=True))]
        if self.config.aggregation_mode == "adaptive_rkv":
            self.queue = self.queue[-self.window() :]
        self.num_vectors += 1
        is_first, was_short = not self.lifetime, self.num_queries < self.config.snapkv_window_size
        self.num_queries += num_window_queries or 0
        if is_first or was_short:
            cap = self.num_queries if self.config.snapkv_window_size else math.inf
            self.lifetime = {token: min(len(scored) - i, cap) for i, token in enumerate(scored)}
            return
        for token in old:
            self.lifetime[token] += len(scored) - len(old)
        for token in scored[len(old) :]:
            self.lifetime[token] = len(scored) - scored.index(token)

    def pooled(self, weights: list[float]) -> list[float]:
        before = 3 if self.config.score_pooling == "centered" else 0
        return [max(weights[max(i - before, 0) : i - before + 7]) for i in range(len(weights))]

    def window(self) -> int:
        adaptive = self.config.adaptive_rkv_config
        return 8 if adaptive is None else adaptive.window_size

    def evict(self, keys) -> set[int]:
        """Return the tokens that go; `keys[head][token]` is a token's key."""
        config, size = self.config, self.block
        if len(self.scored()) + config.start_size <= config.max_cache_size + size - 1:
            return set()
        first, last = config.start_size // size, len(self.held) // size - config.recent_size // size
        blocks = [self.held[i * size : (i + 1) * size] for i in range(first, last)]
        room = (config.max_cache_size - config.start_size - config.recent_size) // size
        if config.aggregation_mode == "adaptive_rkv":
            gone = self.least_needed(blocks, room, keys)
            if gone:
                self.queue = []
        else:
            gone = self.lowest(blocks, len(blocks) - room)
        evicted = {token for index in gone for token in blocks[index]}
        self.held = [token for token in self.held if token not in evicted]
        return evicted

    def lowest(self, blocks: list[list[int]], count: int) -> list[int]:
        value = self.score.get
        if self.config.aggregation_mode == "norm_sum":
            value = {token: self.score[token] / self.lifetime[token] for token in self.scored()}.get
        sums = [sum(value(token) for token in block) for block in blocks]
        goes = sorted(sorted(range(len(blocks)), key=lambda i: (sums[i], i))[:count])
        crush = self.config.kvcrush_config
        if crush is None or not crush.budget or count < crush.budget:
            return goes
        if count == crush.budget:  # nothing goes, so nothing is drawn
            return []
        stays = self.crushed(blocks, goes, crush)
        return [index for index in goes if index not in stays]

    def crushed(self, blocks: list[list[int]], goes: list[int], crush) -> set[int]:
        flat = [token for block in blocks for token in block]
        ranked = sorted(range(len(flat)), key=lambda i: (-self.score[flat[i]], i))
        ones = {flat[i] for i in ranked[: len(flat) // 2]}
        bits = [[int(token in ones) for token in block] for block in blocks]
        anchor = {
            "zeros": lambda: [0] * self.block,
            "ones": lambda: [1] * self.block,
            "alternating": lambda: [i % 2 for i in range(self.block)],
            "mean": lambda: [int(sum(row[i] for row in bits) > len(bits) / 2) for i in range(self.block)],
            "random": lambda: self.random.integers(0, 2, self.block).tolist(),
        }[crush.anchor_point_mode]()
        distance = {i: sum(a != b for a, b in zip(bits[i], anchor, strict=True)) for i in goes}
        by_distance = sorted(goes, key=lambda i: (distance[i], i))
        step = len(goes) // crush.budget
        return {by_distance[i * step] for i in range(crush.budget)}

    def mean_of_queue(self) -> dict[int, float]:
        scored = self.scored()
        mean = [sum(vector.get(token, 0.0) for vector in self.queue) / len(self.queue) for token in scored]
        if self.num_vectors > 1:
            mean = self.pooled(mean)
        return dict(zip(scored, mean, strict=True))

    def least_needed(self, blocks: list[list[int]], room: int, keys) -> list[int]:
        adaptive = self.config.adaptive_rkv_config
        mass = 0.9 if adaptive is None else adaptive.attention_mass
        value = self.mean_of_queue()
        sums = [sum(value[token] for token in block) for block in blocks]
        kept: list[int] = []
        for index in sorted(range(len(blocks)), key=lambda i: (-sums[i], i)):
            if len(kept) == room or sum(sums[i] for i in kept) >= mass * sum(sums):
                break
            kept.append(index)
        rest = [index for index in range(len(blocks)) if index not in kept]
        unlike = naive_diversity(keys, blocks)
        columns = [i * self.block + j for i in rest for j in range(self.block)]
        means = {index: float(np.mean([unlike[index][column] for column in columns])) for index in rest}
        diverse = sorted(rest, key=lambda i: (-means[i], i))[: room - len(kept)]
        return [index for index in rest if index not in diverse]


def naive_diversity(keys, blocks: list[list[int]]) -> np.ndarray:
    """[blocks, tokens], from the whole matrix of similarities."""
    tokens = [token for block in blocks for token in block]
    total = np.zeros((len(tokens), len(tokens)))
    for head in keys:
        rows = np.array([head[token] / np.linalg.norm(head[token]) for token in tokens])
        cosine = np.array([[float(a @ b) for b in rows] for a in rows])
        for i in range(len(tokens)):
            cosine[i][i] = 0.0
            cosine[i][cosine[i] < cosine[i].mean()] = 0.0
        total += cosine / len(keys)
    size = len(blocks[0])
    return np.array([-total[i * size : (i + 1) * size].sum(axis=0) for i in range(len(blocks))])
