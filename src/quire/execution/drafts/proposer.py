"""Proposers draft the next tokens of requests, for the model to verify in the following step."""

from __future__ import annotations

import dataclasses
import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from typing_extensions import override

from quire.kernels.attention.batch import AttentionBatch
from quire.step import NO_TOKEN, Int64Array, IntArray

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

FOREVER = 1 << 30
"""Steps for which a proposer that has failed proposes nothing."""


@dataclasses.dataclass(slots=True, frozen=True)
class RowsToContinue:
    """S requests to propose tokens for after a step. KV of all but the last token of each is computed."""

    token_ids: IntArray  # [max_num_seqs, max_model_len + 1] by slot
    slots: Int64Array  # [S]
    num_tokens: Int64Array  # [S] known tokens, prompt and output
    block_tables: IntArray  # [max_num_seqs, B] by slot; entries past a row's last block are meaningless
    num_blocks: Int64Array  # [max_num_seqs] by slot
    max_drafts: Int64Array  # [S] maximum number of tokens to propose for each
    other_slots: Int64Array = dataclasses.field(
        default_factory=lambda: np.empty(0, dtype=np.int64)
    )  # [O] of others that have sampled in the step, too
    is_newest: bool = True  # whether no step has been begun since
    seconds_known: float = 0.0  # for which the tokens of the step have been known


class Proposer(ABC):
    """Proposes drafts. A bad one costs time only: see `quire.execution.sampling.positions`."""

    follows_tokens = False
    """Whether `follow` is called in each step."""

    def open(self, slot: int, num_tokens: int, scope: tuple[str, str]) -> None:  # noqa: B027
        """Expect a request in `slot`, new or resumed, with that many known tokens.

        What requests of the same `scope` have generated may appear in its drafts.
        """

    def finish(self, slot: int, output: IntArray) -> None:  # noqa: B027 - most keep nothing of a request
        """Observe the output tokens [T] of the request in `slot`, which has ended."""

    def copy_blocks(self, copies: IntArray) -> None:  # noqa: B027 - most keep no KV
        """Repeat the copies of KV blocks [N, 2] (from, to) in the proposer's own cache, if it has one."""

    def begin_step(self, num_tokens: int, *, is_alone: bool) -> None:  # noqa: B027
        """Prepare for a step.

        Args:
            num_tokens: of the step, including drafts.
            is_alone: whether the one before has been computed.
        """

    def follow(  # noqa: B027
        self, token_ids: torch.Tensor, batch: AttentionBatch, *, is_captured: bool
    ) -> None:
        """Observe the tokens [T] that the model computes in a step, including drafts.

        `is_captured` says whether the step is one of those that are captured and replayed.
        """

    @property
    def max_array_bytes(self) -> int:
        """See `StepGraphs.max_array_bytes`, of the steps that the proposer captures."""
        return 0

    @abstractmethod
    def propose(self, rows: RowsToContinue, num_drafts: int) -> IntArray | None:
        """Return tokens that may follow in each row, padded with NO_TOKEN: [S, num_drafts]; None: none."""

    def num_idle_steps(self, slots: Int64Array) -> IntArray:
        """Return for how many steps nothing will be proposed for each of `slots` [S].

        The requests need not wait for their tokens in these. Called after `propose`, for all requests that
        have sampled.
        """
        return np.zeros(len(slots), dtype=np.int32)


class GuardedProposer(Proposer):
    """Proposes what its proposer does, until that raises or returns invalid drafts; then nothing.

    Args:
        proposer: may fail at any call.
        vocab_size: token ids are below it.
    """

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self.follows_tokens = proposer.follows_tokens
        self._proposer: Proposer | None = proposer
        self._vocab_size = vocab_size

    @override
    def open(self, slot: int, num_tokens: int, scope: tuple[str, str]) -> None:
        self._unless_failed(lambda proposer: proposer.open(slot, num_tokens, scope), None)

    @override
    def finish(self, slot: int, output: IntArray) -> None:
        self._unless_failed(lambda proposer: proposer.finish(slot, output), None)

    @override
    def copy_blocks(self, copies: IntArray) -> None:
        self._unless_failed(lambda proposer: proposer.copy_blocks(copies), None)

    @override
    def begin_step(self, num_tokens: int, *, is_alone: bool) -> None:
        self._unless_failed(lambda proposer: proposer.begin_step(num_tokens, is_alone=is_alone), None)

    @override
    def follow(self, token_ids: torch.Tensor, batch: AttentionBatch, *, is_captured: bool) -> None:
        self._unless_failed(lambda proposer: proposer.follow(token_ids, batch, is_captured=is_captured), None)

    @property
    @override
    def max_array_bytes(self) -> int:
        return self._unless_failed(lambda proposer: max(0, operator.index(proposer.max_array_bytes)), 0)

    @override
    def propose(self, rows: RowsToContinue, num_drafts: int) -> IntArray | None:
        shape = len(rows.slots), num_drafts
        return self._unless_failed(
            lambda proposer: self._checked(proposer.propose(rows, num_drafts), shape), None
        )

    @override
    def num_idle_steps(self, slots: Int64Array) -> IntArray:
        counts = self._unless_failed(
            lambda proposer: _counts(proposer.num_idle_steps(slots), len(slots)), None
        )
        return np.full(len(slots), FOREVER, dtype=np.int32) if counts is None else counts

    def _unless_failed(self, call: Callable[[Proposer], Result], otherwise: Result) -> Result:
        """Return what `call` does; `otherwise` if it fails, or something has failed before."""
        if self._proposer is not None:
            try:
                return call(self._proposer)
            except Exception:
                self._proposer = None
                logger.exception("the proposer of drafts failed; until the engine ends, nothing is proposed")
        return otherwise

    def _checked(self, drafts: object, shape: tuple[int, int]) -> IntArray | None:
        if drafts is None:
            return None
        if not (isinstance(drafts, np.ndarray) and drafts.dtype.kind == "i" and drafts.shape == shape):
            raise TypeError(f"the drafts are not an array {list(shape)} of integers: {drafts!r:.100}")
        if drafts.size and not (drafts.min() >= NO_TOKEN and drafts.max() < self._vocab_size):
            raise ValueError(
                f"the drafts have ids from {drafts.min()} to {drafts.max()}; the vocabulary has ids 0 to "
                f"{self._vocab_size - 1}"
            )
        return drafts


def _counts(found: object, num_slots: int) -> IntArray:
    if not (isinstance(found, np.ndarray) and found.dtype.kind == "i" and found.shape == (num_slots,)):
        raise TypeError(f"the numbers of steps are not an array [{num_slots}] of integers: {found!r:.100}")
    return np.minimum(np.maximum(found, 0), FOREVER).astype(np.int32)
