"""What becomes of live requests when their engine dies: who goes on, in which order, and who does not."""

from __future__ import annotations

import types

import pytest
from test_input_processor import INFO, TOKENIZER

from quire import EngineConfig, SamplingParams, SchedulerConfig
from quire.engine.messages import (
    AbortRequests,
    EngineCoreRequest,
    GetStats,
    Ready,
    Reply,
    StepOutputs,
)
from quire.errors import EngineDeadError, QueueFullError, RequestQuarantinedError, RequestTimeoutError
from quire.front import deadlines, live_requests
from quire.front.deadlines import DEADLINE_GRACE
from quire.front.held_requests import START_TIME
from quire.front.live_requests import LiveRequests
from quire.front.process import resumption
from quire.front.process.message_backlog import MAX_OUTPUTS
from quire.front.process.supervision import EngineCrashed
from quire.front.text import input_processor
from quire.scheduling.outputs import EngineCoreOutput, SchedulerStats
from quire.status import FinishReason
from quire.step import PositionLogprobs


class Client:
    """An engine that says what a test gives it, and keeps what it is told."""

    next_due = None

    def __init__(self):
        self.sent = []
        self.said = []
        self.dead = None

    def send(self, message):
        self.sent.append(message)

    def receive(self, timeout):
        if self.dead:
            raise self.dead
        said, self.said = self.said, []
        return said


class Scene:
    def __init__(self, monkeypatch, **scheduler):
        self.now = 100.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        for module in (live_requests, deadlines, resumption, input_processor):
            monkeypatch.setattr(module, "time", clock)
        self.client = Client()
        config = EngineConfig(scheduler=SchedulerConfig(**scheduler))
        self.requests = LiveRequests(self.client, TOKENIZER, config)
        self.hear(Ready(INFO))

    def hear(self, *messages):
        self.client.said += messages
        self.requests.receive(0)

    def submit(self, name, options=None, **params):
        processed = self.requests.inputs.process(
            "abc", SamplingParams(**params), request_id=name, **(options or {})
        )
        return self.requests.submit(processed)

    def output(self, state, *tokens, index=0, reason=None, **more):
        name = state.processed.core_request.sequence_ids[index]
        self.hear(StepOutputs([EngineCoreOutput(name, list(tokens), finish_reason=reason, **more)]))

    def crash(self):
        self.hear(EngineCrashed("killed by SIGKILL"))

    def taken(self):
        """Return what the engine has been sent since the last call."""
        sent, self.client.sent = self.client.sent, []
        return sent

    def names(self):
        """Return the requests that the engine has been sent since the last call."""
        return [message.sequence_ids[0].partition("#")[0] for message in self.taken()]


@pytest.fixture
def scene(monkeypatch):
    return Scene(monkeypatch)


def test_a_dead_engine_holds_nothing(scene):
    scene.hear(StepOutputs([], SchedulerStats(num_blocks=8, num_free_blocks=3, num_leased_blocks=5)))
    assert scene.requests.latest_stats.num_leased_blocks == 5
    scene.crash()
    assert scene.requests.latest_stats == SchedulerStats()
    scene.hear(Ready(INFO))
    assert scene.requests.latest_stats == SchedulerStats(), "the next engine has not said anything"


def test_each_live_sequence_goes_on_from_its_tokens(scene):
    a = scene.submit("a", n=3, seed=7, max_tokens=9)
    original = scene.taken()[0]
    assert original.resumed_outputs is None
    scene.output(a, 5, 6, index=0)
    scene.output(a, 7, index=1, reason=FinishReason.STOP)
    scene.crash()
    assert not scene.requests.is_ready
    b = scene.submit("b")
    assert scene.taken() == [], "there is no engine"
    scene.hear(Ready(INFO))
    rest, new = scene.taken()
    assert rest.sequence_ids == original.sequence_ids[::2]
    assert rest.seeds == original.seeds[::2]
    assert rest.resumed_outputs == [[5, 6], []]
    assert rest.sampling_params == original.sampling_params
    assert new.sequence_ids == b.processed.core_request.sequence_ids
    assert new.resumed_outputs is None
    scene.output(a, 8, index=0, reason=FinishReason.LENGTH)
    scene.output(a, 9, index=2, reason=FinishReason.LENGTH)
    assert [one.token_ids for one in a.snapshot().outputs] == [[5, 6, 8], [7], [9]]
    assert scene.requests.resumption.num_resumed == 1


