"""The structure of a trace: what the format asks for, and that it tells what the recording tells."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, defaultdict

import pytest
from recorded_runs import random_context, run
from small_scheduler import SmallScheduler

from quire.config import SchedulerConfig
from quire.recording import calls
from quire.recording import file_format as recording
from quire.recording.file_format import Recording
from quire.recording.perfetto import REQUESTS, SLOTS, STEPS, write_trace
from quire.recording.recorder import RecordingScheduler
from quire.scheduling.scheduler import Scheduler

TOLERANCE = 1e-6  # microseconds


@pytest.fixture(
    scope="module", params=[*((SmallScheduler, 0.0, seed) for seed in range(4)), (Scheduler, 0.2, 1)], ids=str
)
def traced(request, tmp_path_factory):
    scheduler_cls, share_of_failures, seed = request.param
    folder = tmp_path_factory.mktemp("trace")
    rng = random.Random(seed)
    config = SchedulerConfig(block_size=4, max_num_seqs=4)
    scheduler = RecordingScheduler(
        config,
        num_blocks=60,
        max_model_len=64,
        context=random_context(rng, config.block_size, grammars=False, share_of_failures=share_of_failures),
        scheduler_cls=scheduler_cls,
        path=folder / "run",
    )
    run(scheduler, rng, 80, grammars=False)
    count = write_trace(Recording(folder / "run"), folder / "trace.json")
    trace = json.loads((folder / "trace.json").read_text())
    assert len(trace["traceEvents"]) == count
    return list(Recording(folder / "run")), trace["traceEvents"]


def plans_of(frames):
    return [
        recording.decode(frame.result, calls.StepResult)
        for frame in frames
        if isinstance(frame.call, calls.ScheduleCall) and not frame.error
    ]


def test_every_event_has_what_its_kind_needs(traced):
    _, events = traced
    needed = {
        "X": {"name", "pid", "tid", "ts", "dur"},
        "b": {"name", "pid", "id", "cat", "ts"},
        "e": {"name", "pid", "id", "cat", "ts"},
        "C": {"name", "pid", "ts", "args"},
        "M": {"name", "pid", "tid", "args"},
    }
    for event in events:
        assert needed[event["ph"]] <= event.keys()
        assert event.get("ts", 0.0) >= 0
        assert event.get("dur", 0.0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())


def test_slices_of_one_track_do_not_overlap(traced):
    _, events = traced
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert {group for group, _ in tracks} == {STEPS, SLOTS}
    for slices in tracks.values():
        slices.sort()
        assert all(end <= start + TOLERANCE for (_, end), (start, _) in itertools.pairwise(slices))


def test_every_track_with_slices_has_a_name(traced):
    _, events = traced
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= named


def test_states_open_and_close_in_pairs(traced):
    _, events = traced
    open_states = defaultdict(list)
    for event in events:
        if event["ph"] == "b":
            open_states[event["id"]].append(event["name"])
        elif event["ph"] == "e":
            assert event["name"] in open_states[event["id"]]
            open_states[event["id"]].remove(event["name"])
        if event["ph"] in "be":
            assert event["pid"] == REQUESTS
    assert not any(open_states.values())
    names = {event["name"] for event in events if event["ph"] == "b"}
    assert {"waiting", "running"} <= names


def test_every_accepted_request_is_there_once(traced):
    frames, events = traced
    accepted = [
        frame.call.request.request_id
        for frame in frames
        if isinstance(frame.call, calls.AddRequestCall) and not frame.error
    ]
    begun = [event["id"] for event in events if event["ph"] == "b" and event["id"] == event["name"]]
    assert begun == accepted


def test_tokens_add_up(traced):
    frames, events = traced
    planned = sum(result.plan.total_num_scheduled_tokens for result in plans_of(frames))
    per_slot = sum(
        event["args"]["tokens"] for event in events if event["pid"] == SLOTS and event["ph"] == "X"
    )
    per_step = [event["args"]["tokens"] for event in events if event["name"] == "tokens per step"]
    assert sum(per_step) == planned
    cut = [frame for frame in frames if isinstance(frame.call, calls.UpdateDraftsInOutputCall)]
    for frame in cut:
        after = recording.decode(frame.result, calls.StepResult).plan
        before = next(result.plan for result in plans_of(frames) if result.plan.step == after.step)
        planned -= before.total_num_scheduled_tokens - after.total_num_scheduled_tokens
    assert per_slot == planned


def test_the_counters_are_the_schedulers(traced):
    frames, events = traced
    counted = [event["args"] for event in events if event["name"] == "requests" and event["ph"] == "C"]
    assert counted == [
        {"running": result.num_running, "waiting": result.num_waiting} for result in plans_of(frames)
    ]
    free = [event["args"]["blocks"] for event in events if event["name"] == "free blocks"]
    assert free == [result.num_free_blocks for result in plans_of(frames)]


def test_transfers_are_there(traced):
    frames, events = traced
    answers = [answer for frame in frames for answer in frame.answers if answer.failure is None]
    sends = Counter(
        answer.subject for answer in answers if answer.question == "connector.finished" and answer.value[0]
    )
    begun = Counter(event["id"] for event in events if event["ph"] == "b" and event["name"] == "sending KV")
    assert begun == sends
    found = sum(
        answer.question == "connector.find" and bool(answer.value[0]) and bool(answer.value[1])
        for answer in answers
    )
    failed = sum(
        answer.question == "connector.load" and answer.failure is not None
        for frame in frames
        for answer in frame.answers
    )
    begun_loads = sum(event["ph"] == "b" and event["name"] == "loading KV" for event in events)
    assert begun_loads == found - failed
