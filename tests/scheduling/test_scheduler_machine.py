"""Random histories of the scheduler: all features at once, and the deterministic part against an oracle."""

from __future__ import annotations

import pytest
from eviction_rules import rules_of
from fake_runner import FakeRunner, naive_generation
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from mixed_actions import NEED_LIVE, drain
from mixed_driver import MixedDriver
from mixed_world import RandomChooser, draw_eviction
from oracle import Oracle, Sequence

from quire.config import SchedulerConfig
from quire.errors import InvalidRequestError, QueueFullError
from quire.request import Request, RequestStatus, SamplingParams
from quire.scheduling import PauseState, Scheduler
from quire.scheduling.context import SchedulerContext
from unmutated import UNMUTATED

MAX_MODEL_LEN = 48
STOP_ID = 3
PIECES = [[1] * 4, [2] * 4, [1, 2, 3, 4, 5, 6, 7, 8], list(range(16)), [9]]
MACHINE_SETTINGS = settings(
    backend=UNMUTATED,  # each example has a configuration of its own
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


# One number for all choices within an event: hypothesis varies and shrinks the sequence of events, and its
# preference for small values does not keep the states shallow.
SEEDS = st.integers(0, 2**32 - 1)


class MixedMachine(RuleBasedStateMachine):
    """See `mixed_driver`; `make soak` runs the same for longer."""

    @initialize(seed=SEEDS, num_requests=st.integers(2, 6))
    def build(self, seed, num_requests):
        choose = RandomChooser(seed)
        self.driver = MixedDriver(choose)
        for _ in range(num_requests):
            self.driver.add(choose)

    def do(self, name, seed):
        driver, choose = self.driver, RandomChooser(seed)
        if driver.live or name not in NEED_LIVE:
            getattr(driver, name)(choose)
        if driver.in_flight and choose.chance(50):
            driver.update()

    @rule(seed=SEEDS, what=st.sampled_from(["add", "add", "add_burst", "add_siblings"]))
    def add(self, what, seed):
        self.do(what, seed)

    @rule(seed=SEEDS, what=st.sampled_from(["run_steps", "plan_step"]))
    def step(self, what, seed):
        self.do(what, seed)

    @rule(seed=SEEDS, what=st.sampled_from(["run_steps", "compile", "propose", "replace_drafts", "look"]))
    def go_on(self, what, seed):
        self.do(what, seed)

    @rule(
        seed=SEEDS,
        what=st.sampled_from(
            [
                "let_connector_misbehave",
                "let_policy_misbehave",
                "let_surroundings_misbehave",
                "change_memory",
                "pause",
                "reset",
            ]
        ),
    )
    def disturb(self, what, seed):
        self.do(what, seed)

    @rule(
        seed=SEEDS,
        what=st.sampled_from(["abort", "abort", "pass_time", "break_in_runner", "run_steps"]),
    )
    def end(self, what, seed):
        self.do(what, seed)

    @invariant()
    def invariants_hold(self):
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self):
        if hasattr(self, "driver"):
            drain(self.driver)
            for what, count in self.driver.counts.items():
                if count:
                    event(what)


