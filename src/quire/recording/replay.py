"""Replays a recorded scheduler without model, connector or clock, and compares all it does."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.kv.blocks.groups import WindowBlocks
from quire.recording import calls, file_format
from quire.recording.calls import Plans
from quire.recording.compilations import CompilationPlayer
from quire.recording.file_format import Frame, Header, Recording, RecordingError
from quire.recording.recorded_context import (
    ContextPlayer,
    DivergedError,
    RecordedFailureError,
    Silence,
    recorded_context,
)
from quire.scheduling.context import SchedulerContext
from quire.scheduling.interface import SchedulerInterface


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a replay and its recording.

    `call` counts from 0, `step` is the step that was planned last, -1 before the first.
    """

    call: int
    step: int
    name: str
    where: str
    recorded: str
    replayed: str


@dataclasses.dataclass(slots=True)
class ReplayReport:
    """What a recording holds, as far as it was replayed, and where the replay differs; times in seconds."""

    scheduler_cls: str
    num_calls: int = 0
    num_steps: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    seconds: float = 0.0  # from the first call to the last, when recorded
    is_truncated: bool = False
    difference: Difference | None = None


def replay(path: Path) -> ReplayReport:
    """Replay a recording up to the first difference.

    A recording names the classes it was made with, and they are imported: replay only what you trust.

    Raises:
        RecordingError: it cannot be read, or its scheduler cannot be built.
        OSError: the file cannot be read.
    """
    source = Recording(path)
    report = ReplayReport(source.header.scheduler_cls)
    player = _Player(source.header)
    start: float | None = None
    for frame in source:
        start = frame.start if start is None else start
        report.seconds = frame.end - start
        report.difference = player.play(frame, report)
        report.num_calls += 1
        if report.difference is not None:
            break
    report.is_truncated = source.is_truncated
    return report


class _Player:
    """A scheduler under replay."""

    def __init__(self, header: Header) -> None:
        self._context_player = ContextPlayer()
        self._compilations = CompilationPlayer(self._context_player)
        self._plans: Plans = {}
        self._step = -1
        self._context_player.insert(header.answers)
        context = recorded_context(_silent_context(header), self._context_player, self._compilations)
        try:
            self._scheduler = _scheduler_cls(header.scheduler_cls)(
                header.config,
                num_blocks=header.num_blocks,
                max_model_len=header.max_model_len,
                context=context,
            )
        except Exception as error:
            raise RecordingError(f"the recorded {header.scheduler_cls} cannot be built: {error}") from error

    def play(self, frame: Frame, report: ReplayReport) -> Difference | None:
        """Make one call again and compare what comes of it."""
        call = frame.call
        number, name = report.num_calls, type(call).__struct_config__.tag
        self._context_player.insert(frame.answers)
        self._compilations.deliver(frame.compiled)
        result, error = file_format.NOTHING, ""
        try:
            result = file_format.raw(call.apply(self._scheduler, self._plans))
            self._context_player.check_at_end()
        except DivergedError as diverged:
            return Difference(number, self._step, str(name), "questions", *_sides(diverged))
        except RecordedFailureError as failure:
            error = str(failure)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        self._count(frame, report)
        if error != frame.error:
            return Difference(number, self._step, str(name), "error", frame.error or "none", error or "none")
        if bytes(result) != bytes(frame.result):
            recorded, replayed = (_result(frame, side) for side in (frame.result, result))
            found = first_difference(recorded, replayed)
            return Difference(number, self._step, str(name), *found)
        return None

    def _count(self, frame: Frame, report: ReplayReport) -> None:
        if isinstance(frame.call, calls.AddRequestCall):
            report.num_requests += not frame.error
        elif isinstance(frame.call, calls.ScheduleCall) and not frame.error:
            plan = file_format.decode(frame.result, calls.StepResult).plan
            self._step = plan.step
            report.num_steps += 1
            report.num_tokens += plan.total_num_scheduled_tokens
            report.num_preemptions += len(plan.preempted_req_ids)


def first_difference(recorded: object, replayed: object, where: str = "result") -> tuple[str, str, str]:
    """Return (place, value there, other value there) where two values first differ."""
    left, right = _parts(recorded), _parts(replayed)
    if left and left.keys() == right.keys():
        for key in left:
            if file_format.encode(left[key]) != file_format.encode(right[key]):
                return first_difference(left[key], right[key], f"{where}{key}")
    return where, _shortened(_plain(recorded)), _shortened(_plain(replayed))


def _parts(value: Any) -> dict[str, Any]:
    """Return what a value is made of, by the way to write each part's place; empty for a single value."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return {f"[{key!r}]": part for key, part in value.items()}
    names = getattr(value, "_fields", None) or getattr(value, "__struct_fields__", None)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    if names:
        return {f".{name}": getattr(value, name) for name in names}
    if isinstance(value, (list, tuple)):
        return {f"[{index}]": part for index, part in enumerate(value)}
    return {}


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _result(frame: Frame, result: msgspec.Raw) -> Any:
    """Return a call's result with its types, as far as it has any."""
    is_step = isinstance(frame.call, (calls.ScheduleCall, calls.UpdateDraftsInOutputCall))
    return file_format.decode(result, calls.StepResult if is_step else object)


def _shortened(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def _sides(diverged: DivergedError) -> tuple[str, str]:
    replayed, _, recorded = str(diverged).partition("; when recorded, ")
    return recorded, replayed


def _silent_context(header: Header) -> SchedulerContext:
    """Return surroundings that answer nothing; the player in front of them answers."""
    silence: Any = Silence()
    grammars: Any = None
    if header.vocab_size is not None:
        grammars = Silence()
        grammars.vocab_size = header.vocab_size
    return SchedulerContext(
        clock=silence.clock,
        grammars=grammars,
        connector=silence if header.has_connector else None,
        draft_length=silence.draft_length,
        commit_blocks=silence.commit if header.has_reserved_blocks else None,
        windows=tuple(
            WindowBlocks(window, num_blocks, silence.commit if is_reserved else None)
            for window, num_blocks, is_reserved in header.windows
        ),
        states=header.states,
    )


def _scheduler_cls(name: str) -> type[SchedulerInterface]:
    module_name, _, class_name = name.rpartition(".")
    scheduler_cls = getattr(importlib.import_module(module_name), class_name)
    if not (isinstance(scheduler_cls, type) and issubclass(scheduler_cls, SchedulerInterface)):
        raise TypeError(f"{name} is not a subclass of quire.scheduling.SchedulerInterface")
    return scheduler_cls
