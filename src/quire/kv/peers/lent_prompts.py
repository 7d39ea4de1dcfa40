"""The side that lends: which blocks of which prompts peers may read."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.datadist.loans.loans import BlockIds, Loans
from quire.errors import InvalidRequestError
from quire.kv.blocks.block_hash import SequenceKeys
from quire.kv.blocks.prompt_blocks import PromptBlocks, Save
from quire.kv.peers.loan_steps import LoanStep, LoanSteps
from quire.kv.peers.shared_prompt import (
    NO_STATES,
    StateBlocks,
    firsts_moved,
    lendable_digest,
    lendable_keys,
    moved_blocks,
    num_lendable_tokens,
)
from quire.kv.peers.transfer_params import lending_params
from quire.request import Request
from quire.status import RequestStatus
from quire.step import IntArray, SchedulerOutput


@dataclasses.dataclass(slots=True, frozen=True)
class _Lent:
    transfer_id: str
    loan: int  # its number
    num_blocks: int
    firsts: list[int]  # see `firsts_moved`
    keeps_last: bool  # until the request ends, which may write behind the prompt in its last block


class LentPrompts:
    """Lends all tokens but the last of prompts whose requests ask for that.

    With states, these are full blocks, and the state behind them. It is ready when the request ends, and so
    is the loan: a checkpoint stays only from then on.

    Args:
        block_size: tokens per block.
        loans: what peers read.
        steps: reports to them what steps have computed.
        windows: of each cache group but the first, in tokens.
        states: where states are, if there are any.
    """

    def __init__(
        self,
        block_size: int,
        loans: Loans,
        steps: LoanSteps,
        *,
        windows: Sequence[int] = (),
        states: StateBlocks = NO_STATES,
    ) -> None:
        self._block_size = block_size
        self._loans = loans
        self._steps = steps
        self._windows = windows
        self._states = states
        self._checkpoints: dict[str, int] = {}  # by request that is about to end
        self._prompts = PromptBlocks(block_size)
        self._keys: dict[str, SequenceKeys] = {}
        self._lent: dict[str, _Lent] = {}  # by request

    def arrive(self, request: Request) -> None:
        """Offer a request's prompt, if it asks for that.

        Raises:
            InvalidRequestError: its parameters are invalid.
        """
        params = lending_params(request.kv_transfer_params)
        num_tokens = num_lendable_tokens(request, self._block_size, self._states)
        is_lent_already = request.shares_prompt_with is not None  # by the first of several completions
        if params is None or num_tokens < self._block_size or request.beam_sequence_ids or is_lent_already:
            return
        transfer_id = params.transfer_id or secrets.token_hex(16)
        keys = lendable_keys(request, self._block_size, num_tokens)
        digest, num_blocks = lendable_digest(request), len(keys) + self._states.num_pieces
        loan = self._loans.offer(transfer_id, request.request_id, num_blocks, digest)
        if loan is None:
            raise InvalidRequestError(
                f"transfer_id {transfer_id!r} is in use by another request; each needs its own",
                param="kv_transfer_params",
            )
        self._keys[request.request_id] = keys
        writes_on = request.sampling_params.max_tokens != 1 and num_tokens % self._block_size > 0
        firsts = firsts_moved(self._windows, num_tokens, self._block_size)
        self._lent[request.request_id] = _Lent(transfer_id, loan, len(keys), firsts, writes_on)

    def has(self, request: Request) -> bool:
        """Return whether a request's prompt is lent."""
        return request.request_id in self._lent

    def plan(self, output: SchedulerOutput) -> list[LoanStep]:
        """Return what a step completes."""
        if not self._lent:
            return []
        for request_id in output.preempted_req_ids:
            if request_id in self._lent:
                self._loans.end(self._lent[request_id].loan, "its request was preempted")
        return [self._loan_step(save) for save in self._prompts.completed_by(output, self._keys)]

    def lend_state(self, request: Request, checkpoint: int) -> None:
        """Lend the state behind a prompt with the rest of it, when its request ends."""
        self._checkpoints[request.request_id] = checkpoint

    def finish(self, request: Request, block_ids: IntArray) -> tuple[bool, str | None]:
        """Note that a request has ended, with its blocks [G, N].

        Returns:
            Whether its blocks are to be held, and its transfer id if the prompt was computed to the end: a
            peer that has read it, or needs it no more, may have given it back already.
        """
        lent = self._lent.get(request.request_id)
        checkpoint = self._checkpoints.pop(request.request_id, None)
        if lent is None:
            return False, None
        self._keys.pop(request.request_id, None)
        self._prompts.forget(request.request_id)
        is_complete = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        was_given_back = False
        if is_complete and block_ids.size:
            self._steps.settle(request.request_id)
            ids = self._lent_ids(lent, 0, block_ids[:, : lent.num_blocks])
            if lent.keeps_last:
                self._loans.begin_step(lent.loan, lent.num_blocks - 1, ids[-1:])
                self._loans.end_step(lent.loan)
            if checkpoint is not None:
                pieces = [(block,) for block in self._states.of(checkpoint)]
                self._loans.begin_step(lent.loan, lent.num_blocks, pieces)
                self._loans.end_step(lent.loan)
            if self._loans.is_ready(lent.loan):
                return True, lent.transfer_id
            was_given_back = self._loans.was_given_back(lent.loan)
        self.end(request.request_id, "its prompt was not computed to the end, or its state is gone")
        return False, lent.transfer_id if was_given_back else None

    def end(self, request_id: str, reason: str) -> None:
        """Stop lending a request's prompt."""
        lent = self._lent.pop(request_id, None)
        if lent is not None:
            self._loans.end(lent.loan, reason)

    def _loan_step(self, save: Save) -> LoanStep:
        lent = self._lent[save.request_id]
        shape = len(save.blocks), len(lent.firsts)
        block_ids = np.array([ids for _, ids in save.blocks], dtype=np.int32).reshape(shape).T
        if lent.keeps_last:
            block_ids = block_ids[:, : lent.num_blocks - 1 - save.first_block]
        ids = self._lent_ids(lent, save.first_block, block_ids)
        return LoanStep(save.request_id, lent.loan, save.first_block, ids)

    def _lent_ids(self, lent: _Lent, first_block: int, block_ids: IntArray) -> list[BlockIds]:
        """Return blocks [G, N] of a loan from `first_block` on; if one has been left, the loan ends."""
        try:
            moved = moved_blocks(block_ids, first_block, lent.firsts)
        except ValueError:
            self._loans.end(lent.loan, "its request has left blocks before a window")
            return []
        return list(zip(*moved.tolist(), strict=True))


def answer(transfer_id: str, address: tuple[str, int], engine_id: str) -> Mapping[str, Any]:
    """Return what a peer must know to read a loan."""
    host, port = address
    return {
        "do_remote_prefill": True,
        "remote_host": host,
        "remote_port": port,
        "transfer_id": transfer_id,
        "remote_engine_id": engine_id,
    }
