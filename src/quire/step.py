"""What passes between the scheduler and the model runner in one step: plain data, no behaviour.

Both sides know a running request by its *slot*: a row of the persistent batch, from 0 to max_num_seqs - 1,
held from admission to finish or preemption. Arrays are in one order, that of `SchedulerOutput.slots`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from quire.request import SamplingParams

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


@dataclasses.dataclass(slots=True, frozen=True)
class NewRequestData:
    """A request that the runner has not seen: everything about it, sent once."""

    request_id: str
    slot: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    block_ids: IntArray  # [number of blocks]
    num_computed_tokens: int


@dataclasses.dataclass(slots=True, frozen=True)
class ResumedRequestData:
    """A request that was preempted and runs again: new slot and blocks; the runner still has its tokens.

    Of those it keeps the first `num_tokens`: a token sampled in a step that was preempted meanwhile is void.
    """

    request_id: str
    slot: int
    block_ids: IntArray  # [number of blocks]
    num_computed_tokens: int
    num_tokens: int  # prompt and output


@dataclasses.dataclass(slots=True, frozen=True)
class CachedRequestData:
    """Requests that the runner knows: only what changed, as arrays over the blocks newly given to them.

    Block `block_ids[i]` becomes number `block_index[i]` in the block table of slot `slots[i]`.
    """

    slots: IntArray  # [new blocks]
    block_index: IntArray  # [new blocks]
    block_ids: IntArray  # [new blocks]
    resumed: list[ResumedRequestData]


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

    The three arrays have one entry per scheduled request. `num_computed_tokens` is the count before this
    step. A request samples a token exactly if `num_computed_tokens + num_tokens` reaches its known tokens.
    """

    step: int
    request_ids: list[str]
    slots: IntArray  # [R]
    num_tokens: IntArray  # [R], each at least 1
    num_computed_tokens: IntArray  # [R]
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    finished_req_ids: list[str]
    preempted_req_ids: list[str]

    @property
    def num_scheduled_tokens(self) -> NumScheduledTokens:
        """Tokens of each scheduled request in this step, by request id."""
        return NumScheduledTokens(self.request_ids, self.num_tokens)

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of this step over all requests."""
        return int(self.num_tokens.sum())


@dataclasses.dataclass(slots=True, frozen=True)
class PositionLogprobs:
    """Log-probabilities at one position: the chosen token first, then the likeliest in falling order."""

    token_ids: list[int]  # [1 + k]
    logprobs: list[float]  # [1 + k], nats
    ranks: list[int]  # [1 + k], 1 is likeliest


NO_TOKEN = -1


@dataclasses.dataclass(slots=True, frozen=True)
class ModelRunnerOutput:
    """What one step computed, in the order of `SchedulerOutput.slots`.

    Row r of `sampled_token_ids` holds the tokens sampled for request r, padded with `NO_TOKEN`; a prefill
    chunk that does not reach the end of its prompt has none. `errors` names requests whose own data made
    their computation fail; they end, others go on.
    """

    request_ids: list[str]
    sampled_token_ids: IntArray  # [R, most sampled tokens]
    logprobs: dict[str, list[PositionLogprobs]] = dataclasses.field(default_factory=dict)
    prompt_logprobs: dict[str, list[PositionLogprobs]] = dataclasses.field(default_factory=dict)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
