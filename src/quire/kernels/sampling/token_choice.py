"""The interface of sampling, on the device that logits are on: of host and device kernels alike."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, NamedTuple

import numpy.typing as npt
import torch
from typing_extensions import TypeVar

from quire.kernels.arrays import Float32Array
from quire.step import NO_TOKEN, Int64Array

Array = npt.NDArray[Any]
A = TypeVar("A", torch.Tensor, Array, default=torch.Tensor)
"""Tensors on the device of the logits; arrays for a choice on the host."""

NUM_DRAW_NUMBERS = 5
"""Of a row: those of `RowDraws`, in the order of its fields."""


@dataclasses.dataclass(slots=True, frozen=True)
class Filters(Generic[A]):
    """Which tokens rows draw from, [R]."""

    temperature: A  # float64; 0: the likeliest token
    top_k: A  # int64, at least 1; V or more keeps all
    top_p: A  # float64, above 0; 1 keeps all
    min_p: A  # float64; 0 keeps all


@dataclasses.dataclass(slots=True, frozen=True)
class RowDraws(Filters[A]):
    """How each row draws its token, [R]."""

    uniforms: A  # float64, in [0, 1)


@dataclasses.dataclass(slots=True, frozen=True)
class LogitMasks(Generic[A]):
    """Which tokens may be chosen."""

    bitmask: A  # [N, V / 32 or more] int32; bit t % 32 of word t // 32: whether token t is allowed
    mask_of_row: A  # [R] int64, the row of `bitmask`; -1: all tokens are allowed
    ids: list[Int64Array | None] | None = None
    """[N] the tokens that are allowed, where the host has lists of them."""


NUM_EDIT_NUMBERS = 4
"""Of an edit of a logit: row, token id, what is added, and the token that the row's last one has to be."""


@dataclasses.dataclass(slots=True, frozen=True)
class LogitEdits:
    """What is added to single logits.

    All rows and ids must exist; they are not checked on the device.
    """

    numbers: torch.Tensor
    """[NUM_EDIT_NUMBERS, E] float64. A row of -1: no edit. What is added is a float32; -inf bans the token,
    and may be repeated; at most one number is finite for each row and id. `NO_TOKEN` in place of the token
    before: whatever that is."""
    tokens_before: torch.Tensor  # [R] int64, the last token of each row


class RowEdits(NamedTuple):
    """What is added to logits of one row; see `LogitEdits`."""

    row: int
    token_ids: Int64Array  # [E]
    added: Float32Array | float  # [E]
    after: Int64Array | int = NO_TOKEN  # [E] what the last token has to be


@dataclasses.dataclass(slots=True, frozen=True)
class LogitChanges(Generic[A]):
    """What changes logits before penalties do; None: nothing does in that way."""

    masks: LogitMasks[A] | None = None
    edits: LogitEdits | Sequence[RowEdits] = ()  # rows one by one on the host, which knows the last tokens


@dataclasses.dataclass(slots=True, frozen=True)
class RowPenalties(Generic[A]):
    """How rows are penalized for tokens that they have seen."""

    seen: A  # [N, V], see `SeenTokens.counts`; on the host [N], see `SeenIds`
    seen_of_row: A  # [R] int64, the row of `seen`; -1: no penalties
    repetition: A  # [R] float32; 1: none
    frequency: A  # [R] float32; 0: none
    presence: A  # [R] float32; 0: none
    drafts: A | None = None  # [R, K] int64, which the row has seen, too; `NO_TOKEN`: fewer


@dataclasses.dataclass(slots=True, frozen=True)
class RowLogprobs:
    """Log-probabilities of some rows: the chosen token first, then the likeliest in falling order.

    A row whose largest logit is not finite has numbers that mean nothing.
    """

    token_ids: torch.Tensor  # [S, 1 + n] int64
    logprobs: torch.Tensor  # [S, 1 + n] float64, nats
    ranks: torch.Tensor  # [S] int64, of the chosen tokens; 1 is likeliest, ties go to the lower id
    maxima: torch.Tensor  # [S] float32, the largest logits; a NaN if there is one in the row


class TokenChoice(ABC):
    """Chooses a token for each row of logits, without waiting for the device.

    A row's token is the one that `HostChoice` chooses for it, whatever the other rows are.
    """

    is_synchronous: ClassVar[bool] = False
    """Whether the host knows the tokens as soon as `choose` returns; else the next step may begin before."""

    @abstractmethod
    def choose(
        self,
        logits: torch.Tensor,
        draws: RowDraws[Any] | None = None,
        changes: LogitChanges[Any] | None = None,
        penalties: RowPenalties[Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (token ids, maxima), [R] int64 and float32.

        Args:
            logits: [R, V] float32 on the device; overwritten if anything changes them.
            draws: how each row draws; None: every row takes its likeliest token.
            changes: of the logits, before tokens are chosen.
            penalties: after the changes.

        Returns:
            Token ids, `NO_TOKEN` for a row whose largest logit is not finite, and the largest logits; a NaN
            if there is one in the row. A row whose mask leaves no token with the bans has `NO_TOKEN`, too,
            and -inf; without a mask, it has the likeliest token before the changes.
        """

    def input_ids(self, encoded: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Return the token ids of a step, [T] int64.

        Args:
            encoded: [T] int64, token ids, and -1 - slot for the last token of a slot.
            last: [slots] int64, the last token of each.
        """
        return torch.where(encoded < 0, last[(-1 - encoded).clamp(min=0)], encoded)

    def keep_last(self, token_ids: torch.Tensor, slots: torch.Tensor, last: torch.Tensor) -> None:
        """Write token ids [R] to `last` [slots] at `slots` [R], all int64; in place of `NO_TOKEN`, 0."""
        last.index_copy_(0, slots, token_ids.clamp(min=0))

    @abstractmethod
    def logprobs(
        self, logits: torch.Tensor, chosen: torch.Tensor, num_likeliest: int, rows: torch.Tensor
    ) -> RowLogprobs:
        """Return the log-probabilities of tokens by the logits as they are.

        Args:
            logits: [R, V] float32 on the device.
            chosen: [S] int64, a token of each of the rows; `NO_TOKEN` counts as token 0.
            num_likeliest: how many of the likeliest tokens there are beside it, up to 128 and V.
            rows: [S] int64, which of `logits` these are.
        """
