"""Messages between the scheduler and the model runner in one step: plain data, but for `StepInFlight`.

Both sides know a running request by its *slot*: a row of the persistent batch, from 0 to max_num_seqs - 1,
held from admission to finish or preemption. Arrays are in one order, that of `SchedulerOutput.slots`.

KV blocks are those of G cache groups, see `quire.kv.blocks.groups`; G is 1 unless layers have windows. Blocks
of a group before a sequence's window are `NULL_BLOCK`; a runner never reads them, and is not notified of
them.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NO_TOKEN = -1


class NewRequestData(NamedTuple):
    """A request that the runner has not seen: everything about it, sent once."""

    request_id: str
    slot: int
    prompt_token_ids: IntArray  # [tokens]
    output_token_ids: list[int]  # what it has generated elsewhere; empty for nearly all
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    block_ids: IntArray  # [G, blocks]
    num_computed_tokens: int
    draft_scope: tuple[str, str] = ("", "")  # requests of the same one may see each other's outputs in drafts
    pooling_params: PoolingParams | None = None  # resolved; None: it generates


class ResumedRequestData(NamedTuple):
    """A request that was preempted and runs again: new slot and blocks; the runner still has its tokens.

    Of those it keeps the first `num_tokens`; a token sampled in the step that preempted it is discarded.
    """

    request_id: str
    slot: int
    block_ids: IntArray  # [G, blocks]
    num_computed_tokens: int
    num_tokens: int  # prompt and output
    num_prompt_logprobs: int  # that its client has; the runner goes on with the next


@dataclasses.dataclass(slots=True, frozen=True)
class CachedRequestData:
    """Requests that the runner knows: only what changed, as arrays over the blocks newly given to them.

    Block `block_ids[g, i]` becomes number `block_index[i]` in the block table of group g and slot `slots[i]`.
    """

    slots: IntArray  # [new blocks]
    block_index: IntArray  # [new blocks]
    block_ids: IntArray  # [G, new blocks]
    resumed: list[ResumedRequestData]


@dataclasses.dataclass(slots=True, frozen=True)
class ForkData:
    """A running request that continues from another's tokens: a beam that takes over a dead one's slot.

    The runner copies the known tokens of `parent_slot`, as they are before this step, to `slot`; the last of
    them is then overwritten by `SchedulerOutput.chosen_tokens`.
    """

    slot: int
    parent_slot: int
    block_ids: IntArray  # [G, blocks]
    num_tokens: int  # prompt and output, with the last one
    num_computed_tokens: int


@dataclasses.dataclass(slots=True, frozen=True)
class ChosenTokens:
    """Last known tokens that the scheduler chose itself, in place of what the runner sampled."""

    slots: IntArray  # [N]
    token_ids: IntArray  # [N]


@dataclasses.dataclass(slots=True, frozen=True)
class EvictionData:
    """What the rows of a step evict of their KV, see `CacheEvictionConfig`: [R] each, as the plan's rows.

    A token's place in its sequence's cache is its position less `num_evicted_tokens`. After the step, each
    layer evicts `num_blocks` blocks of its choice; the block table loses as many entries, those right behind
    the start area.
    """

    num_evicted_tokens: IntArray  # by earlier steps
    num_blocks: IntArray  # 0 for most rows


@dataclasses.dataclass(slots=True, frozen=True)
class StateCopies:
    """States of recurrent layers that a step copies, see `quire.kv.blocks.checkpoints`: [N, 2] each.

    A state does not take in the drafts of its row: those that are accepted are computed again.

    The state of a request that starts or resumes without either begins with zeros, as it has no tokens then.
    """

    restored: IntArray  # (checkpoint, slot), before any token of the step is computed
    saved: IntArray  # (slot, checkpoint), after all of them
    num_tokens: (
        Int64Array  # [R] of the step's tokens of each row, those that its state takes in, the first ones
    )


class NumScheduledTokens(Mapping[str, int]):
    """`{request id: tokens this step}`, a view over the arrays, built when first asked for."""

    def __init__(self, request_ids: list[str], num_tokens: IntArray) -> None:
        self._request_ids = request_ids
        self._num_tokens = num_tokens
        self._mapping: dict[str, int] | None = None

    def _built(self) -> dict[str, int]:
        if self._mapping is None:
            self._mapping = dict(zip(self._request_ids, self._num_tokens.tolist(), strict=True))
        return self._mapping

    def __getitem__(self, request_id: str) -> int:
        return self._built()[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._built())

    def __len__(self) -> int:
        return len(self._request_ids)

    def __repr__(self) -> str:
        return repr(self._built())


@dataclasses.dataclass(slots=True, frozen=True)
class SchedulerOutput:
    """One step's plan, as the runner needs it.

    The arrays have one row per scheduled request. `num_computed_tokens` is the count before this step.
    `num_known_tokens` counts prompt and output; tokens that the runner has beyond it are discarded.
    The tokens of a row end with its drafts: a request with d drafts is scheduled up to token
    `num_known_tokens + d` and samples 1 to d + 1 tokens; one that does not reach `num_known_tokens` samples
    none. A request that is pooled has its row where another would sample. The runner applies the lists in the
    order of the fields below, before it computes anything.
    """

    step: int
    request_ids: list[str]
    slots: IntArray  # [R]
    num_tokens: IntArray  # [R], each at least 1
    num_computed_tokens: IntArray  # [R]
    num_known_tokens: IntArray  # [R]
    draft_token_ids: IntArray  # [R, K] right-padded with NO_TOKEN; K is 0 without speculation
    finished_req_ids: list[str]
    preempted_req_ids: list[str]
    scheduled_new_reqs: list[NewRequestData]
    forks: list[ForkData]
    scheduled_cached_reqs: CachedRequestData
    chosen_tokens: ChosenTokens
    block_copies: IntArray  # [copies, 2, G] (from, to): copied before any KV of this step is written
    evictions: EvictionData | None = None  # None: nothing is ever evicted
    pending_structured_output_tokens: bool = False  # whether a mask depends on tokens of steps in flight
    num_drafts_wanted: IntArray | None = None  # [R] most tokens to propose after each row; None: nothing
    state_copies: StateCopies | None = None  # None: no layer is recurrent
    kv_connector_metadata: object | None = None  # from the connector's scheduler side to its worker side

    @property
    def num_scheduled_tokens(self) -> NumScheduledTokens:
        """Tokens of each scheduled request in this step, drafts included, by request id."""
        return NumScheduledTokens(self.request_ids, self.num_tokens)

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of this step over all requests."""
        return int(self.num_tokens.sum())

    @property
    def num_drafts(self) -> IntArray:
        """Drafts of each row, [R]."""
        if not self.draft_token_ids.size:
            return np.zeros(len(self.slots), dtype=np.int32)
        count: IntArray = np.count_nonzero(self.draft_token_ids != NO_TOKEN, axis=1).astype(np.int32)
        return count

    @property
    def scheduled_spec_decode_tokens(self) -> dict[str, list[int]]:
        """Drafts to verify in this step, by request id, for the requests that have any."""
        rows = np.flatnonzero(self.num_drafts)
        drafts = [row[row != NO_TOKEN].tolist() for row in self.draft_token_ids[rows]]
        return {self.request_ids[row]: ids for row, ids in zip(rows.tolist(), drafts, strict=True)}

    @property
    def samples(self) -> BoolArray:
        """Which rows reach their last known token, and so sample: [R]."""
        reaches: BoolArray = self.num_computed_tokens + self.num_tokens >= self.num_known_tokens
        return reaches

    @property
    def may_have_drafts(self) -> bool:
        """Whether there may be drafts in the step or after it; most steps have none."""
        return self.num_drafts_wanted is not None or self.draft_token_ids.size > 0

    @property
    def awaits_tokens(self) -> BoolArray:
        """Which rows are in no further step until the tokens of this one are known, for drafts: [R]."""
        if not self.may_have_drafts:
            return np.zeros(len(self.slots), dtype=np.bool_)
        awaits: BoolArray = self.num_drafts > 0
        return awaits if self.num_drafts_wanted is None else awaits | (self.num_drafts_wanted > 0)


