"""What guesses the next tokens of requests, for the model to verify in the step after."""

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

    token_ids: IntArray  # [max_num_seqs, most tokens] by slot
    slots: Int64Array  # [S]
    num_tokens: Int64Array  # [S] known tokens, prompt and output
    block_tables: IntArray  # [S, B]; entries past a row's last block are meaningless
    num_blocks: Int64Array  # [S]
    max_drafts: Int64Array  # [S] most tokens to propose for each


class Proposer(ABC):
    """Proposes drafts. A bad one costs time and never a token: see `quire.execution.sampling_positions`."""

    def copy_blocks(self, copies: IntArray) -> None:  # noqa: B027 - most keep no KV
        """Take part in the KV cache's copies [N, 2] of blocks (from, to)."""

    def follow(self, token_ids: torch.Tensor, batch: AttentionBatch) -> None:  # noqa: B027
        """See the tokens [T] that the model computes in a step, drafts among them."""

    @abstractmethod
    def propose(self, rows: RowsToContinue, num_drafts: int) -> IntArray:
        """Return tokens that may follow in each row, padded with NO_TOKEN: [S, num_drafts]."""