class OracleMachine(RuleBasedStateMachine):
    """Every plan is the oracle's: who is scheduled for how many tokens, admitted, resumed and preempted."""

    @initialize(seed=SEEDS)
    def build(self, seed):
        choose = RandomChooser(seed)
        self.config = self._draw_config(choose)
        block_size = self.config.block_size
        self.num_blocks = max(choose.integer(16, 160) // block_size, 2)
        self.now = 0.0
        context = SchedulerContext(clock=lambda: self.now)
        self.scheduler = Scheduler(
            self.config, num_blocks=self.num_blocks, max_model_len=MAX_MODEL_LEN, context=context
        )
        self.runner = FakeRunner(self.num_blocks, block_size, rules=rules_of(self.config))
        self.oracle = Oracle(self.config, self.num_blocks)
        self.sequences: dict[str, Sequence] = {}
        self.count = 0

    def _draw_config(self, choose):
        block_size = choose.among([1, 2, 4, 16])
        max_num_batched_tokens = choose.among([16, 64, 3, 7])
        return SchedulerConfig(
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            dynamic_split_fuse=max_num_batched_tokens < 16 or choose.chance(50),
            max_num_seqs=choose.integer(1, 6),
            max_num_queued_reqs=10,
            policy=choose.among(["fcfs", "priority"]),
            priority_ageing=choose.among([0.0, 5.0]),
            enable_prefix_caching=choose.chance(50),
            reserve_full_prompt=choose.chance(50),
            watermark=choose.among([0.0, 0.1, 0.5]),
            long_prefill_token_threshold=choose.among([0, 2, 5]),
            use_cache_eviction=choose.chance(50),
            cache_eviction_config=draw_eviction(choose, block_size),
        ).validate()

    @rule(seed=SEEDS, count=st.integers(1, 3), is_burst=st.booleans())
    def add(self, seed, count, is_burst):
        choose = RandomChooser(seed)
        self.now += choose.among([0.0, 1.0, 4.0])
        prompt = self._draw_prompt(choose)
        for _ in range(count):
            self._add(choose, prompt if is_burst else self._draw_prompt(choose))

    def _draw_prompt(self, choose):
        return [token for _ in range(choose.integer(1, 4)) for token in choose.among(PIECES)]

    def _add(self, choose, prompt):
        self.count += 1
        max_tokens = choose.integer(1, 30)
        priority = choose.integer(0, 2) if self.config.policy == "priority" else 0
        stop_ids = {STOP_ID} if choose.chance(50) else set()
        salt = choose.among(["", "", "other"])
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop_ids))
        request = Request(f"r{self.count}", prompt, params, priority=priority, cache_salt=salt)
        try:
            self.scheduler.add_request(request)
        except (InvalidRequestError, QueueFullError):
            return
        most = min(max_tokens, MAX_MODEL_LEN - len(prompt))
        output = naive_generation(prompt, most, stop_ids, rules=self.runner.rules)
        key = (self._priority_key(request), self.count)
        sequence = Sequence(request.request_id, prompt, output, salt, key)
        self.sequences[request.request_id] = sequence
        self.oracle.add(sequence)

    def _priority_key(self, request):
        if self.config.policy == "fcfs":
            return 0
        if not self.config.priority_ageing:
            return request.priority
        return request.arrival_time + request.priority * self.config.priority_ageing

    @rule(count=st.integers(1, 15), throttles=st.sampled_from([False] * 4 + [True]))
    def run_steps(self, count, throttles):
        for _ in range(count):
            self.step(throttles)
            throttles = False

    def step(self, throttles):
        oracle, scheduler = self.oracle, self.scheduler
        oracle.schedule(throttles=throttles, pause=scheduler.pause_state.name)
        plan = scheduler.schedule(throttles)
        assert list(plan.num_scheduled_tokens.items()) == [(s.name, count) for s, count in oracle.plan]
        if plan.evictions is not None:
            pairs = zip(plan.evictions.num_evicted_tokens, plan.evictions.num_blocks, strict=True)
            assert [(int(tokens), int(blocks)) for tokens, blocks in pairs] == oracle.evictions
        assert plan.preempted_req_ids == oracle.preempted
        new = {one.request_id for one in plan.scheduled_new_reqs}
        assert new == {sequence.name for sequence in oracle.admitted if not sequence.has_run}
        resumed = {one.request_id for one in plan.scheduled_cached_reqs.resumed}
        assert resumed == {sequence.name for sequence in oracle.admitted if sequence.has_run}
        self._note(plan)
        scheduler.update_from_output(plan, self.runner.execute(plan))
        for sequence in oracle.admitted:
            sequence.has_run = True
        oracle.preempted = []
        oracle.land()
        scheduler.check_invariants()
        assert scheduler.make_stats().num_free_blocks == oracle.blocks.free()
        assert {name for name in self.sequences if scheduler.has_request(name)} == self._names_in_oracle()
        self.sequences = {name: self.sequences[name] for name in self._names_in_oracle()}

    def _note(self, plan):
        for what, happened in {
            "preemption": plan.preempted_req_ids,
            "resumption": plan.scheduled_cached_reqs.resumed,
            "a prefix hit": any(new.num_computed_tokens for new in plan.scheduled_new_reqs),
            "a chunk": (~plan.samples).any(),
            "an eviction": plan.evictions is not None and plan.evictions.num_blocks.any(),
            "a mixed step": plan.samples.any() and (plan.num_tokens > 1).any(),
        }.items():
            if happened:
                event(what)

    def _names_in_oracle(self):
        return {sequence.name for sequence in (*self.oracle.running, *self.oracle.waiting)}

    @rule(seed=SEEDS, what=st.sampled_from(["abort", "pause", "reset"]))
    def disturb(self, what, seed):
        getattr(self, f"_{what}")(RandomChooser(seed))

    def _abort(self, choose):
        if not self.sequences:
            return
        name = choose.among(sorted(self.sequences))
        assert self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.oracle.end(self.sequences.pop(name))

    def _pause(self, choose):
        self.scheduler.set_pause_state(choose.among([PauseState.UNPAUSED] * 3 + list(PauseState)))

    def _reset(self, choose):
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.oracle.reset()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        for _ in range(5000):
            if not self.sequences:
                break
            self.step(throttles=False)
        assert not self.sequences


# In parts that run beside each other.
@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("part", range(12))
def test_all_features_at_once(part):
    run_state_machine_as_test(MixedMachine, settings=settings(MACHINE_SETTINGS, max_examples=6))


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("part", range(8))
def test_the_deterministic_part_against_an_oracle(part):
    run_state_machine_as_test(OracleMachine, settings=settings(MACHINE_SETTINGS, max_examples=8))
