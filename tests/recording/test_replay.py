"""A recorded run does the same again, and says where it does not."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import inspect
import io
import os
import random
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import random_context, run
from small_scheduler import SmallScheduler

import subprocesses
from quire.config import CacheEvictionConfig, SchedulerConfig
from quire.errors import ConfigError
from quire.kv.blocks.groups import WindowBlocks
from quire.recording import calls
from quire.recording import file_format as recording
from quire.recording.file_format import Recording, RecordingError
from quire.recording.perfetto import write_trace
from quire.recording.recorder import RecordingScheduler
from quire.recording.replay import replay
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduling.context import SchedulerContext
from quire.scheduling.interface import SchedulerInterface
from quire.scheduling.scheduler import Scheduler
from quire.step import NO_TOKEN, ModelRunnerOutput

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=4, max_num_queued_reqs=3)
EVICTING = dataclasses.replace(
    CONFIG,
    use_cache_eviction=True,
    cache_eviction_config=CacheEvictionConfig(start_size=4, recent_size=4, max_cache_size=12),
)


def record(
    path: Path, seed: int, num_steps: int = 40, scheduler_cls=SmallScheduler, config: SchedulerConfig = CONFIG
) -> int:
    rng = random.Random(seed)
    failures = 0.2 if scheduler_cls is Scheduler else 0.0  # the small one withstands none
    has_connector = not config.use_cache_eviction
    context = random_context(rng, config.block_size, has_connector=has_connector, share_of_failures=failures)
    scheduler = RecordingScheduler(
        config,
        num_blocks=30,
        max_model_len=64,
        context=context,
        scheduler_cls=scheduler_cls,
        path=path,
    )
    return run(scheduler, rng, num_steps)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "run"
    record(path, seed=1, num_steps=120)
    return path


def rewritten(path: Path, target: Path, change) -> Path:
    """Copy a recording with its header changed."""
    with path.open("rb") as file:
        assert file.read(len(recording.MAGIC)) == recording.MAGIC
        length = int.from_bytes(file.read(4), "little")
        header = msgspec.msgpack.decode(file.read(length))
        rest = file.read()
    change(header)
    data = msgspec.msgpack.encode(header)
    target.write_bytes(recording.MAGIC + len(data).to_bytes(4, "little") + data + rest)
    return target


@pytest.mark.parametrize("scheduler_cls", [SmallScheduler, Scheduler])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_every_run_is_repeated_exactly(tmp_path_factory, scheduler_cls, seed: int):
    path = tmp_path_factory.mktemp("run") / "recording"
    num_planned = record(path, seed, scheduler_cls=scheduler_cls)
    report = replay(path)
    assert report.difference is None
    assert report.num_steps == num_planned
    assert not report.is_truncated


@pytest.mark.histories
@given(seed=st.integers(0, 2**32))
@settings(max_examples=10)
def test_a_run_with_cache_eviction_is_repeated_exactly(tmp_path_factory, seed: int):
    path = tmp_path_factory.mktemp("run") / "recording"
    num_planned = record(path, seed, scheduler_cls=Scheduler, config=EVICTING)
    report = replay(path)
    assert report.difference is None
    assert report.num_steps == num_planned


class SchedulerWithWindows(SmallScheduler):
    """Asks for memory of every cache group before each step."""

    def schedule(self, throttle_prefills=False):
        for group in self.context.windows:
            if group.commit is not None:
                group.commit(group.num_blocks // group.window)
        return super().schedule(throttle_prefills)


def test_further_cache_groups_are_there_in_a_replay(tmp_path):
    asked = []
    windows = (WindowBlocks(8, 40, lambda count: asked.append(count) or 1), WindowBlocks(4, 30))
    scheduler = RecordingScheduler(
        CONFIG,
        num_blocks=30,
        max_model_len=64,
        context=SchedulerContext(windows=windows),
        scheduler_cls=SchedulerWithWindows,
        path=tmp_path / "recording",
    )
    scheduler.schedule()
    assert asked == [5]
    assert replay(tmp_path / "recording").difference is None
    path = rewritten(tmp_path / "recording", tmp_path / "changed", lambda header: header.update(windows=[]))
    assert replay(path).difference.where == "questions"


def test_an_eviction_more_or_less_is_a_difference(tmp_path):
    def change(header):
        header["config"]["cache_eviction_config"]["max_cache_size"] += EVICTING.block_size

    record(tmp_path / "run", seed=1, scheduler_cls=Scheduler, config=EVICTING)
    difference = replay(rewritten(tmp_path / "run", tmp_path / "changed", change)).difference
    assert difference is not None
    assert difference.where == "result.plan.evictions.num_blocks[0]"


def test_a_recorded_run_is_the_run_without_a_recorder(tmp_path):
    """The recorder changes nothing: the same random choices lead to the same plans."""

    class Noting(SmallScheduler):
        plans: list

        def schedule(self, throttle_prefills=False):
            plan = super().schedule(throttle_prefills)
            self.plans.append((plan.request_ids, plan.num_tokens.tolist()))
            return plan

    logs = []
    for is_recorded in (False, True):
        rng = random.Random(5)
        context = random_context(rng, CONFIG.block_size)
        context.clock.rng = random.Random(6)  # the recorder reads the clock more often
        settings = {"num_blocks": 60, "max_model_len": 64, "context": context}
        Noting.plans = []
        if is_recorded:
            scheduler = RecordingScheduler(CONFIG, **settings, scheduler_cls=Noting, path=tmp_path / "run")
        else:
            scheduler = Noting(CONFIG, **settings)
        context.clock.rng.random = lambda: 0.0
        run(scheduler, rng, 60)
        logs.append(Noting.plans)
    assert logs[0] == logs[1]


@pytest.mark.processes
@pytest.mark.parametrize("scheduler_cls", [SmallScheduler, Scheduler])
def test_it_is_repeated_in_another_process(tmp_path, scheduler_cls):
    """String hashes differ between processes, and with them the order of sets."""
    recorded = tmp_path / "run"
    num_planned = record(recorded, seed=2, num_steps=120, scheduler_cls=scheduler_cls)
    code = (
        "import sys; from pathlib import Path; from quire.recording.replay import replay;"
        "report = replay(Path(sys.argv[1]));"
        "print(report.difference, report.num_steps, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(recorded)]
    env = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocesses.run(command, env=env)
    assert result.stdout.split() == ["None", str(num_planned), "False"], result.stderr


def test_another_configuration_is_a_difference(recorded, tmp_path):
    def change(header):
        header["config"]["max_num_seqs"] = 3

    report = replay(rewritten(recorded, tmp_path / "changed", change))
    assert report.difference is not None
    assert report.difference.name in ("schedule", "add_request", "finish_requests")
    assert report.difference.recorded != report.difference.replayed


def test_one_flipped_byte_of_the_configuration_is_noticed(recorded, tmp_path):
    data = bytearray(recorded.read_bytes())
    place = data.index(b"block_size") + len(b"block_size")
    assert data[place] == CONFIG.block_size
    data[place] ^= 1
    path = tmp_path / "flipped"
    path.write_bytes(data)
    difference = replay(path).difference
    assert difference is not None
    assert difference.recorded != difference.replayed


def test_the_difference_is_located(recorded, tmp_path):
    """A sampled token that ends one request more changes the next plan, and nothing before it."""
    source = Recording(recorded)
    writer = recording.RecordingWriter(tmp_path / "changed", source.header)
    changed_call = None
    for number, frame in enumerate(source):
        call = frame.call
        if changed_call is None and isinstance(call, calls.FinishRequestsCall) and frame.result != b"\x90":
            call.request_ids = []
            changed_call = number
        fields = [getattr(frame, name) for name in frame.__struct_fields__]
        writer.write((recording.raw(call), *fields[1:]))
    writer.close()
    difference = replay(tmp_path / "changed").difference
    assert difference.call == changed_call
    assert difference.name == "finish_requests"


def test_a_file_that_was_cut_off_is_replayed_to_there(recorded, tmp_path):
    data = recorded.read_bytes()
    path = tmp_path / "cut"
    path.write_bytes(data[: len(data) * 2 // 3])
    report = replay(path)
    assert report.is_truncated
    assert report.difference is None
    assert 0 < report.num_steps < 120


def test_what_a_killed_engine_has_done_is_in_the_file(tmp_path):
    scheduler = RecordingScheduler(
        CONFIG, num_blocks=60, max_model_len=64, scheduler_cls=SmallScheduler, path=tmp_path / "run"
    )
    scheduler.add_request(Request("one", [1, 2, 3], SamplingParams(max_tokens=4)))
    scheduler.schedule()
    assert [type(frame.call) for frame in Recording(tmp_path / "run")] == [
        calls.AddRequestCall,
        calls.ScheduleCall,
    ]


def test_what_is_no_recording_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"something else")
    with pytest.raises(RecordingError, match="is not a recording"):
        replay(path)
    path.write_bytes(recording.MAGIC)
    with pytest.raises(RecordingError, match="ends before its header"):
        replay(path)
    path.write_bytes(recording.MAGIC + b"\x01\0\0\0\xc1")
    with pytest.raises(RecordingError, match="header"):
        replay(path)


@pytest.mark.parametrize("seed", range(12))
def test_damage_is_told_or_makes_a_difference(recorded, tmp_path, seed):
    rng = random.Random(seed)
    data = bytearray(recorded.read_bytes())
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(recording.MAGIC), len(data))] = rng.choice([0x91, 0xC0, 0xC1, 0xFF])
    (tmp_path / "damaged").write_bytes(data)
    with contextlib.suppress(RecordingError):
        replay(tmp_path / "damaged")
    with contextlib.suppress(RecordingError):
        write_trace(Recording(tmp_path / "damaged"), tmp_path / "trace.json")


def test_another_version_is_refused(recorded, tmp_path):
    path = rewritten(recorded, tmp_path / "newer", lambda header: header.update(version=99))
    with pytest.raises(RecordingError, match="is of version 99; this version of Quire reads 6"):
        replay(path)


def test_a_scheduler_that_is_none_is_refused(recorded, tmp_path):
    path = rewritten(recorded, tmp_path / "odd", lambda header: header.update(scheduler_cls="builtins.int"))
    with pytest.raises(RecordingError, match="not a subclass"):
        replay(path)


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"EngineConfig\.record_path is .*/none/run"):
        record(tmp_path / "none" / "run", seed=0)


def test_a_policy_object_is_refused(tmp_path):
    config = SchedulerConfig(policy=object())
    with pytest.raises(ConfigError, match="dotted name"):
        RecordingScheduler(
            config, num_blocks=60, max_model_len=64, scheduler_cls=SmallScheduler, path=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


class FullDisk(io.BytesIO):
    """Takes the header and nothing more; closing it fails too, as if its buffer could not be written."""

    num_refused = 0

    def close(self):
        if self.closed:
            return
        super().close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, data):
        if not self.tell():
            return super().write(data)
        self.num_refused += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path, monkeypatch):
    disk = FullDisk()
    monkeypatch.setattr(Path, "open", lambda path, mode: disk)
    scheduler = RecordingScheduler(
        CONFIG, num_blocks=60, max_model_len=64, scheduler_cls=SmallScheduler, path=tmp_path / "run"
    )
    scheduler.add_request(Request("one", [1, 2, 3], SamplingParams(max_tokens=1)))
    plan = scheduler.schedule()
    outputs = scheduler.update_from_output(plan, ModelRunnerOutput(["one"], np.array([[5]], dtype=np.int32)))
    assert outputs[0].outputs[0].new_token_ids == [5]
    assert disk.num_refused == 1, "nothing is recorded after that"
    assert disk.closed


def test_what_cannot_be_recorded_ends_the_recording_and_nothing_else(tmp_path):
    scheduler = RecordingScheduler(
        CONFIG, num_blocks=60, max_model_len=64, scheduler_cls=SmallScheduler, path=tmp_path / "run"
    )
    params = SamplingParams(max_tokens=1)
    scheduler.add_request(Request("one", [1, 2], params, kv_transfer_params={"peer": object()}))
    assert scheduler.schedule().request_ids == ["one"]
    assert list(Recording(tmp_path / "run")) == []


def test_a_call_is_recorded_as_it_was_made(tmp_path):
    """Not as the scheduler leaves its arguments behind."""

    class Careless(SmallScheduler):
        def update_from_output(self, scheduler_output, model_runner_output):
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            model_runner_output.sampled_token_ids[:] = NO_TOKEN
            return outputs

    scheduler = RecordingScheduler(
        CONFIG, num_blocks=60, max_model_len=64, scheduler_cls=Careless, path=tmp_path / "run"
    )
    scheduler.add_request(Request("one", [1, 2, 3], SamplingParams(max_tokens=1)))
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, ModelRunnerOutput(["one"], np.array([[5]], dtype=np.int32)))
    *_, frame = Recording(tmp_path / "run")
    assert frame.call.output.sampled_token_ids.tolist() == [[5]]


def test_everything_that_a_scheduler_has_is_asked_of_the_recorded_one():
    derived = {"has_unfinished_requests"}  # from methods that are handed on
    names = {name for name in vars(SchedulerInterface) if not name.startswith("_")}
    assert names - vars(RecordingScheduler).keys() == derived


def test_every_field_of_a_request_is_recorded():
    parameters = set(inspect.signature(Request).parameters)
    assert set(calls.RecordedRequest.__struct_fields__) == parameters | {"output_token_ids"}


def test_a_plan_survives_the_file():
    scheduler = SmallScheduler(CONFIG, num_blocks=8, max_model_len=32, context=SchedulerContext())
    scheduler.add_request(Request("one", [1, 2, 3, 4, 5], SamplingParams(max_tokens=1, seed=3)))
    result = calls.StepResult.of(scheduler, scheduler.schedule())
    decoded = recording.decode(recording.encode(result), calls.StepResult)
    assert decoded.plan.num_tokens.tolist() == [5]
    assert decoded.plan.num_tokens.dtype == np.int32
    assert decoded.plan.draft_token_ids.shape == (1, 0)
    assert decoded.plan.scheduled_new_reqs[0].block_ids.tolist() == [[0, 1]]
    assert decoded.plan.scheduled_new_reqs[0].sampling_params == SamplingParams(max_tokens=1, seed=3)
    assert NO_TOKEN not in decoded.plan.slots