def test_log_probabilities_of_the_prompt_are_not_repeated(scene):
    known = [
        PositionLogprobs([5], [-1.0 * number], [1]) for number in range(len(TOKENIZER.encode("abc")) - 1)
    ]
    partly = scene.submit("partly", prompt_logprobs=0)
    wholly = scene.submit("wholly", prompt_logprobs=0)
    scene.output(partly, prompt_logprobs=known[:1])
    scene.output(wholly, 4, prompt_logprobs=known)
    scene.taken()
    scene.crash()
    scene.hear(Ready(INFO))
    again, rest = scene.taken()
    assert again.sampling_params.prompt_logprobs == 0
    assert rest.sampling_params.prompt_logprobs is None
    for entry in known:
        scene.output(partly, prompt_logprobs=[entry])
    assert partly.snapshot().prompt_logprobs == wholly.snapshot().prompt_logprobs
    assert len(partly.prompt_logprobs) == len(known) + 1


def test_suspects_come_last_and_one_at_a_time(scene):
    states = {name: scene.submit(name) for name in "pqrst"}
    scene.output(states["q"], 1)
    scene.output(states["s"], 1)
    scene.taken()
    scene.crash()
    scene.hear(Ready(INFO))
    assert scene.names() == ["q", "s"]
    scene.output(states["q"], 2)
    assert scene.names() == []
    scene.output(states["s"], 2)
    assert scene.names() == ["p"]
    scene.submit("new")
    assert scene.names() == ["new"], "nobody else waits"
    scene.output(states["p"], 1)
    assert scene.names() == ["r"]
    scene.requests.discard(states["t"])
    assert scene.names() == [], "the engine never had it"
    scene.crash()
    assert isinstance(states["r"].snapshot().outputs[0].error, str)
    assert states["r"].completions[0].exception.__class__ is RequestQuarantinedError
    assert "killed by SIGKILL" in states["r"].completions[0].error
    assert scene.requests.resumption.num_quarantined == 1
    scene.hear(Ready(INFO))
    assert scene.names() == ["p", "q", "s"]
    for name in "pqs":
        scene.output(states[name], 3)
    assert scene.names() == ["new"]


def test_a_request_that_comes_far_each_time_is_quarantined_in_the_end(scene):
    state = scene.submit("a")
    for number in range(resumption.MAX_CRASHES):
        assert not state.finished
        scene.output(state, number)
        scene.crash()
        scene.hear(Ready(INFO))
    assert state.finished
    assert state.completions[0].token_ids == list(range(resumption.MAX_CRASHES))
    assert "10 in total" in state.completions[0].error


def test_calls_are_answered_with_the_reason(scene):
    replies = []
    scene.requests.call(GetStats, replies.append)
    scene.crash()
    [reply] = replies
    assert "SIGKILL" in reply.error.message
    with pytest.raises(EngineDeadError, match="restarted"):
        scene.requests.call(GetStats, replies.append)
    scene.hear(Ready(INFO))
    scene.requests.call(GetStats, replies.append)
    call_id = scene.taken()[-1].call_id
    scene.hear(Reply(call_id, stats=SchedulerStats()))
    assert replies[-1].error is None


def test_an_abort_ends_what_no_engine_has(scene):
    states = [scene.submit(name, n=2) for name in "abc"]
    scene.requests.abort("a")
    [message] = scene.taken()[-1:]
    assert isinstance(message, AbortRequests)
    assert message.sequence_ids == states[0].live_sequence_ids
    scene.crash()
    scene.requests.abort("b")
    assert states[1].finished
    assert states[1].completions[1].finish_reason is FinishReason.ABORT
    scene.requests.abort(None)
    assert len(scene.requests.outputs) == 0
    scene.hear(Ready(INFO))
    assert scene.taken() == []


