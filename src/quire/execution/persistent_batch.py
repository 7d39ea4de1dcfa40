"""What the runner keeps between steps: the requests it knows, and a row per slot for those that run.

Rows hold token ids, block tables and counts as numpy arrays, so that a step's ragged batch is a few vector
operations. A preempted request leaves its row and keeps its tokens until it is resumed or finished.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.execution.drafts.proposer import RowsToContinue
from quire.execution.known_tokens import KnownTokens
from quire.kv.blocks.groups import NULL_BLOCK
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.step import (
    NO_TOKEN,
    BoolArray,
    CachedRequestData,
    ChosenTokens,
    ForkData,
    Int64Array,
    IntArray,
    NewRequestData,
    ResumedRequestData,
    SchedulerOutput,
)

_NO_SLOT = -1
_KNOWN = -1


class InconsistentPlanError(ValueError):
    """A `SchedulerOutput` that contradicts earlier ones."""


@dataclasses.dataclass(slots=True)
class RunnerRequest:
    """A request that the runner knows. Its tokens are in its row while it has a slot, else in `saved`."""

    request_id: str
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    draft_scope: tuple[str, str]
    saved: IntArray  # prompt and output tokens as of the preemption; empty while it has a slot
    pooling_params: PoolingParams | None = None  # None: it generates
    slot: int = _NO_SLOT
    num_prompt_logprobs_reported: int = 0

    @property
    def prompt_logprobs_end(self) -> int:
        """Number of prompt log-probabilities in all, or 0 if all that were asked for are reported."""
        if self.sampling_params.prompt_logprobs is None:
            return 0
        end = self.num_prompt_tokens - 1
        return end if self.num_prompt_logprobs_reported < end else 0


class UnknownTokens(NamedTuple):
    """The next tokens of some rows, which a device is still choosing."""

    slots: Int64Array  # [S]
    times_written: Int64Array  # [S] how often a row had been written when they were expected
    positions: Int64Array  # [S] absolute, of the first one


class PersistentBatch:
    """Rows of up to `max_num_seqs` running requests, and all requests that are not finished.

    Args:
        max_num_seqs: number of slots.
        max_model_len: maximum number of tokens of a request.
        block_size: tokens per KV block.
        num_blocks: KV blocks in the cache of each of the G cache groups.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, num_blocks: Sequence[int]
    ) -> None:
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._num_kv_blocks = np.array(num_blocks)
        self._requests: dict[str, RunnerRequest] = {}
        self._checked_rows: tuple[tuple[str, ...], bytes] | None = None  # until a slot changes hands
        self._by_slot: list[RunnerRequest | None] = [None] * max_num_seqs
        # Zeroed pages are committed on the first write; the last column is for the token after max_model_len.
        self.token_ids: IntArray = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.num_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._times_written: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._unknown_at: Int64Array = np.full(max_num_seqs, _KNOWN, dtype=np.int64)  # position of the last
        self.num_prompt_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        table_length = -(-(max_model_len + 1) // block_size)
        # [G, slots, blocks]; of a group with a window, what is before it may be others' blocks by now.
        self._block_tables: IntArray = np.zeros((len(num_blocks), max_num_seqs, table_length), dtype=np.int32)
        self._num_blocks: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_kv_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_evicted: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)  # tokens, of those
        # Positions whose following prompt token is to be reported end here; 0 when nothing is left to report.
        self.prompt_logprobs_end: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of requests known, running or preempted."""
        return len(self._requests)

    def running(self, slot: int) -> RunnerRequest:
        """Return the request in `slot`."""
        request = self._by_slot[slot]
        if request is None:
            raise InconsistentPlanError(f"slot {slot} is empty")
        return request

    # -- adding and removing requests ----------------------------------------------------------------------

    def finish(self, request_id: str) -> int | None:
        """Forget a request; return the slot it left, None if it had none or is not known."""
        request = self._requests.pop(request_id, None)
        return None if request is None else self._leave(request)

    def preempt(self, request_id: str) -> int | None:
        """Take a request out of its row and keep its tokens; return the slot it left, None if it had none."""
        request = self._requests.get(request_id)
        if request is None or request.slot == _NO_SLOT:
            return None
        request.saved = self.token_ids[request.slot, : self.num_tokens[request.slot]].copy()
        return self._leave(request)

    def admit(self, data: NewRequestData) -> RunnerRequest:
        """Put a request that is new to the runner into its row."""
        num_tokens = len(data.prompt_token_ids) + len(data.output_token_ids)
        if not len(data.prompt_token_ids) or num_tokens > self._max_model_len:
            raise InconsistentPlanError(
                f"request {data.request_id!r} has {len(data.prompt_token_ids)} prompt tokens and "
                f"{num_tokens} in all; from 1 to max_model_len {self._max_model_len} fit"
            )
        request = RunnerRequest(
            request_id=data.request_id,
            sampling_params=data.sampling_params,
            eos_token_ids=data.eos_token_ids,
            num_prompt_tokens=len(data.prompt_token_ids),
            draft_scope=data.draft_scope,
            pooling_params=data.pooling_params,
            saved=np.concatenate((data.prompt_token_ids, np.array(data.output_token_ids, dtype=np.int32))),
        )
        self._enter(request, data)
        self._requests[data.request_id] = request
        return request

    def resume(self, data: ResumedRequestData) -> RunnerRequest:
        """Put a preempted request into its new row, with the first `num_tokens` of its tokens."""
        request = self._requests.get(data.request_id)
        if request is None:
            raise InconsistentPlanError(
                f"request {data.request_id!r} is resumed, but the runner does not know it"
            )
        if request.slot != _NO_SLOT:
            raise InconsistentPlanError(
                f"request {data.request_id!r} is resumed, but it is running in slot {request.slot}"
            )
        if not request.num_prompt_tokens <= data.num_tokens <= len(request.saved):
            raise InconsistentPlanError(
                f"request {data.request_id!r} is resumed with {data.num_tokens} tokens; "
                f"its prompt has {request.num_prompt_tokens}, and {len(request.saved)} are known"
            )
        request.saved = request.saved[: data.num_tokens]
        request.num_prompt_logprobs_reported = data.num_prompt_logprobs
        self._enter(request, data)
        return request

    def _enter(self, request: RunnerRequest, data: NewRequestData | ResumedRequestData) -> None:
        slot = data.slot
        if not 0 <= slot < len(self._by_slot):
            raise InconsistentPlanError(
                f"request {data.request_id!r} is given slot {slot}; there are {len(self._by_slot)}"
            )
        occupant = self._by_slot[slot]
        if occupant is not None:
            raise InconsistentPlanError(
                f"request {data.request_id!r} is given slot {slot}, which {occupant.request_id!r} holds"
            )
        self._write_row(slot, request.saved, data.block_ids, data.num_computed_tokens)
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.prompt_logprobs_end[slot] = request.prompt_logprobs_end
        request.saved = request.saved[:0]
        request.slot = slot
        self._by_slot[slot] = request
        self._checked_rows = None

    def _write_row(
        self, slot: int, token_ids: IntArray, block_ids: IntArray, num_computed_tokens: int
    ) -> None:
        num_blocks = block_ids.shape[-1]
        self._check_blocks(block_ids, num_blocks, num_computed_tokens // self._block_size)
        self.token_ids[slot, : len(token_ids)] = token_ids
        self.num_tokens[slot] = len(token_ids)
        self._times_written[slot] += 1
        self._unknown_at[slot] = _KNOWN
        self._block_tables[:, slot, :num_blocks] = block_ids
        self._num_blocks[slot] = num_blocks
        self._num_kv_tokens[slot] = num_computed_tokens
        self._num_evicted[slot] = 0

    def _leave(self, request: RunnerRequest) -> int | None:
        slot, request.slot = request.slot, _NO_SLOT
        if slot == _NO_SLOT:
            return None
        self._by_slot[slot] = None
        self._checked_rows = None
        return slot

    def extend_block_tables(self, data: CachedRequestData) -> None:
        """Write newly allocated blocks into the tables of running requests."""
        self._check_blocks(data.block_ids, int(data.block_index.max()) + 1)
        self._block_tables[:, data.slots, data.block_index] = data.block_ids
        np.maximum.at(self._num_blocks, data.slots, data.block_index + 1)

    def fork(self, forks: list[ForkData]) -> None:
        """Continue rows from the tokens that other rows had before any of these forks."""
        parents = [self._fork_tokens(fork) for fork in forks]
        for fork, token_ids in zip(forks, parents, strict=True):
            self._write_row(fork.slot, token_ids, fork.block_ids, fork.num_computed_tokens)

    def _fork_tokens(self, fork: ForkData) -> IntArray:
        """Return a copy of the parent's tokens."""
        num_prompt_tokens = self.running(fork.slot).num_prompt_tokens
        num_parent_tokens = int(self.num_tokens[fork.parent_slot])
        if not num_prompt_tokens <= fork.num_tokens <= num_parent_tokens:
            raise InconsistentPlanError(
                f"slot {fork.slot}, whose prompt has {num_prompt_tokens} tokens, is to continue from "
                f"{fork.num_tokens} tokens of slot {fork.parent_slot}, which has {num_parent_tokens}"
            )
        return self.token_ids[fork.parent_slot, : fork.num_tokens].copy()

    def drop_withdrawn_tokens(self, output: SchedulerOutput) -> None:
        """Truncate the rows of this step to the tokens that the scheduler knows."""
        self._check_slots(output)
        slots, known = output.slots, output.num_known_tokens
        beyond = (known > self.num_tokens[slots]).nonzero()[0]
        if beyond.size:
            row = int(beyond[0])
            raise InconsistentPlanError(
                f"request {output.request_ids[row]!r} has {self.num_tokens[slots[row]]} tokens here, "
                f"but {known[row]} in the plan"
            )
        self.num_tokens[slots] = known

    def choose_last_tokens(self, chosen: ChosenTokens) -> None:
        """Overwrite the last tokens of some rows."""
        self.token_ids[chosen.slots, self.num_tokens[chosen.slots] - 1] = chosen.token_ids
        self._times_written[chosen.slots] += 1
        self._unknown_at[chosen.slots] = _KNOWN

    def write_drafts(self, output: SchedulerOutput) -> None:
        """Write the drafts after the known tokens of their rows, without counting them."""
        rows, columns = np.nonzero(output.draft_token_ids != NO_TOKEN)
        slots = output.slots[rows]
        self.token_ids[slots, self.num_tokens[slots] + columns] = output.draft_token_ids[rows, columns]

    def _check_blocks(self, block_ids: IntArray, num_blocks: int, first_to_write: int = 0) -> None:
        """Raise `InconsistentPlanError` unless block ids [G, any] are the caches', and tables have room."""
        num_groups, _, table_length = self._block_tables.shape
        if block_ids.ndim != 2 or len(block_ids) != num_groups:
            raise InconsistentPlanError(
                f"block ids of shape {list(block_ids.shape)}; they must be [{num_groups}, blocks], those of "
                "each cache group"
            )
        if num_blocks > table_length:
            raise InconsistentPlanError(
                f"a block table of {num_blocks} blocks; max_model_len {self._max_model_len} "
                f"needs at most {table_length}"
            )
        if not block_ids.size:
            return
        lowest, highest = block_ids.min(axis=1), block_ids.max(axis=1)
        if lowest.min() < 0 or (highest >= self._num_kv_blocks).any():
            group = int(np.argmax((lowest < 0) | (highest >= self._num_kv_blocks)))
            raise InconsistentPlanError(
                f"block ids from {lowest[group]} to {highest[group]}; "
                f"the cache of group {group} has blocks 0 to {self._num_kv_blocks[group] - 1}"
            )
        if num_groups > 1 and (block_ids[1:, first_to_write:] == NULL_BLOCK).any():
            raise InconsistentPlanError(
                f"a group with a window has block {NULL_BLOCK}, which nothing is written to, as number "
                f"{first_to_write} or later of the table of a request; tokens to compute need others"
            )

    # -- one step ------------------------------------------------------------------------------------------

    def check(self, output: SchedulerOutput) -> None:
        """Raise `InconsistentPlanError` if the step's counts contradict the rows."""
        slots, computed = output.slots, output.num_computed_tokens
        after = computed + output.num_tokens
        num_drafts = output.num_drafts
        num_evicted = self._num_evicted[slots]
        limit = np.minimum(self.num_tokens[slots] + num_drafts, self._max_model_len)
        limit = np.minimum(limit, self._num_blocks[slots] * self._block_size + num_evicted)
        if output.evictions is not None and (output.evictions.num_evicted_tokens != num_evicted).any():
            raise InconsistentPlanError(
                f"the plan says that {output.evictions.num_evicted_tokens.tolist()} tokens of its rows are "
                f"evicted, but {num_evicted.tolist()} are"
            )
        fits = (output.num_tokens > 0) & (after <= limit)
        fits &= (computed >= 0) & (computed <= self._num_kv_tokens[slots])
        fits &= (num_drafts == 0) | (after == self.num_tokens[slots] + num_drafts)
        if not fits.all():
            row = int(np.argmin(fits))
            slot = int(slots[row])
            raise InconsistentPlanError(
                f"request {output.request_ids[row]!r} is scheduled for {output.num_tokens[row]} tokens after "
                f"{computed[row]} computed, {num_drafts[row]} drafts among them; it has "
                f"{self.num_tokens[slot]} tokens, {self._num_kv_tokens[slot]} of them in the KV cache, "
                f"{self._num_blocks[slot]} blocks of {self._block_size}, and max_model_len is "
                f"{self._max_model_len}"
            )

    def _check_slots(self, output: SchedulerOutput) -> None:
        """Raise `InconsistentPlanError` unless each request is in its slot; quick if rows are as before."""
        rows = (tuple(output.request_ids), output.slots.tobytes())
        if rows == self._checked_rows:
            return
        self._checked_rows = None
        if len(set(output.request_ids)) != len(output.slots):
            raise InconsistentPlanError(
                f"{len(output.slots)} slots for the requests {output.request_ids}: each needs one"
            )
        for request_id, slot in zip(output.request_ids, output.slots.tolist(), strict=True):
            request = self._by_slot[slot] if 0 <= slot < len(self._by_slot) else None
            if request is None or request.request_id != request_id:
                held_by = "no request" if request is None else repr(request.request_id)
                raise InconsistentPlanError(
                    f"request {request_id!r} is scheduled in slot {slot}, which {held_by} holds"
                )
        self._checked_rows = rows

    def output(self, slot: int) -> IntArray:
        """Return the known output tokens [T] in `slot`, also those of a request that has just left it."""
        is_known = self._unknown_at[slot] == _KNOWN
        end = self.num_tokens[slot] if is_known else min(self.num_tokens[slot], self._unknown_at[slot])
        tokens: IntArray = self.token_ids[slot, self.num_prompt_tokens[slot] : end]
        return tokens

    def block_tables(self, slots: IntArray) -> IntArray:
        """Return the block tables of `slots`, as wide as the longest needs: [G, S, B]."""
        return self._block_tables[:, slots, : self._num_blocks[slots].max(initial=0)]

    def block_table(self, slot: int) -> IntArray:
        """Return a copy of the block table of `slot` in group 0: [blocks]."""
        table: IntArray = self._block_tables[0, slot, : self._num_blocks[slot]].copy()
        return table

    def shorten_block_table(self, slot: int, first: int, count: int) -> None:
        """Take `count` entries, from number `first` on, out of the tables of `slot`: they are evicted."""
        tables = self._block_tables[:, slot, first : self._num_blocks[slot]]
        tables[:, :-count] = tables[:, count:].copy()
        self._num_blocks[slot] -= count
        self._num_evicted[slot] += count * self._block_size

    def note_computed(self, output: SchedulerOutput) -> None:
        """Count the tokens whose KV the step has written."""
        self._num_kv_tokens[output.slots] = output.num_computed_tokens + output.num_tokens

    def append(self, slots: IntArray, token_ids: IntArray) -> None:
        """Add the sampled tokens [S, any], padded with NO_TOKEN, to `slots`."""
        rows, columns = np.nonzero(token_ids != NO_TOKEN)
        self.token_ids[slots[rows], self.num_tokens[slots[rows]] + columns] = token_ids[rows, columns]
        self.num_tokens[slots] += np.bincount(rows, minlength=len(slots))

    def append_unknown(self, slots: Int64Array, goes_on: BoolArray) -> UnknownTokens:
        """Append unknown tokens to `slots` [S]; `fill_in` fills them in.

        Rows that go on [S] count one more token from now on; the others when their tokens are known.
        """
        positions: Int64Array = self.num_tokens[slots]
        self._unknown_at[slots[goes_on]] = positions[goes_on]
        self.num_tokens[slots[goes_on]] += 1
        return UnknownTokens(slots, self._times_written[slots], positions)

    def fill_in(self, unknown: UnknownTokens, token_ids: IntArray) -> None:
        """Fill in tokens [S, any], padded with NO_TOKEN, of rows that still have the same requests."""
        slots, positions = unknown.slots, unknown.positions
        is_same = self._times_written[slots] == unknown.times_written
        if not is_same.all():
            slots, positions, token_ids = slots[is_same], positions[is_same], token_ids[is_same]
        is_token = token_ids != NO_TOKEN
        rows, columns = np.nonzero(is_token)
        self.token_ids[slots[rows], positions[rows] + columns] = token_ids[rows, columns]
        ends = positions + np.count_nonzero(is_token, axis=1)
        self.num_tokens[slots] = np.maximum(self.num_tokens[slots], ends)
        self._unknown_at[slots[self._unknown_at[slots] == positions]] = _KNOWN

    def holds(self, output: SchedulerOutput) -> BoolArray:
        """Return which requests of a launched step are still in their slots: [R]."""
        names = zip(output.request_ids, output.slots.tolist(), strict=True)
        found = ((self._by_slot[slot], request_id) for request_id, slot in names)
        holds = [request is not None and request.request_id == name for request, name in found]
        return np.array(holds, dtype=np.bool_)

    def slots_of_unknown(self, slots: IntArray, positions: Int64Array) -> Int64Array:
        """Return the slot of each token [T] that is not known yet, -1 for the others."""
        unknown: Int64Array = np.where(self._unknown_at[slots] == positions, slots, _NO_SLOT)
        return unknown

    def known_tokens(self, slots: Int64Array, positions: Int64Array) -> KnownTokens:
        """Return what is known of the tokens of `slots` [R] before `positions` [R]."""
        return KnownTokens(
            self.token_ids, self._times_written[slots], self._unknown_at[slots] == positions - 1
        )

    def to_continue(
        self, slots: IntArray, max_drafts: IntArray, *, is_newest: bool, seconds_known: float
    ) -> RowsToContinue:
        """Return the rows for which a proposer drafts up to `max_drafts` [R] tokens, of `slots` [R]."""
        asked, others = slots.astype(np.int64), slots[:0].astype(np.int64)
        if not max_drafts.all():
            is_asked = max_drafts > 0
            asked, others, max_drafts = asked[is_asked], asked[~is_asked], max_drafts[is_asked]
        num_tokens = self.num_tokens[asked]
        return RowsToContinue(
            token_ids=self.token_ids,
            slots=asked,
            num_tokens=num_tokens,
            block_tables=self._block_tables[0],
            num_blocks=self._num_blocks,
            max_drafts=np.minimum(np.maximum(self._max_model_len - num_tokens, 0), max_drafts),
            other_slots=others,
            is_newest=is_newest,
            seconds_known=seconds_known,
        )