@dataclasses.dataclass(slots=True, frozen=True)
class GrammarOutput:
    """Which tokens the grammars of a step's structured requests allow.

    Request i has one bitmask row for each token it may sample: its d drafts' places and one more, in order.
    Bit t % 32 of word t // 32 says whether token t is allowed.
    """

    request_ids: list[str]
    num_rows: IntArray  # [requests], d + 1 each
    bitmask: IntArray  # [sum of num_rows, ceil(vocabulary / 32)]


GrammarSource = Callable[[], GrammarOutput | None]
"""Says which tokens the grammars of a step allow; may wait until that is known."""


@dataclasses.dataclass(slots=True, frozen=True)
class PositionLogprobs:
    """Log-probabilities at one position: the chosen token first, then the likeliest in falling order."""

    token_ids: list[int]  # [1 + k]
    logprobs: list[float]  # [1 + k], nats
    ranks: list[int]  # [1 + k], 1 is likeliest


@dataclasses.dataclass(slots=True, frozen=True)
class DraftTokenIds:
    """Proposed continuations, by request id; a request may be missing or have none.

    `num_steps_without_drafts` is as in `ModelRunnerOutput`; None changes nothing.
    """

    request_ids: list[str]
    draft_token_ids: list[list[int]]
    num_steps_without_drafts: list[int] | None = None


