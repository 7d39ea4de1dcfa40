"""The file that a recorded scheduler leaves: every call with its answers and results, as framed msgpack.

After `MAGIC` come frames: 4 bytes of length, little-endian, then msgpack. The first is a `Header`, all others
are `Frame`s. A file may end in the middle of a frame, if the engine was killed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from quire.config import SchedulerConfig
from quire.errors import QuireError
from quire.recording.compilations import Compiled
from quire.recording.recorded_context import Answer
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduling.interface import PauseState, SchedulerInterface
from quire.scheduling.outputs import EngineCoreOutputs
from quire.status import RequestStatus
from quire.step import DraftTokenIds, ModelRunnerOutput, PositionLogprobs, SchedulerOutput

T = TypeVar("T")

MAGIC = b"quire recording\n"
VERSION = 1
LENGTH_BYTES = 4

Plans = dict[int, SchedulerOutput]
"""The latest plans by step: what later calls refer to."""

MAX_PLANS = 8
"""Plans that are kept; more are never in flight."""


class RecordingError(QuireError):
    """A file is not a recording, or not one that this version reads."""


class Header(msgspec.Struct):
    """How the scheduler was built; `vocab_size` is None without grammars."""

    version: int
    scheduler_cls: str
    config: SchedulerConfig
    num_blocks: int
    max_model_len: int
    vocab_size: int | None
    has_connector: bool
    has_reserved_blocks: bool
    answers: list[Answer]


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

    @classmethod
    def of(cls, request: Request) -> RecordedRequest:
        """Copy a request's fields."""
        return cls(*(getattr(request, name) for name in cls.__struct_fields__))

    def to_request(self) -> Request:
        """Return a new request with these fields."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        output_token_ids = fields.pop("output_token_ids")
        request = Request(**fields)
        request.output_token_ids = output_token_ids
        return request


class AddRequest(msgspec.Struct, array_like=True, tag="add_request"):
    """`SchedulerInterface.add_request`."""

    request: RecordedRequest

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> None:
        """Make the call again."""
        scheduler.add_request(self.request.to_request())


class FinishRequests(msgspec.Struct, array_like=True, tag="finish_requests"):
    """`SchedulerInterface.finish_requests`; results in the ids that ended."""

    request_ids: list[str] | None
    status: RequestStatus

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> list[str]:
        """Make the call again."""
        ended = scheduler.finish_requests(self.request_ids, self.status)
        return [request.request_id for request in ended]


class Schedule(msgspec.Struct, array_like=True, tag="schedule"):
    """`SchedulerInterface.schedule`; results in a `StepResult`."""

    throttle_prefills: bool

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> StepResult:
        """Make the call again."""
        plan = scheduler.schedule(self.throttle_prefills)
        remember(plans, plan)
        return StepResult.of(scheduler, plan)


class UpdateFromOutput(msgspec.Struct, array_like=True, tag="update_from_output"):
    """`SchedulerInterface.update_from_output`; results in (request id, finish reason) of those that ended."""

    step: int
    output: ModelRunnerOutput

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> list[tuple[str, str]]:
        """Make the call again."""
        return ended(scheduler.update_from_output(plans.pop(self.step), self.output))


class UpdateDraftTokenIds(msgspec.Struct, array_like=True, tag="update_draft_token_ids"):
    """`SchedulerInterface.update_draft_token_ids`."""

    drafts: DraftTokenIds

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> None:
        """Make the call again."""
        scheduler.update_draft_token_ids(self.drafts)


class UpdateDraftsInOutput(msgspec.Struct, array_like=True, tag="update_draft_token_ids_in_output"):
    """`SchedulerInterface.update_draft_token_ids_in_output`; results in a `StepResult`."""

    drafts: DraftTokenIds
    step: int

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> StepResult:
        """Make the call again."""
        scheduler.update_draft_token_ids_in_output(self.drafts, plans[self.step])
        return StepResult.of(scheduler, plans[self.step])


class GetGrammarBitmask(msgspec.Struct, array_like=True, tag="get_grammar_bitmask"):
    """`SchedulerInterface.get_grammar_bitmask`; the mask itself is not kept."""

    step: int

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> None:
        """Make the call again."""
        scheduler.get_grammar_bitmask(plans[self.step])


class ResetPrefixCache(msgspec.Struct, array_like=True, tag="reset_prefix_cache"):
    """`SchedulerInterface.reset_prefix_cache`; results in whether it was done."""

    reset_running_requests: bool
    reset_connector: bool

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> bool:
        """Make the call again."""
        return scheduler.reset_prefix_cache(self.reset_running_requests, self.reset_connector)


class SetPauseState(msgspec.Struct, array_like=True, tag="set_pause_state"):
    """`SchedulerInterface.set_pause_state`, by the state's name."""

    state: str

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> None:
        """Make the call again."""
        scheduler.set_pause_state(PauseState[self.state])


