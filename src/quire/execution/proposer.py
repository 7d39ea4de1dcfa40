"""Proposers draft the next tokens of requests, for the model to verify in the following step."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import torch

from quire.execution.arrays import Int64Array
from quire.kernels.batch import AttentionBatch
from quire.step import IntArray


@dataclasses.dataclass(slots=True, frozen=True)
class RowsToContinue:
    """Requests to propose tokens for, S of them. KV of all but the last token of each has been computed."""

    token_ids: IntArray  # [max_num_seqs, max_model_len + 1] by slot
    slots: Int64Array  # [S]
    num_tokens: Int64Array  # [S] known tokens, prompt and output
    block_tables: IntArray  # [S, B]; entries past a row's last block are meaningless
    num_blocks: Int64Array  # [S]
    max_drafts: Int64Array  # [S] maximum number of tokens to propose for each


class Proposer(ABC):
    """Proposes drafts. A bad one costs time only: see `quire.execution.sampling_positions`."""

    def copy_blocks(self, copies: IntArray) -> None:  # noqa: B027 - most keep no KV
        """Repeat the copies of KV blocks [N, 2] (from, to) in the proposer's own cache, if it has one."""

    def follow(self, token_ids: torch.Tensor, batch: AttentionBatch) -> None:  # noqa: B027
        """Observe the tokens [T] that the model computes in a step, including drafts."""

    @abstractmethod
    def propose(self, rows: RowsToContinue, num_drafts: int) -> IntArray:
        """Return tokens that may follow in each row, padded with NO_TOKEN: [S, num_drafts]."""
