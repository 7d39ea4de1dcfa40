"""Random histories of the scheduler against a model that generates each request by itself."""

from __future__ import annotations

import pytest
from fake_runner import FakeRunner, naive_generation
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.config import SchedulerConfig
from quire.errors import DuplicateRequestError, InvalidRequestError, QueueFullError
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduling import PauseState, Scheduler
from quire.status import FinishReason, RequestStatus

MAX_MODEL_LEN = 48
STOP_ID = 3
# Prompts are made of few pieces, so that they share prefixes and repeat blocks in other contexts.
PIECES = [[1] * 4, [2] * 4, [1, 2, 3, 4, 5, 6, 7, 8], list(range(16)), [9]]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4, 16]),
        num_tokens_of_kv=st.integers(8, 160),
        budget=st.sampled_from([1, 3, 7, 64]),
        max_num_seqs=st.integers(1, 6),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        reserve=st.booleans(),
        watermark=st.sampled_from([0.0, 0.1, 0.9]),
        threshold=st.sampled_from([0, 2]),
    )
    def build(
        self,
        block_size,
        num_tokens_of_kv,
        budget,
        max_num_seqs,
        policy,
        caching,
        reserve,
        watermark,
        threshold,
    ):
        self.config = SchedulerConfig(
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            policy=policy,
            enable_prefix_caching=caching,
            reserve_full_prompt=reserve,
            watermark=watermark,
            long_prefill_token_threshold=threshold,
            max_num_queued_reqs=8,
            max_num_queued_tokens=200,
        ).validate()
        self.num_blocks = max(num_tokens_of_kv // block_size, 1)
        self.scheduler = Scheduler(self.config, num_blocks=self.num_blocks, max_model_len=MAX_MODEL_LEN)
        self.runner = FakeRunner(self.num_blocks, block_size)
        self.expected: dict[str, list[int]] = {}
        self.order: dict[str, tuple[int, int]] = {}
        self.never_ran: set[str] = set()
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.in_flight = None
        self.count = 0

    @rule(
        pieces=st.lists(st.sampled_from(PIECES), max_size=6),
        max_tokens=st.integers(1, 40),
        priority=st.integers(0, 2),
        stops=st.booleans(),
        salt=st.sampled_from(["", "tenant"]),
    )
    def add(self, pieces, max_tokens, priority, stops, salt):
        prompt = [token for piece in pieces for token in piece]
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_ID,) if stops else ())
        priority = priority if self.config.policy == "priority" else 0
        request_id = f"r{self.count}"
        self.count += 1
        request = Request(request_id, prompt, params, priority=priority, cache_salt=salt)
        waiting = self.scheduler.get_request_counts()[1]
        limit = min(len(prompt) + max_tokens, MAX_MODEL_LEN)
        fits = 0 < len(prompt) < MAX_MODEL_LEN and limit <= self.num_blocks * self.config.block_size
        try:
            self.scheduler.add_request(request)
        except QueueFullError as error:
            assert waiting
            assert error.retry_after > 0
        except InvalidRequestError:
            assert not fits
        else:
            assert fits
            self.expected[request_id] = naive_generation(
                prompt, limit - len(prompt), {STOP_ID} if stops else set()
            )
            self.outputs[request_id] = []
            self.never_ran.add(request_id)
            self.order[request_id] = (priority, self.count)
            with pytest.raises(DuplicateRequestError):
                self.scheduler.add_request(Request(request_id, [1], params))

    @precondition(lambda self: self.in_flight is None)
    @rule(throttle=st.booleans())
    def schedule(self, throttle):
        plan = self.scheduler.schedule(throttle_prefills=throttle)
        assert plan.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert len(plan.request_ids) <= self.config.max_num_seqs
        assert set(plan.num_scheduled_tokens) == set(plan.request_ids)
        if self.expected_progress(throttle):
            assert plan.total_num_scheduled_tokens > 0, "a silent wait"
        for new in plan.scheduled_new_reqs:
            self.never_ran.discard(new.request_id)
            overtaken = [r for r in self.never_ran if self.order[r] < self.order[new.request_id]]
            assert not overtaken, f"{new.request_id} overtook {overtaken}"
        self.in_flight = plan, self.runner.execute(plan)

    def expected_progress(self, throttle):
        unpaused = self.scheduler.pause_state is PauseState.UNPAUSED
        return unpaused and not throttle and self.scheduler.has_unfinished_requests()

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def update(self):
        plan, computed = self.in_flight
        self.in_flight = None
        for client, outputs in self.scheduler.update_from_output(plan, computed).items():
            assert client == 0
            for output in outputs.outputs:
                assert output.request_id not in self.ended, "two terminal outputs"
                self.outputs[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.end(output.request_id, output.finish_reason)

    @precondition(lambda self: self.in_flight is None)
    @rule(count=st.integers(1, 12))
    def run_steps(self, count):
        for _ in range(count):
            self.schedule(throttle=False)
            self.scheduler.check_invariants()
            self.update()
            self.scheduler.check_invariants()

    def end(self, request_id, reason):
        self.ended[request_id] = reason
        self.never_ran.discard(request_id)
        self.runner.fail.discard(request_id)
        expected = self.expected.pop(request_id)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert self.outputs[request_id] == expected
            assert (reason is FinishReason.STOP) == (expected[-1] == STOP_ID and reason is FinishReason.STOP)
        else:
            assert self.outputs[request_id] == expected[: len(self.outputs[request_id])]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.expected)))
        finished = self.scheduler.finish_requests([request_id, "unknown"], RequestStatus.FINISHED_ABORTED)
        assert [request.request_id for request in finished] == [request_id]
        assert not self.scheduler.has_request(request_id)
        self.end(request_id, FinishReason.of(finished[0].status))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def break_in_runner(self, data):
        self.runner.fail.add(data.draw(st.sampled_from(sorted(self.expected))))

    @rule(state=st.sampled_from(PauseState))
    def pause(self, state):
        self.scheduler.set_pause_state(state)

    @rule(preempt=st.booleans())
    def reset(self, preempt):
        in_use = self.scheduler.get_kv_cache_usage() > 0
        assert self.scheduler.reset_prefix_cache(reset_running_requests=preempt) == (preempt or not in_use)

    @invariant()
    def invariants_hold(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()
            assert self.scheduler.get_num_unfinished_requests() == len(self.expected)

    def teardown(self):
        """Whatever happened before, everything accepted ends, and nothing is held afterwards."""
        if not hasattr(self, "scheduler"):
            return
        if self.in_flight:
            self.update()
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self.runner.fail.clear()
        for _ in range(5000):
            if not self.scheduler.has_requests():
                break
            self.schedule(throttle=False)
            self.update()
        assert not self.expected
        assert self.scheduler.get_kv_cache_usage() == 0
        assert self.scheduler.reset_prefix_cache()
        assert self.scheduler.make_stats().num_free_blocks == self.num_blocks
        assert not self.runner.tables
        self.scheduler.check_invariants()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