def test_the_time_that_is_left_is_passed_on(monkeypatch):
    scene = Scene(monkeypatch, request_timeout=50)
    a = scene.submit("a", {"timeout": 30, "queue_timeout": 20})
    b = scene.submit("b", {"timeout": 0})
    scene.submit("c", {"queue_timeout": 5})
    scene.output(b, 1)
    scene.output(a, 1)
    scene.now += 10
    scene.taken()
    scene.crash()
    scene.hear(Ready(INFO))
    scene.output(a, 1)
    scene.output(b, 1)
    options = [message.options for message in scene.taken() if isinstance(message, EngineCoreRequest)]
    assert [one.timeout for one in options] == [pytest.approx(20), 0, pytest.approx(40)]
    assert [one.queue_timeout for one in options] == [0, 0, pytest.approx(resumption.MIN_TIMEOUT)]


def test_deadlines_hold_without_an_engine(monkeypatch):
    scene = Scene(monkeypatch, request_timeout=50)
    a, b = scene.submit("a", {"timeout": 30}), scene.submit("b")
    endless = scene.submit("c", {"timeout": 0})
    scene.crash()
    assert scene.requests.next_due == pytest.approx(130 + DEADLINE_GRACE)
    scene.now = 130.5
    scene.requests.receive(0)
    assert not a.finished
    scene.now = 131.5
    scene.requests.receive(0)
    assert isinstance(a.completions[0].exception, RequestTimeoutError)
    assert "31.5 s" in a.completions[0].error
    assert scene.requests.next_due == pytest.approx(150 + DEADLINE_GRACE)
    scene.now = 200
    scene.requests.receive(0)
    assert b.finished
    assert not endless.finished
    assert scene.requests.next_due is None


def test_timeouts_begin_when_a_request_is_submitted(scene):
    """Before that, it may have waited for a place of its tenant."""
    processed = scene.requests.inputs.process("abc", SamplingParams(), request_id="a", timeout=5.0)
    scene.now += 100
    state = scene.requests.submit(processed)
    scene.requests.receive(0)
    assert not state.finished
    assert scene.requests.next_due == pytest.approx(scene.now + 5 + DEADLINE_GRACE)


def test_new_requests_are_held_also_over_a_crash_and_then_sent(scene):
    scene.submit("a")
    scene.requests.held.is_paused = True
    b = scene.submit("b")
    assert scene.names() == ["a"]
    assert scene.requests.has_accepted
    assert "paused" in scene.requests.reasons_to_wait("b")[0]
    assert scene.requests.reasons_to_wait("a") == scene.requests.reasons_to_wait("gone") == []
    scene.crash()
    scene.submit("c")
    scene.requests.discard(b)
    scene.hear(Ready(INFO))
    assert scene.names() == ["a"]
    scene.requests.held.is_paused = False
    scene.requests.send_held()
    assert scene.names() == ["c"]
    scene.submit("d")
    assert scene.names() == ["d"]


def test_suspects_are_sent_once_if_requests_are_released_meanwhile(scene):
    for name in "ab":
        scene.submit(name)
    scene.taken()
    scene.crash()
    scene.hear(Ready(INFO))
    assert scene.names() == ["a"]
    assert "crashed" in scene.requests.reasons_to_wait("b")[0]
    scene.requests.held.is_paused = True
    scene.requests.held.is_paused = False
    scene.requests.send_held()
    assert scene.names() == []
    a = scene.requests.outputs.get("a")
    scene.output(a, 1)
    assert scene.names() == ["b"]


def test_the_engine_owes_a_step_while_it_has_anything_to_do(scene):
    requests = scene.requests
    assert requests.waiting_since is None
    scene.now += 10
    state = scene.submit("a")
    assert requests.waiting_since == scene.now
    scene.now += 10
    scene.hear(StepOutputs([], SchedulerStats()))
    scene.hear(StepOutputs([]))
    assert requests.waiting_since == scene.now
    scene.now += 10
    requests.call(GetStats, lambda reply: None)
    scene.hear(Reply(scene.taken()[-1].call_id, stats=SchedulerStats()))
    assert requests.waiting_since == scene.now - 10, "a reply is no step"
    scene.output(state, 1, reason=FinishReason.LENGTH)
    assert requests.waiting_since is None


def test_the_end_of_all_engines_ends_all_requests(scene):
    state = scene.submit("a")
    scene.client.dead = EngineDeadError("no more")
    scene.requests.receive(0)
    assert isinstance(state.failure, EngineDeadError)
    with pytest.raises(EngineDeadError, match="no more"):
        scene.submit("b")


