"""Scores of one sequence's tokens, from their attention weights in each step.

L layers; tokens are those from the end of the start area on, in the order of the sequence. Sums have one
order, so that equal weights give equal bits.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from quire.config import AggregationMode, CacheEvictionConfig, ScorePooling
from quire.step import BoolArray

FloatArray = npt.NDArray[np.float64]
WeightArray = npt.NDArray[np.float32]
FloatT = TypeVar("FloatT", np.float32, np.float64)


@dataclasses.dataclass(slots=True, frozen=True)
class MaxPooling:
    """Replaces each weight by the highest around it, so that the neighbours of an important token stay.

    Attributes:
        width: tokens over whose weights the maximum is taken, the token itself included.
        num_before: of these, the tokens before it.
    """

    width: int = 7
    num_before: int = 0

    def of(self, weights: npt.NDArray[FloatT]) -> npt.NDArray[FloatT]:
        """Return the maximum around each of at least one weight in its row, as far as there are any."""
        num_tokens = weights.shape[1]
        # A copy of the first weight changes no maximum that it is in.
        pooled = (
            np.pad(weights, ((0, 0), (self.num_before, 0)), mode="edge")
            if self.num_before
            else weights.copy()
        )
        covered = 1
        while covered < self.width:
            shift = min(covered, self.width - covered)
            pooled[:, :-shift] = np.maximum(pooled[:, :-shift], pooled[:, shift:])
            covered += shift
        return pooled[:, :num_tokens]


FORWARD = MaxPooling()
CENTERED = MaxPooling(num_before=3)


class TokenScores(ABC):
    """The scores of one sequence's tokens."""

    @abstractmethod
    def register(self, weights: WeightArray, num_queries: int) -> None:
        """Take the attention weights of one step.

        Args:
            weights: [L, tokens], summed over heads and queries; tokens unknown so far are at the end.
            num_queries: the queries that they come from.
        """

    @abstractmethod
    def token_scores(self) -> FloatArray:
        """Return the score of each token, [L, tokens]."""

    @abstractmethod
    def keep(self, kept: BoolArray) -> None:
        """Forget the tokens that are not `kept`, [L, tokens]; each layer keeps equally many."""


class SummedScores(TokenScores):
    """Pooled weights, added up.

    Args:
        num_layers: L.
        pooling: of each step's weights.
    """

    def __init__(self, num_layers: int, pooling: MaxPooling = FORWARD) -> None:
        self._pooling = pooling
        self._sums: FloatArray = np.zeros((num_layers, 0))  # wider than needed; zero past the tokens
        self.num_tokens = 0

    @override
    def register(self, weights: WeightArray, num_queries: int) -> None:
        self.num_tokens = weights.shape[1]
        self._sums = _widened(self._sums, self.num_tokens)
        self._sums[:, : self.num_tokens] += self._pooling.of(weights)

    @override
    def token_scores(self) -> FloatArray:
        return self.sums

    @property
    def sums(self) -> FloatArray:
        """The weights added up, before they become scores: [L, tokens]."""
        return self._sums[:, : self.num_tokens]

    @override
    def keep(self, kept: BoolArray) -> None:
        remaining = self.sums[kept].reshape(len(kept), -1)
        self.num_tokens = remaining.shape[1]
        self._sums = _widened(remaining, self.num_tokens + 1)


class NormalizedScores(SummedScores):
    """Pooled weights, added up and divided by the number of queries that could have seen the token.

    Args:
        num_layers: L.
        window: `CacheEvictionConfig.snapkv_window_size`.
        pooling: of each step's weights.
    """

    def __init__(self, num_layers: int, window: int, pooling: MaxPooling = FORWARD) -> None:
        super().__init__(num_layers, pooling)
        self._window = window
        self._num_queries = 0
        self._lifetimes: FloatArray = np.zeros((num_layers, 0))

    @override
    def register(self, weights: WeightArray, num_queries: int) -> None:
        num_old = self.num_tokens
        super().register(weights, num_queries)
        self._lifetimes = _widened(self._lifetimes, self.num_tokens)
        is_settled = self._num_queries > 0 and self._num_queries >= self._window
        self._num_queries += num_queries
        num_new = self.num_tokens - num_old
        if is_settled:
            self._lifetimes[:, :num_old] += num_new
            self._lifetimes[:, num_old : self.num_tokens] = np.arange(num_new, 0, -1)
        else:
            most = self._num_queries if self._window else self.num_tokens
            distance_from_end = np.arange(self.num_tokens, 0, -1)
            self._lifetimes[:, : self.num_tokens] = np.minimum(distance_from_end, most)

    @override
    def token_scores(self) -> FloatArray:
        scores: FloatArray = self.sums / self._lifetimes[:, : self.num_tokens]
        return scores

    @override
    def keep(self, kept: BoolArray) -> None:
        remaining = self._lifetimes[:, : self.num_tokens][kept].reshape(len(kept), -1)
        super().keep(kept)
        self._lifetimes = _widened(remaining, self.num_tokens + 1)


class WindowedScores(TokenScores):
    """The mean of the last steps' weights, pooled; the steps before the last eviction do not count.

    The sequence's first weights, as long as there are no others, are not pooled.

    Args:
        num_layers: L.
        window_size: steps.
        pooling: of the mean.
    """

    def __init__(self, num_layers: int, window_size: int, pooling: MaxPooling = FORWARD) -> None:
        self._num_layers = num_layers
        self._pooling = pooling
        self._steps: deque[WeightArray] = deque(maxlen=window_size)
        self._num_registered = 0
        self._num_tokens = 0

    @override
    def register(self, weights: WeightArray, num_queries: int) -> None:
        self._steps.append(weights)
        self._num_registered += 1
        self._num_tokens = weights.shape[1]

    @override
    def token_scores(self) -> FloatArray:
        scores: FloatArray = np.zeros((self._num_layers, self._num_tokens))
        for weights in self._steps:
            scores[:, : weights.shape[1]] += weights
        scores /= max(len(self._steps), 1)
        return scores if self._num_registered == 1 else self._pooling.of(scores)

    @override
    def keep(self, kept: BoolArray) -> None:
        self._steps.clear()
        self._num_tokens = int(kept[0].sum()) if len(kept) else 0


def token_scores_of(config: CacheEvictionConfig, num_layers: int) -> TokenScores:
    """Return the scores, as yet of no tokens, that `config.aggregation_mode` asks for."""
    pooling = CENTERED if config.score_pooling == ScorePooling.CENTERED else FORWARD
    match config.aggregation_mode:
        case AggregationMode.SUM:
            return SummedScores(num_layers, pooling)
        case AggregationMode.NORM_SUM:
            return NormalizedScores(num_layers, config.snapkv_window_size, pooling)
        case AggregationMode.ADAPTIVE_RKV:
            return WindowedScores(num_layers, config.adaptive_rkv_config.window_size, pooling)


def _widened(array: FloatArray, width: int) -> FloatArray:
    """Return `array` with at least `width` columns, zeros after its own; now and then with room for more."""
    if array.shape[1] >= width:
        return array
    return np.pad(array, ((0, 0), (0, width + width // 8 + 64 - array.shape[1])))
