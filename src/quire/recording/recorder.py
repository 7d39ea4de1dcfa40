"""A scheduler that records all its inputs, so that the run can be replayed and inspected."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from typing_extensions import override

from quire.config import SchedulerConfig
from quire.errors import ConfigError
from quire.kv.connectors.interface import KVConnector
from quire.recording import calls, file_format
from quire.recording.calls import Call, RecordedRequest, StepResult
from quire.recording.compilations import CompilationRecorder
from quire.recording.file_format import Header, RecordingWriter, WrittenFrame
from quire.recording.forwarding import forwarded
from quire.recording.recorded_context import ContextRecorder, recorded_context
from quire.request import Request
from quire.scheduling.context import SchedulerContext
from quire.scheduling.interface import PauseState, SchedulerInterface
from quire.scheduling.outputs import EngineCoreOutputs
from quire.status import RequestStatus
from quire.step import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput

T = TypeVar("T")

logger = logging.getLogger(__name__)


def _nothing(_: object) -> None:
    return None


class RecordingScheduler(SchedulerInterface):
    """Forwards every call to a scheduler and writes it to a file, with its answers and its result.

    Calls that only read (`explain`, `make_stats`, …) are not recorded: they decide nothing. If the file can
    no longer be written, the recording ends and the scheduler goes on.

    Args:
        config, num_blocks, max_model_len, context: of the scheduler, see `SchedulerInterface`.
        scheduler_cls: its class.
        path: path of the file; one that exists is overwritten.

    Raises:
        ConfigError: the file cannot be written, or a policy cannot.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        context: SchedulerContext | None = None,
        scheduler_cls: type[SchedulerInterface],
        path: Path,
    ) -> None:
        context = context or SchedulerContext()
        self._connector = context.connector
        self._clock = context.clock
        self._context_recorder = ContextRecorder()
        self._compilations = CompilationRecorder()
        self._context_recorder.begin()
        self.scheduler = scheduler_cls(
            config,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            context=recorded_context(context, self._context_recorder, self._compilations),
        )
        header = Header(
            version=file_format.VERSION,
            scheduler_cls=f"{scheduler_cls.__module__}.{scheduler_cls.__qualname__}",
            config=config,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=None if context.grammars is None else context.grammars.vocab_size,
            has_connector=context.connector is not None,
            has_reserved_blocks=context.commit_blocks is not None,
            windows=[(each.window, each.num_blocks, each.commit is not None) for each in context.windows],
            answers=self._context_recorder.end(),
            states=context.states,
        )
        self._writer: RecordingWriter | None = _writer(path, header)

    # -- calls that decide something -----------------------------------------------------------------------

    @override
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        return self._record(
            call := calls.ScheduleCall(throttle_prefills),
            lambda: self.scheduler.schedule(**call.options()),
            lambda plan: StepResult.of(self.scheduler, plan),
        )

    @override
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        return self._record(
            calls.UpdateFromOutputCall(scheduler_output.step, calls.recorded(model_runner_output)),
            lambda: self.scheduler.update_from_output(scheduler_output, model_runner_output),
            calls.ended,
        )

    @override
    def add_request(self, request: Request) -> None:
        self._record(
            calls.AddRequestCall(RecordedRequest.of(request)), lambda: self.scheduler.add_request(request)
        )

    @override
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> Sequence[Request] | None:
        if request_ids is not None:
            request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        return self._record(
            calls.FinishRequestsCall(request_ids, finished_status),
            lambda: self.scheduler.finish_requests(request_ids, finished_status),
            lambda ended: [request.request_id for request in ended or ()],
        )

    @override
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return self._record(
            call := calls.ResetPrefixCacheCall(reset_running_requests, reset_connector),
            lambda: self.scheduler.reset_prefix_cache(**call.options()),
            bool,
        )

    @override
    def set_pause_state(self, pause_state: PauseState) -> None:
        self._record(
            calls.SetPauseStateCall(pause_state.name), lambda: self.scheduler.set_pause_state(pause_state)
        )

    @override
    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        return self._record(
            calls.GetGrammarBitmaskCall(scheduler_output.step),
            lambda: self.scheduler.get_grammar_bitmask(scheduler_output),
        )

    @override
    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        self._record(
            calls.UpdateDraftTokenIdsCall(draft_token_ids),
            lambda: self.scheduler.update_draft_token_ids(draft_token_ids),
        )

    @override
    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        self._record(
            calls.UpdateDraftsInOutputCall(draft_token_ids, scheduler_output.step),
            lambda: self.scheduler.update_draft_token_ids_in_output(draft_token_ids, scheduler_output),
            lambda _: StepResult.of(self.scheduler, scheduler_output),
        )

    @override
    def reset_encoder_cache(self) -> None:
        self.scheduler.reset_encoder_cache()

    @override
    def get_kv_event_publisher_config(self) -> object | None:
        return self.scheduler.get_kv_event_publisher_config()

    @override
    def check_invariants(self) -> None:
        self.scheduler.check_invariants()

    @override
    def shutdown(self) -> None:
        """Closes the file."""
        self._record(calls.ShutdownCall(), self.scheduler.shutdown)
        self._compilations.shutdown(wait=False, cancel_futures=True)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _record(self, call: Call, make: Callable[[], T], describe: Callable[[T], object] = _nothing) -> T:
        """Make a call and record it: arguments, result or exception."""
        start = self._clock()
        encoded = self._unless_it_fails(lambda: file_format.raw(call))  # before the call can change anything
        compiled = self._compilations.deliver() if isinstance(call, calls.ScheduleCall) else []
        self._context_recorder.begin()
        result: msgspec.Raw | None = file_format.NOTHING
        error = ""
        try:
            value = make()
            result = self._unless_it_fails(lambda: file_format.raw(describe(value)))
            return value
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}"
            raise
        finally:
            frame = (encoded, start, self._clock(), compiled, self._context_recorder.end(), result, error)
            self._unless_it_fails(lambda: self._write(frame))

    def _write(self, frame: WrittenFrame) -> None:
        if self._writer is not None:
            self._writer.write(frame)

    def _unless_it_fails(self, record: Callable[[], T]) -> T | None:
        """Do a part of the recording; if it fails, stop recording and continue serving."""
        if self._writer is None:
            return None
        try:
            return record()
        except Exception:
            logger.exception("the recording stops, because it cannot be written; serving continues")
            writer, self._writer = self._writer, None
            with contextlib.suppress(OSError):  # it writes its buffer once more
                writer.close()
            return None

    # -- calls that only look ------------------------------------------------------------------------------

    pause_state = property(lambda self: self.scheduler.pause_state)
    reads_priority = property(lambda self: self.scheduler.reads_priority)
    has_request = forwarded("scheduler", SchedulerInterface.has_request)
    get_num_unfinished_requests = forwarded("scheduler", SchedulerInterface.get_num_unfinished_requests)
    has_finished_requests = forwarded("scheduler", SchedulerInterface.has_finished_requests)
    has_requests = forwarded("scheduler", SchedulerInterface.has_requests)
    next_due = forwarded("scheduler", SchedulerInterface.next_due)
    get_request_counts = forwarded("scheduler", SchedulerInterface.get_request_counts)
    oldest_waiting_request = forwarded("scheduler", SchedulerInterface.oldest_waiting_request)
    explain = forwarded("scheduler", SchedulerInterface.explain)
    get_kv_cache_usage = forwarded("scheduler", SchedulerInterface.get_kv_cache_usage)
    make_stats = forwarded("scheduler", SchedulerInterface.make_stats)
    next_blocks = forwarded("scheduler", SchedulerInterface.next_blocks)

    @override
    def get_kv_connector(self) -> KVConnector | None:
        """Return the KV connector itself, whose worker side is not recorded."""
        return self._connector


def _writer(path: Path, header: Header) -> RecordingWriter:
    try:
        return RecordingWriter(path, header)
    except TypeError as error:
        raise ConfigError(
            "EngineConfig.record_path is set, but a policy is an object and cannot be recorded; give "
            "SchedulerConfig the dotted name of its class"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"EngineConfig.record_path is {str(path)!r}, which cannot be written: {error.strerror}; name a "
            "file in a folder that exists"
        ) from error