@dataclasses.dataclass(slots=True, frozen=True)
class KVConnectorOutput:
    """What a KV connector's worker side reports after a step."""

    finished_sending: frozenset[str] = frozenset()  # requests whose blocks need not be held any longer
    finished_receiving: frozenset[str] = frozenset()  # requests whose asynchronous load has ended
    failed_block_ids: frozenset[int] = frozenset()  # blocks whose load failed: their content is not valid


@dataclasses.dataclass(slots=True, frozen=True)
class ModelRunnerOutput:
    """Results of one step, in the order of `SchedulerOutput.slots`.

    Row r of `sampled_token_ids` holds the tokens sampled for request r, padded with `NO_TOKEN`: accepted
    drafts and one more. A prefill chunk that does not reach the end of its prompt has none, nor has a request
    that is pooled: its row is in `pooled` when its prompt is computed, as the bytes of [hidden] float32.
    `draft_token_ids` proposes tokens after them, with the same padding; None: no drafts. In the next
    `num_steps_without_drafts` steps that a request samples in, nothing would be proposed for it; None changes
    nothing in what was said before. `errors` names requests whose own data made their computation fail; they
    end, others continue. `error_params` has the parameter at fault for those of the errors that a request's
    parameters cause. If the whole step failed, `failure` says why: the scheduler tries its requests again, to
    find the one at fault. Then `is_applied` is False: the runner may not have taken note of what the plan
    said of any request.
    """

    request_ids: list[str]
    sampled_token_ids: IntArray  # [R, most sampled tokens]
    logprobs: dict[str, list[PositionLogprobs]] = dataclasses.field(default_factory=dict)
    prompt_logprobs: dict[str, list[PositionLogprobs]] = dataclasses.field(default_factory=dict)
    pooled: dict[str, bytes] = dataclasses.field(default_factory=dict)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    error_params: dict[str, str] = dataclasses.field(default_factory=dict)
    draft_token_ids: IntArray | None = None  # [R, K]
    num_steps_without_drafts: IntArray | None = None  # [R]
    kv_connector_output: KVConnectorOutput | None = None
    is_applied: bool = True
    failure: str = ""

    @classmethod
    def failed(cls, planned: SchedulerOutput, error: str) -> ModelRunnerOutput:
        """Return the output of a step that failed as a whole, by whichever of its requests."""
        request_ids = list(planned.request_ids)
        return cls(
            request_ids,
            np.full((len(request_ids), 1), NO_TOKEN, dtype=np.int32),
            is_applied=False,
            failure=error,
        )


@dataclasses.dataclass(slots=True)
class GraphStats:
    """Counters of a runner that captures steps as device graphs.

    `num_graphs` are kept now. Of the steps, `num_replayed` asked the device for all of the model at once, and
    `num_launched` for one operation after the other. `num_failures` counts failed captures.
    """

    num_graphs: int = 0
    num_replayed: int = 0
    num_launched: int = 0
    num_failures: int = 0


class StepInFlight(ABC):
    """A step that a device is computing."""

    __slots__ = ()

    @property
    @abstractmethod
    def kv_connector_output(self) -> KVConnectorOutput | None:
        """What the KV connector has reported, which holds even if the step fails; in `result`, too."""

    @abstractmethod
    def result(self) -> ModelRunnerOutput:
        """Wait for the step's tokens and return what it computed; may be called once, from any thread."""

    @abstractmethod
    def drafts(self) -> DraftTokenIds | None:
        """Return what is proposed after the step; None: nothing.

        Called once, after `result`, unless that has failed, by the thread that computes steps.
        """
