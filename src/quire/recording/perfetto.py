"""A recording as a trace that ui.perfetto.dev and chrome://tracing open.

Three groups of tracks: the steps, with counters; the slots, with what each is used for; and the requests,
each with the states that it goes through. The format is Google's "Trace Event Format" (complete events X,
nestable asynchronous events b and e, counters C, metadata M); times are microseconds from the first call.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from quire.recording import calls, file_format
from quire.recording.calls import StepResult
from quire.recording.file_format import Frame, Recording
from quire.step import SchedulerOutput

Event = dict[str, Any]

STEPS, SLOTS, REQUESTS = 1, 2, 3  # groups of tracks, "processes" in the format's words
SCHEDULER_TRACK, RUNNER_TRACK = 1, 2


def write_trace(source: Recording, path: Path) -> int:
    """Write the trace of a recording and return its number of events.

    Raises:
        OSError: the file cannot be written.
        RecordingError: the recording cannot be read.
    """
    count = 0
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for event in trace_events(source):
            file.write(",\n" if count else "\n")
            json.dump(event, file)
            count += 1
        file.write("\n]}\n")
    return count


def trace_events(recorded: Iterable[Frame]) -> Iterator[Event]:
    """Yield the events of a trace, not in the order of their times."""
    tracer = _Tracer()
    yield from tracer.names()
    for frame in recorded:
        tracer.take(frame)
        yield from tracer.drain()
    tracer.finish()
    yield from tracer.drain()


@dataclasses.dataclass(slots=True)
class _Activity:
    """What a slot does, in one or more steps on end; times in microseconds."""

    request_id: str
    phase: str
    start: float
    end: float
    num_tokens: int
    num_steps: int


@dataclasses.dataclass(slots=True)
class _RequestTrace:
    """The present state of a request; "" is none."""

    num_prompt_tokens: int
    state: str = ""
    was_preempted: bool = False


class _Tracer:
    """Follows a scheduler through its recorded calls."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._origin: float | None = None  # seconds
        self._now = 0.0  # microseconds: the end of the latest call
        self._requests: dict[str, _RequestTrace] = {}
        self._sending: set[str] = set()
        self._plans: dict[int, tuple[SchedulerOutput, float]] = {}  # by step, with the time it was ready
        self._runner_free = 0.0  # when the runner ended the latest step
        self._activities: dict[int, _Activity] = {}  # by slot
        self._named_slots: set[int] = set()

    def names(self) -> Iterator[Event]:
        """Yield the names of the fixed tracks."""
        for group, name in ((STEPS, "steps"), (SLOTS, "slots"), (REQUESTS, "requests")):
            yield _name("process_name", group, 0, name)
        yield _name("thread_name", STEPS, SCHEDULER_TRACK, "scheduler")
        yield _name("thread_name", STEPS, RUNNER_TRACK, "runner")

    def drain(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def take(self, frame: Frame) -> None:
        """Trace one call."""
        start = self._microseconds(frame.start)
        self._now = self._microseconds(frame.end)
        call = frame.call
        self._trace_transfers(frame)
        match call:
            case _ if frame.error:
                pass
            case calls.AddRequestCall():
                self._begin_request(call.request, start)
            case calls.ScheduleCall():
                self._trace_plan(file_format.decode(frame.result, StepResult), start)
            case calls.UpdateDraftsInOutputCall():
                result = file_format.decode(frame.result, StepResult)
                self._plans[result.plan.step] = (result.plan, self._now)
            case calls.UpdateFromOutputCall():
                self._trace_step(call, start)
                for request_id, reason in file_format.decode(frame.result, list[tuple[str, str]]):
                    self._end_request(request_id, reason)
            case calls.FinishRequestsCall():
                for request_id in file_format.decode(frame.result, list[str]):
                    self._end_request(request_id, call.status.name)

    def finish(self) -> None:
        """Close what is open at the end of the recording."""
        for slot in list(self._activities):
            self._close_activity(slot)
        for request_id in list(self._requests):
            self._end_request(request_id, "recording ended")
        for request_id in list(self._sending):
            self._end_sending(request_id)

    # -- requests ------------------------------------------------------------------------------------------

    def _begin_request(self, request: calls.RecordedRequest, start: float) -> None:
        trace = _RequestTrace(len(request.prompt_token_ids))
        self._requests[request.request_id] = trace
        arguments = {"prompt_tokens": trace.num_prompt_tokens, "priority": request.priority}
        self._async("b", request.request_id, request.request_id, start, arguments)
        self._enter(request.request_id, "waiting")

    def _enter(self, request_id: str, state: str) -> None:
        """Let a request go from its present state to another, now."""
        trace = self._requests.get(request_id)
        if trace is None or trace.state == state:
            return
        if trace.state:
            self._async("e", request_id, trace.state, self._now)
        if state:
            self._async("b", request_id, state, self._now)
        trace.state = state
        trace.was_preempted = trace.was_preempted or state == "preempted"

    def _end_request(self, request_id: str, reason: str) -> None:
        self._enter(request_id, "")
        if self._requests.pop(request_id, None) is not None:
            self._async("e", request_id, request_id, self._now, {"finish_reason": reason})

    def _trace_transfers(self, frame: Frame) -> None:
        """Trace what the connector was asked to load and to send."""
        is_async: dict[str, bool] = {}
        for answer in frame.answers:
            if answer.failure is not None:
                continue
            match answer.question:
                case "connector.find":
                    is_async[answer.subject] = bool(answer.value[1])
                case "connector.load" if answer.value and is_async.get(answer.subject):
                    self._enter(answer.subject, "loading KV")
                case "connector.cancel":
                    self._enter(answer.subject, "waiting")
                case "connector.finished" if answer.value[0]:
                    self._sending.add(answer.subject)
                    self._async("b", answer.subject, "sending KV", self._now)

    def _end_sending(self, request_id: str) -> None:
        if request_id in self._sending:
            self._sending.remove(request_id)
            self._async("e", request_id, "sending KV", self._now)

    # -- steps and slots -----------------------------------------------------------------------------------

    def _trace_plan(self, result: StepResult, start: float) -> None:
        plan = result.plan
        self._plans[plan.step] = (plan, self._now)
        if len(self._plans) > calls.MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        for request_id in plan.preempted_req_ids:
            self._enter(request_id, "preempted")
        for new in plan.scheduled_new_reqs:
            self._enter(new.request_id, "running")
        for resumed in plan.scheduled_cached_reqs.resumed:
            self._enter(resumed.request_id, "running")
        num_tokens = plan.total_num_scheduled_tokens
        self._slice(SCHEDULER_TRACK, "schedule", start, self._now, {"step": plan.step, "tokens": num_tokens})
        self._count("requests", {"running": result.num_running, "waiting": result.num_waiting})
        self._count("free blocks", {"blocks": result.num_free_blocks})
        self._count("tokens per step", {"tokens": num_tokens})

    def _trace_step(self, call: calls.UpdateFromOutputCall, start: float) -> None:
        """Trace a computed step: the runner has worked on it since it was planned, or since it was free."""
        self._slice(SCHEDULER_TRACK, "update", start, self._now, {"step": call.step})
        transfers = call.output.kv_connector_output
        if transfers is not None:
            for request_id in sorted(transfers.finished_receiving):
                self._enter(request_id, "waiting")
            for request_id in sorted(transfers.finished_sending):
                self._end_sending(request_id)
        plan, planned = self._plans.pop(call.step, (None, 0.0))
        if plan is None:
            return
        begin = max(planned, self._runner_free)
        self._runner_free = start
        arguments = {"tokens": plan.total_num_scheduled_tokens, "requests": len(plan.request_ids)}
        self._slice(RUNNER_TRACK, f"step {plan.step}", begin, start, arguments)
        columns = (plan.slots, plan.num_tokens, plan.num_computed_tokens, plan.num_known_tokens)
        rows = zip(plan.request_ids, *(column.tolist() for column in columns), strict=True)
        for request_id, slot, num_tokens, num_computed, num_known in rows:
            phase = self._phase(request_id, num_computed, num_known)
            self._extend_activity(slot, _Activity(request_id, phase, begin, start, num_tokens, 1))

    def _phase(self, request_id: str, num_computed: int, num_known: int) -> str:
        trace = self._requests.get(request_id)
        if trace is None or (num_known - num_computed <= 1 and num_computed >= trace.num_prompt_tokens):
            return "decode"
        return "recompute" if trace.was_preempted else "prefill"

    def _extend_activity(self, slot: int, activity: _Activity) -> None:
        """Append a step to what a slot does: decoding on and on is one slice, each prefill chunk its own."""
        present = self._activities.get(slot)
        if (
            present is not None
            and present.phase == activity.phase == "decode"
            and present.request_id == activity.request_id
        ):
            present.end = activity.end
            present.num_tokens += activity.num_tokens
            present.num_steps += 1
            return
        self._close_activity(slot)
        self._activities[slot] = activity

    def _close_activity(self, slot: int) -> None:
        activity = self._activities.pop(slot, None)
        if activity is None:
            return
        if slot not in self._named_slots:
            self._named_slots.add(slot)
            self._events.append(_name("thread_name", SLOTS, slot + 1, f"slot {slot}"))
        self._slice(
            slot + 1,
            f"{activity.phase} {activity.request_id}",
            activity.start,
            activity.end,
            {"tokens": activity.num_tokens, "steps": activity.num_steps},
            group=SLOTS,
        )

    # -- events --------------------------------------------------------------------------------------------

    def _microseconds(self, seconds: float) -> float:
        if self._origin is None:
            self._origin = seconds
        return (seconds - self._origin) * 1e6

    def _slice(
        self, track: int, name: str, start: float, end: float, arguments: Event, *, group: int = STEPS
    ) -> None:
        times = {"ts": start, "dur": max(0.0, end - start)}
        self._events.append({"ph": "X", "name": name, "pid": group, "tid": track, **times, "args": arguments})

    def _async(
        self, kind: str, request_id: str, name: str, time: float, arguments: Event | None = None
    ) -> None:
        event = {"ph": kind, "cat": "request", "id": request_id, "name": name, "pid": REQUESTS, "tid": 0}
        self._events.append({**event, "ts": time, "args": arguments or {}})

    def _count(self, name: str, values: Event) -> None:
        self._events.append({"ph": "C", "name": name, "pid": STEPS, "ts": self._now, "args": values})


def _name(kind: str, group: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": group, "tid": track, "args": {"name": name}}
