"""Drives a scheduler through everything that can happen to it, and checks after each event what must hold.

The hypothesis machine and the soak share it: they differ in where the choices come from.
"""

from __future__ import annotations

from collections import Counter, deque

from fake_runner import VOCAB
from mixed_checks import check_output, check_plan, check_progress, check_queue_order, check_tables
from mixed_requests import Expected, draw_burst, draw_request, draw_siblings, expected_of
from mixed_world import MAX_MODEL_LEN, MOST_DRAFTS_FROM_OUTSIDE, Chooser, World

from quire.errors import DuplicateRequestError, InvalidRequestError, QueueFullError
from quire.request import Request
from quire.scheduling import PauseState
from quire.status import RequestStatus
from quire.step import NO_TOKEN, DraftTokenIds, SchedulerOutput

IN_TRANSIT = (RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.PREEMPTED)  # rare, and worth an abort


class Step:
    """A plan in flight; `computed` once the runner has executed it."""

    def __init__(self, plan: SchedulerOutput) -> None:
        self.plan = plan
        self.computed = None


class MixedDriver:
    def __init__(self, choose: Chooser, config=None) -> None:
        self.world = World(choose, config)
        self.scheduler = self.world.scheduler
        self.live: dict[str, Expected] = {}
        self.owner: dict[str, str] = {}  # request id by sequence id
        self.in_flight: deque[Step] = deque()
        self.ended_ids: list[str] = []
        self.num_added = 0
        self.counts: Counter[str] = Counter()
        self._reported: dict[str, int] = {}

    # -- arrivals and ends ---------------------------------------------------------------------------------

    def add(self, choose: Chooser) -> None:
        self._add(draw_request(choose, self.world, self._new_id(choose)))

    def add_siblings(self, choose: Chooser) -> None:
        for request in draw_siblings(choose, self.world, [self._new_id(choose) for _ in range(3)]):
            self._add(request)

    def add_burst(self, choose: Chooser) -> None:
        """Add requests with a common prefix, at once; now and then the first of them fails."""
        requests = draw_burst(choose, self.world, [self._new_id(choose) for _ in range(choose.integer(2, 4))])
        for request in requests:
            self._add(request)
        if choose.chance(20) and requests[0].request_id in self.live:
            self._break(requests[0].request_id, requests[0].request_id)

    def _new_id(self, choose: Chooser) -> str:
        self.num_added += 1
        if self.ended_ids and choose.chance(10):
            recent = choose.among(self.ended_ids[-3:])
            if recent not in self.live:
                self.counts["ids used again"] += 1
                return recent
        return f"r{self.num_added}"

    def _add(self, request: Request) -> None:
        if request.request_id in self.live:
            return
        num_waiting = self.scheduler.get_request_counts()[1]
        try:
            self.scheduler.add_request(request)
        except QueueFullError as error:
            assert num_waiting
            assert error.retry_after > 0
            self.counts["refused: queue full"] += 1
        except DuplicateRequestError:
            assert self.scheduler.accounts.holdings.has_lease(request.request_id), (
                "an id that is not in use is refused"
            )
            self.counts["refused: a peer still reads"] += 1
        except InvalidRequestError:
            assert not self._must_fit(request), f"{request} is refused"
            self.counts["refused: never fits"] += 1
        else:
            is_beam_search = request.sampling_params.beam_width > 0
            assert is_beam_search or self._must_fit(request), f"{request} is accepted"
            self._accept(request)

    def _must_fit(self, request: Request) -> bool:
        """Whether the request must be accepted; beam search, whose beams share, may fit without that."""
        config, params = self.world.config, request.sampling_params
        num_prompt = request.num_prompt_tokens
        if not 0 < num_prompt < MAX_MODEL_LEN:
            return False
        if config.use_cache_eviction and params.beam_width:
            return False
        if not config.dynamic_split_fuse and num_prompt > config.max_num_batched_tokens:
            return False
        num_held = min(num_prompt + params.max_tokens, MAX_MODEL_LEN) - 1
        if self.world.runner.rules is not None:
            num_held = self.world.runner.rules.max_held(num_prompt, num_held)
        num_blocks = -(-num_held // config.block_size)
        width = max(params.beam_width, 1)
        return num_blocks * width <= self.world.num_blocks and width <= config.max_num_seqs

    def _accept(self, request: Request) -> None:
        with_same_id = Request(request.request_id, [1], request.sampling_params)
        try:
            self.scheduler.add_request(with_same_id)
        except DuplicateRequestError:
            pass
        else:
            raise AssertionError("a duplicate id is accepted")
        expected = expected_of(request, self.world)
        self.live[request.request_id] = expected
        self.owner.update(dict.fromkeys(expected.outputs, request.request_id))
        self.counts["requests"] += 1
        self.counts["beam searches"] += expected.is_beam_search
        self.counts["structured requests"] += bool(expected.grammar_kind)
        self.counts["continued requests"] += bool(request.output_token_ids)

    def abort(self, choose: Chooser) -> None:
        names = sorted(self.live)
        in_transit = [name for name in names if self.live[name].request.status in IN_TRANSIT]
        request_id = choose.among(in_transit if in_transit and choose.chance(40) else names)
        expected = self.live[request_id]
        was_there = self.scheduler.has_request(request_id)  # else it has ended, and that is still to be told
        status = expected.request.status
        finished = self.scheduler.finish_requests([request_id, "unknown"], RequestStatus.FINISHED_ABORTED)
        assert [request.request_id for request in finished] == [request_id] * was_there
        assert not self.scheduler.has_request(request_id)
        if was_there:
            self.counts[f"aborts: {status.name}"] += 1
            self._forget(request_id)

    def abort_all(self, choose: Chooser) -> None:
        there = {request_id for request_id in self.live if self.scheduler.has_request(request_id)}
        finished = self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        assert {request.request_id for request in finished} == there
        for request_id in sorted(there):
            self._forget(request_id)
        self.counts["aborts of all"] += 1

    def break_in_runner(self, choose: Chooser) -> None:
        request_id = choose.among(sorted(self.live))
        expected = self.live[request_id]
        names = [request_id]
        if expected.is_beam_search:
            names.append(f"{request_id}\0beam-{choose.integer(1, 2)}")
        self._break(request_id, choose.among(names))

    def _break(self, request_id: str, name: str) -> None:
        """Let the runner fail a request, or a beam of it, when it computes it next."""
        self.world.runner.fail.add(name)
        self.live[request_id].may_break = True
        self.counts["runner errors armed"] += 1

    def _forget(self, request_id: str) -> None:
        """Let go of a request that has ended."""
        expected = self.live.pop(request_id)
        self.counts["finished"] += 1
        for name in expected.outputs:
            self.owner.pop(name, None)
        self.world.runner.fail -= {request_id, f"{request_id}\0beam-1", f"{request_id}\0beam-2"}
        self.ended_ids = [*self.ended_ids[-5:], request_id]

    # -- steps ---------------------------------------------------------------------------------------------

    @property
    def most_in_flight(self) -> int:
        return 1 + self.world.config.overlap_steps

    def plan_step(self, choose: Chooser) -> None:
        """Plan a step; if as many as may be are in flight, they are lost."""
        self.schedule(throttles=choose.chance(10))
        if choose.chance(10):
            self.replace_drafts(choose)
        if choose.chance(50):
            self.execute()

    def schedule(self, *, throttles: bool = False) -> None:
        if len(self.in_flight) >= self.most_in_flight:
            self.counts["steps lost"] += len(self.in_flight)
            self.counts["steps lost after execution"] += sum(
                step.computed is not None for step in self.in_flight
            )
            self.in_flight.clear()
        if self.world.connector is not None:
            self.world.connector.put_off.clear()
        num_finished = self.scheduler.make_stats().num_finished
        plan = self.scheduler.schedule(throttle_prefills=throttles)
        self.counts["steps"] += 1
        num_ended = self.scheduler.make_stats().num_finished - num_finished
        check_plan(self, plan, throttles)
        check_queue_order(self, plan)
        check_progress(self, plan, throttles, num_ended)
        self._note_runs(plan)
        self.in_flight.append(Step(plan))
        self._count(plan)

    def _note_runs(self, plan: SchedulerOutput) -> None:
        for request_id in plan.request_ids:
            name = request_id.split("\0")[0]
            self.live[name].has_run = True

    def execute(self) -> None:
        """Run the oldest step that has not been; with a grammar only if all before it have been applied."""
        step = next((step for step in self.in_flight if step.computed is None), None)
        if step is None:
            return
        if step is self.in_flight[0]:
            grammar = self.scheduler.get_grammar_bitmask(step.plan)
        elif any(self.live[name].grammar_kind for name in step.plan.request_ids if name in self.live):
            return
        else:
            grammar = None
        step.computed = self.world.runner.execute(step.plan, grammar)

    def update(self) -> None:
        """Apply the oldest step."""
        while self.in_flight[0].computed is None:
            self.execute()
        step = self.in_flight.popleft()
        for client, message in self.scheduler.update_from_output(step.plan, step.computed).items():
            for output in message.outputs:
                self._take(client, output)
        for request_id in self.live:
            assert self.scheduler.has_request(request_id), f"{request_id} ended without a word"
        self._count_landed()

    def _take(self, client: int, output) -> None:
        assert output.request_id in self.owner, f"{output.request_id} has ended, or never was"
        request_id = self.owner[output.request_id]
        expected = self.live[request_id]
        assert client == expected.request.client_index
        check_output(self, expected, output)
        if output.finish_reason is not None:
            self.counts[f"ended: {output.finish_reason}"] += 1
            del self.owner[output.request_id]
            if not any(name in self.owner for name in expected.outputs):
                assert not self.scheduler.has_request(request_id)
                self._forget(request_id)

    def run_steps(self, choose: Chooser) -> None:
        """Run some steps as an engine does: with overlap, the next is planned before one is applied."""
        for _ in range(choose.integer(1, 12)):
            if len(self.in_flight) < self.most_in_flight:
                self.plan_step(choose)
            if len(self.in_flight) == self.most_in_flight:
                self.update()
            self.check()

    # -- what happens around it ----------------------------------------------------------------------------

    def pause(self, choose: Chooser) -> None:
        state = choose.among([PauseState.UNPAUSED] * 3 + list(PauseState))
        self.scheduler.set_pause_state(state)
        assert self.scheduler.pause_state is state
        self.counts[f"pause states: {state.name}"] += 1

    def reset(self, choose: Chooser) -> None:
        preempts, of_connector = choose.chance(60), choose.chance(30)
        is_promised = self.scheduler.accounts.holdings.num_blocks_held_for_peers > 0
        is_done = self.scheduler.reset_prefix_cache(preempts, of_connector)
        assert not (is_done and is_promised)
        assert is_done or is_promised or not preempts
        if is_done:
            assert not self.world.events.digests
            self.counts["prefix cache resets"] += 1
            self.counts["prefix cache resets, requests running"] += preempts

    def pass_time(self, choose: Chooser) -> None:
        self.world.now += choose.among([0.1, 1.0, 1.0, 5.0, 25.0])

    def compile(self, choose: Chooser) -> None:
        self.counts["grammars compiled"] += self.world.compiler.finish(choose.integer(1, 3))

    def let_connector_misbehave(self, choose: Chooser) -> None:
        connector = self.world.connector
        if connector is None:
            return
        what = choose.among(["raise", "put off", "know", *connector.FAULTS])
        match what:
            case "raise":
                connector.num_failures = choose.integer(1, 4)
            case "put off" | "know":
                connector.is_reluctant = what == "put off"
            case _:
                connector.misbehave(what, choose)
        self.counts[f"connector: {what}"] += 1

    def let_policy_misbehave(self, choose: Chooser) -> None:
        if self.world.policies:
            self.counts[f"policy: {self.world.spoil_a_policy(choose)}"] += 1

    def let_surroundings_misbehave(self, choose: Chooser) -> None:
        self.counts[f"surroundings: {self.world.spoil_a_call(choose)}"] += 1

    def change_memory(self, choose: Chooser) -> None:
        """More memory for the cache, or all that was left is gone."""
        world = self.world
        left = world.num_blocks - self.scheduler.accounts.kv.pools.first.num_committed
        world.num_blocks_of_memory = choose.integer(0, max(left, 0)) if world.grows else 0
        self.counts["changes of memory"] += world.grows

    def propose(self, choose: Chooser) -> None:
        """Drafts from outside: right, wrong, too long, for requests that do not run or that are unknown."""
        names = [*sorted(self.live), "unknown"]
        ids = list(dict.fromkeys(choose.among(names) for _ in range(choose.integer(1, 3))))
        pauses = [choose.integer(0, 5) for _ in ids] if choose.chance(50) else None
        drafts = [self._draw_drafts(choose, name) for name in ids]
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts, pauses))
        self.counts["drafts proposed from outside"] += len(ids)

    def replace_drafts(self, choose: Chooser) -> None:
        if not self.in_flight or self.in_flight[-1].computed is not None:
            return
        plan = self.in_flight[-1].plan
        ids = [name for name in plan.request_ids if choose.chance(60)]
        drafts = DraftTokenIds(ids, [self._draw_drafts(choose, name) for name in ids])
        self.scheduler.update_draft_token_ids_in_output(drafts, plan)
        self.counts["drafts replaced in a plan"] += bool(plan.num_drafts.any())

    def _draw_drafts(self, choose: Chooser, request_id: str) -> list[int]:
        expected = self.live.get(request_id)
        ahead: list[int] = []
        if expected is not None and not expected.is_beam_search:
            ahead = expected.outputs[request_id][len(expected.got[request_id]) :]
        drafts = ahead[: choose.integer(0, MOST_DRAFTS_FROM_OUTSIDE)]
        if choose.chance(20):
            drafts.insert(choose.integer(0, len(drafts)), NO_TOKEN)
        return [
            choose.integer(0, VOCAB - 1) if token != NO_TOKEN and choose.chance(30) else token
            for token in drafts
        ]

    def look(self, choose: Chooser) -> None:
        """Ask what an operator asks."""
        for request_id in (choose.among([*sorted(self.live), "unknown"]), "unknown"):
            assert self.scheduler.explain(request_id)
        assert 0 <= self.scheduler.get_kv_cache_usage() <= 1

    # -- checks and counts ---------------------------------------------------------------------------------

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.check_invariants()
        self.counts["invariant checks"] += 1
        num_there = sum(map(scheduler.has_request, self.live))
        assert scheduler.get_num_unfinished_requests() == num_there
        assert scheduler.accounts.kv.pools.first.num_cached == len(self.world.events.digests)
        assert not self.world.events.wrong
        check_tables(self)

    def _count(self, plan: SchedulerOutput) -> None:
        self.counts["tokens"] += plan.total_num_scheduled_tokens
        self.counts["chunks of prompts"] += int((~plan.samples).sum())
        self.counts["steps with drafts"] += bool(plan.num_drafts.any())
        self.counts["blocks evicted"] += 0 if plan.evictions is None else int(plan.evictions.num_blocks.sum())
        self.counts["forks of beams"] += len(plan.forks)
        self.counts["blocks copied"] += len(plan.block_copies)
        self.counts["prefixes shared within a step"] += len(
            self.scheduler.accounts.sharing.followers_of(plan.step)
        )

    def _count_landed(self) -> None:
        """Add up the scheduler's own counters."""
        stats = self.scheduler.make_stats()
        for name in (
            "num_preemptions",
            "prefix_hit_tokens",
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_timeouts",
            "num_loaded_tokens",
            "num_failed_loads",
            "num_replaced_policies",
        ):
            value = getattr(stats, name)
            self.counts[name] += value - self._reported.get(name, 0)
            self._reported[name] = value
