"""The calls that determine a scheduler's behaviour, as data to record and replay."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec

from quire.pooling_params import PoolingParams
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduling.interface import PauseState, SchedulerInterface
from quire.scheduling.outputs import EngineCoreOutputs
from quire.status import RequestStatus
from quire.step import DraftTokenIds, ModelRunnerOutput, PositionLogprobs, SchedulerOutput

Plans = dict[int, SchedulerOutput]
"""The latest plans by step, which later calls refer to."""

MAX_PLANS = 8
"""Number of plans that are kept; more are never in flight."""


class RecordedRequest(msgspec.Struct, array_like=True):
    """A request as it was added; fields as those of `Request`."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    priority: int
    client_index: int
    cache_salt: str
    tenant: str
    timeout: float | None
    queue_timeout: float | None
    pin_prefix: float
    shares_prompt_with: str | None
    kv_transfer_params: dict[str, Any] | None
    beam_sequence_ids: tuple[str, ...]
    is_resumed: bool = False
    tenant_weight: float = 1.0
    arrival_time: float = math.inf
    flow: str = ""
    pooling_params: PoolingParams | None = None

    @classmethod
    def of(cls, request: Request) -> RecordedRequest:
        """Copy a request's fields."""
        return cls(*(getattr(request, name) for name in cls.__struct_fields__))

    def to_request(self) -> Request:
        """Return a new request with these fields."""
        return Request(**{name: getattr(self, name) for name in self.__struct_fields__})


class AddRequestCall(msgspec.Struct, array_like=True, tag="add_request"):
    """`SchedulerInterface.add_request`."""

    request: RecordedRequest

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> None:
        """Make the call again."""
        scheduler.add_request(self.request.to_request())


class FinishRequestsCall(msgspec.Struct, array_like=True, tag="finish_requests"):
    """`SchedulerInterface.finish_requests`; results in the ids that ended."""

    request_ids: list[str] | None
    status: RequestStatus

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> list[str]:
        """Make the call again."""
        ended = scheduler.finish_requests(self.request_ids, self.status)
        return [request.request_id for request in ended or ()]


class ScheduleCall(msgspec.Struct, array_like=True, tag="schedule"):
    """`SchedulerInterface.schedule`; results in a `StepResult`."""

    throttle_prefills: bool

    def options(self) -> dict[str, bool]:
        """Return the arguments that are not the defaults: vLLM's and eSurge's schedulers take none."""
        return {"throttle_prefills": True} if self.throttle_prefills else {}

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> StepResult:
        """Make the call again."""
        plan = scheduler.schedule(**self.options())
        remember(plans, plan)
        return StepResult.of(scheduler, plan)


class UpdateFromOutputCall(msgspec.Struct, array_like=True, tag="update_from_output"):
    """`SchedulerInterface.update_from_output`; results in (request id, finish reason) of those that ended."""

    step: int
    output: ModelRunnerOutput

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> list[tuple[str, str]]:
        """Make the call again."""
        return ended(scheduler.update_from_output(plans.pop(self.step), self.output))


class UpdateDraftTokenIdsCall(msgspec.Struct, array_like=True, tag="update_draft_token_ids"):
    """`SchedulerInterface.update_draft_token_ids`."""

    drafts: DraftTokenIds

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> None:
        """Make the call again."""
        scheduler.update_draft_token_ids(self.drafts)


class UpdateDraftsInOutputCall(msgspec.Struct, array_like=True, tag="update_draft_token_ids_in_output"):
    """`SchedulerInterface.update_draft_token_ids_in_output`; results in a `StepResult`."""

    drafts: DraftTokenIds
    step: int

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> StepResult:
        """Make the call again."""
        scheduler.update_draft_token_ids_in_output(self.drafts, plans[self.step])
        return StepResult.of(scheduler, plans[self.step])


class GetGrammarBitmaskCall(msgspec.Struct, array_like=True, tag="get_grammar_bitmask"):
    """`SchedulerInterface.get_grammar_bitmask`; the mask itself is not kept."""

    step: int

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> None:
        """Make the call again."""
        scheduler.get_grammar_bitmask(plans[self.step])


class ResetPrefixCacheCall(msgspec.Struct, array_like=True, tag="reset_prefix_cache"):
    """`SchedulerInterface.reset_prefix_cache`; results in whether it was done."""

    reset_running_requests: bool
    reset_connector: bool

    def options(self) -> dict[str, bool]:
        """Return the arguments that are not the defaults."""
        return {name: True for name in self.__struct_fields__ if getattr(self, name)}

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> bool:
        """Make the call again."""
        return scheduler.reset_prefix_cache(**self.options())


class SetPauseStateCall(msgspec.Struct, array_like=True, tag="set_pause_state"):
    """`SchedulerInterface.set_pause_state`, by the state's name."""

    state: str

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> None:
        """Make the call again."""
        scheduler.set_pause_state(PauseState[self.state])


class ShutdownCall(msgspec.Struct, array_like=True, tag="shutdown"):
    """`SchedulerInterface.shutdown`."""

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> None:
        """Make the call again."""
        scheduler.shutdown()


Call = (
    AddRequestCall
    | FinishRequestsCall
    | ScheduleCall
    | UpdateFromOutputCall
    | UpdateDraftTokenIdsCall
    | UpdateDraftsInOutputCall
    | GetGrammarBitmaskCall
    | ResetPrefixCacheCall
    | SetPauseStateCall
    | ShutdownCall
)


class StepResult(msgspec.Struct):
    """A plan, without the connector's metadata, and the state it leaves behind."""

    plan: SchedulerOutput
    num_running: int
    num_waiting: int
    num_free_blocks: int

    @classmethod
    def of(cls, scheduler: SchedulerInterface, plan: SchedulerOutput) -> StepResult:
        """Describe the present state of `scheduler`, whose newest plan is `plan`."""
        stats = scheduler.make_stats()
        num_free_blocks = 0 if stats is None else stats.num_free_blocks
        plan = dataclasses.replace(plan, kv_connector_metadata=None)
        return cls(plan, *scheduler.get_request_counts(), num_free_blocks)


def recorded(output: ModelRunnerOutput) -> ModelRunnerOutput:
    """Return the part of a step's results that plans depend on: of prompts' log-probabilities, the number.

    Of pooled rows, the requests.
    """
    nothing = PositionLogprobs([], [], [])
    prompt_logprobs = {key: [nothing] * len(found) for key, found in output.prompt_logprobs.items()}
    pooled = dict.fromkeys(output.pooled, b"")
    return dataclasses.replace(output, prompt_logprobs=prompt_logprobs, pooled=pooled)


def ended(outputs: dict[int, EngineCoreOutputs]) -> list[tuple[str, str]]:
    """Return (request id, finish reason) of each terminal output."""
    return [
        (output.request_id, str(output.finish_reason))
        for of_client in outputs.values()
        for output in of_client.outputs
        if output.finish_reason is not None
    ]


def remember(plans: Plans, plan: SchedulerOutput) -> None:
    """Keep a plan for the calls that will name its step."""
    plans[plan.step] = plan
    if len(plans) > MAX_PLANS:
        del plans[next(iter(plans))]
