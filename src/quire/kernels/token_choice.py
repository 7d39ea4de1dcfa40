"""Choosing tokens on the device that logits are on: the interface of kernel sets that can."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import torch


@dataclasses.dataclass(slots=True, frozen=True)
class RowDraws:
    """How each row draws its token; tensors [R] on the device of the logits."""

    temperature: torch.Tensor  # float64; 0: the likeliest token
    top_k: torch.Tensor  # int64, at least 1; V or more keeps all
    top_p: torch.Tensor  # float64, above 0; 1 keeps all
    min_p: torch.Tensor  # float64; 0 keeps all
    uniforms: torch.Tensor  # float64, in [0, 1)


class TokenChoice(ABC):
    """Chooses a token for each row of logits, without anybody waiting for the device.

    A row's token is the one that the sampler on the host chooses for it, whatever the other rows are.
    """

    @abstractmethod
    def choose(
        self, logits: torch.Tensor, draws: RowDraws | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (token ids, maxima), [R] int64 and float32.

        Args:
            logits: [R, V] float32 on the device.
            draws: how each row draws; None: every row takes its likeliest token.

        Returns:
            Token ids, `NO_TOKEN` for a row whose largest logit is not finite, and the largest logits; a NaN
            if there is one in the row.
        """