class Shutdown(msgspec.Struct, array_like=True, tag="shutdown"):
    """`SchedulerInterface.shutdown`."""

    def apply(self, scheduler: SchedulerInterface, plans: Plans) -> None:
        """Make the call again."""
        scheduler.shutdown()


Call = (
    AddRequest
    | FinishRequests
    | Schedule
    | UpdateFromOutput
    | UpdateDraftTokenIds
    | UpdateDraftsInOutput
    | GetGrammarBitmask
    | ResetPrefixCache
    | SetPauseState
    | Shutdown
)


class Frame(msgspec.Struct, array_like=True):
    """One call: when it began and ended (seconds on the scheduler's clock), and what came of it.

    `compiled` came to the scheduler just before the call. `result` is msgpack of what the call's docstring
    says; `error` is what it raised, empty if nothing.
    """

    call: Call
    start: float
    end: float
    compiled: list[Compiled]
    answers: list[Answer]
    result: msgspec.Raw
    error: str = ""


WrittenFrame = tuple[msgspec.Raw | None, float, float, list[Compiled], list[Answer], msgspec.Raw | None, str]
"""The fields of a `Frame`, with the call as it was before it was made."""


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
    """Return a step's results as far as plans depend on them: without the prompts' log-probabilities."""
    prompt_logprobs: dict[str, list[PositionLogprobs]] = {key: [] for key in output.prompt_logprobs}
    return dataclasses.replace(output, prompt_logprobs=prompt_logprobs)


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


# -- the file ------------------------------------------------------------------------------------------------


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be recorded")


def _decode_array(kind: type, value: Any) -> object:
    if value is None:
        return None
    dtype, shape, content = value
    return np.frombuffer(content, dtype=dtype).reshape(shape)


encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode


def raw(value: object) -> msgspec.Raw:
    """Return a call's result as it stands in a frame."""
    return msgspec.Raw(encode(value))


NOTHING = raw(None)


def decode(data: bytes | memoryview | msgspec.Raw, kind: type[T]) -> T:
    """Return what `encode` has encoded; arrays are read-only."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)


def _framed(item: Header | WrittenFrame) -> bytes:
    data = encode(item)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


class RecordingWriter:
    """Writes a recording; what is written is in the operating system's hands at once.

    Raises:
        OSError: the file cannot be written.
        TypeError: the header holds an object that is no plain data.
    """

    def __init__(self, path: Path, header: Header) -> None:
        first = _framed(header)
        self._file = path.open("wb")
        self._file.write(MAGIC + first)
        self._file.flush()

    def write(self, frame: WrittenFrame) -> None:
        """Append one frame."""
        self._file.write(_framed(frame))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Recording:
    """A recording to read: `header`, and the frames by iterating.

    Args:
        path: of the file.

    Raises:
        RecordingError: it is not a recording, or of another version.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_truncated = False  # known when all frames have been read
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise RecordingError(f"{path} is not a recording of Quire's scheduler")
        frames = self._frames()
        first = next(frames, None)
        if first is None:
            raise RecordingError(f"{path} ends before its header")
        try:
            version = msgspec.msgpack.decode(first).get("version")
            if version != VERSION:
                raise RecordingError(f"{path} is of version {version}; this version of Quire reads {VERSION}")
            self.header = decode(first, Header)
        except (msgspec.DecodeError, AttributeError, ValueError) as error:
            raise RecordingError(f"the header of {path} cannot be read: {error}") from error

    def __iter__(self) -> Iterator[Frame]:
        frames = self._frames()
        next(frames)
        decoder = msgspec.msgpack.Decoder(Frame, dec_hook=_decode_array)
        for number, data in enumerate(frames):
            try:
                yield decoder.decode(data)
            except msgspec.DecodeError as error:
                raise RecordingError(f"call {number} in {self.path} cannot be read: {error}") from error

    def _frames(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(len(MAGIC))
            while prefix := file.read(LENGTH_BYTES):
                length = int.from_bytes(prefix, "little")
                data = file.read(length)
                if len(prefix) < LENGTH_BYTES or len(data) < length:
                    self.is_truncated = True
                    return
                yield data