def test_requests_that_come_while_there_is_no_engine_are_bounded(monkeypatch):
    scene = Scene(monkeypatch, max_num_queued_reqs=3, max_num_queued_tokens=9)
    running = [scene.submit(f"running {index}", max_tokens=9) for index in range(3)]
    scene.hear(EngineCrashed("it was killed"))
    first = scene.submit("first", max_tokens=9)
    second = scene.submit("second", n=2, max_tokens=9)
    refused = scene.submit("third", max_tokens=9)
    assert isinstance(refused.failure, QueueFullError)
    assert "at most max_num_queued_reqs 3 sequences" in str(refused.failure)
    assert refused.failure.retry_after == START_TIME
    assert not any(state.failure for state in (*running, first, second))
    scene.requests.discard(second)
    third = scene.submit("third", max_tokens=9)
    assert third.failure is None, "the room of one that has left is free"
    scene.client.sent.clear()
    scene.hear(Ready(INFO))
    assert len(scene.client.sent) == 3, "the new ones, and the first suspect"
    assert scene.submit("fourth", max_tokens=9).failure is None, "the engine counts by itself"


def test_tokens_that_wait_for_an_engine_are_bounded_but_one_request_always_may(monkeypatch):
    scene = Scene(monkeypatch, max_num_queued_tokens=2)
    scene.hear(EngineCrashed("it was killed"))
    assert scene.submit("first", max_tokens=9).failure is None
    assert "at most max_num_queued_tokens 2 tokens" in str(scene.submit("second", max_tokens=9).failure)


def test_more_than_can_run_and_wait_is_refused_before_the_engine_sees_it(monkeypatch):
    scene = Scene(monkeypatch, max_num_seqs=2, max_num_queued_reqs=4)
    states = [scene.submit(f"{index}", n=2, max_tokens=9) for index in range(3)]
    sent = len(scene.client.sent)
    refused = scene.submit("more", max_tokens=9)
    assert "6 sequences are unfinished" in str(refused.failure)
    assert len(scene.client.sent) == sent
    scene.output(states[0], 5, reason=FinishReason.LENGTH)
    assert scene.submit("more", max_tokens=9).failure is None


def test_a_beam_search_waits_as_one_sequence(monkeypatch):
    scene = Scene(monkeypatch, max_num_seqs=2, max_num_queued_reqs=2)
    searches = [scene.submit(f"{index}", n=2, beam_width=2, max_tokens=9) for index in range(4)]
    assert not any(state.failure for state in searches)
    assert scene.submit("more", n=2, beam_width=2, max_tokens=9).failure is not None


def test_a_burst_of_outputs_is_processed_in_turns(monkeypatch):
    scene = Scene(monkeypatch, max_num_queued_reqs=1000)
    states = [scene.submit(f"{index}", n=8, max_tokens=9) for index in range(100)]
    names = [name for state in states for name in state.live_sequence_ids]
    outputs = [EngineCoreOutput(name, [5], finish_reason=FinishReason.LENGTH) for name in names]
    scene.client.said.append(StepOutputs(outputs, SchedulerStats()))
    num_left = [len(names)]
    while scene.requests.receive_some():
        num_left.append(scene.requests.outputs.num_sequences)
        assert 0 < num_left[-2] - num_left[-1] <= MAX_OUTPUTS
    assert scene.requests.outputs.num_sequences == 0
    assert all(state.finished for state in states)


def test_outputs_so_far_do_not_change_later(monkeypatch):
    scene = Scene(monkeypatch)
    state = scene.submit("a", max_tokens=9, logprobs=1)
    likely = [PositionLogprobs([5], [-1.0], [1])]
    snapshots = []
    for reason in (None, None, FinishReason.LENGTH):
        scene.output(state, 5, reason=reason, logprobs=likely)
        snapshots.append(state.snapshot().outputs[0])
    assert [one.token_ids for one in snapshots] == [[5], [5, 5], [5, 5, 5]]
    assert [len(one.logprobs) for one in snapshots] == [1, 2, 3]
    assert all(isinstance(entries, list) for entries in (snapshots[-1].token_ids, snapshots[-1].logprobs))
