"""What must hold of every plan and every output, whatever the policies and whatever happened before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mixed_requests import Expected
from mixed_world import MOST_DRAFTS_FROM_OUTSIDE

from quire.kv.blocks.groups import NULL_BLOCK
from quire.request import Request
from quire.scheduling import PauseState
from quire.scheduling.accounts.flow_shares import MIN_SHARE
from quire.status import FinishReason, RequestStatus
from quire.step import SchedulerOutput

if TYPE_CHECKING:
    from mixed_driver import MixedDriver

QUEUED = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def check_plan(driver: MixedDriver, plan: SchedulerOutput, throttles: bool) -> None:
    """Invariant 5, and that each row is a live request that may run in this step."""
    config, pause_state = driver.world.config, driver.scheduler.pause_state
    assert plan.total_num_scheduled_tokens <= config.max_num_batched_tokens
    assert len(plan.request_ids) <= config.max_num_seqs
    assert len(set(plan.request_ids)) == len(plan.request_ids)
    assert (plan.num_tokens > 0).all()
    for request_id in plan.request_ids:
        expected = driver.live[request_id.split("\0")[0]]
        assert expected.request.status is RequestStatus.RUNNING
    admitted = [one.request_id for one in (*plan.scheduled_new_reqs, *plan.scheduled_cached_reqs.resumed)]
    admitted = [name for name in admitted if "/" not in name]
    if throttles or pause_state is not PauseState.UNPAUSED:
        assert not admitted
    if pause_state is PauseState.PAUSED_ALL:
        assert not plan.request_ids
    if throttles:
        most_repeated = 2 * MOST_DRAFTS_FROM_OUTSIDE if driver.world.states else 0
        assert (plan.num_computed_tokens + 1 + most_repeated >= plan.num_known_tokens).all()
    if not config.dynamic_split_fuse and admitted:
        assert set(plan.request_ids) <= set(admitted), "prompts and decoding share a step"
    _check_nobody_overdue(driver)
    _check_who_waits(driver, plan)


def _check_who_waits(driver: MixedDriver, plan: SchedulerOutput) -> None:
    """Who waits for the tokens of a step is in no other, and all who wait do so in the same step."""
    for step in driver.in_flight:
        waiting = step.plan.slots[step.plan.awaits_tokens]
        assert not np.isin(plan.slots, waiting).any()
        if len(waiting):
            assert plan.num_drafts_wanted is None
            driver.counts["steps begun while some wait"] += bool(len(plan.slots))


def check_tables(driver: MixedDriver) -> None:
    """Each sequence has the blocks that the runner, which takes evicted ones out by itself, works with."""
    runner, state = driver.world.runner, driver.scheduler.accounts
    if driver.in_flight:
        return
    for request_id, expected in driver.live.items():
        slot = state.running.slot_of(request_id)
        if slot is not None and not expected.is_beam_search:
            table, *others = state.kv.table(slot).tolist()
            assert table == runner.tables[slot]
            for held, known in zip(others, runner.window_tables[slot], strict=True):
                num_left = held.count(NULL_BLOCK)
                assert held[:num_left] == [NULL_BLOCK] * num_left
                assert held[num_left:] == known[num_left:]
            driver.counts["blocks left behind a window"] += sum(held.count(NULL_BLOCK) for held in others)


def _check_nobody_overdue(driver: MixedDriver) -> None:
    for request_id, expected in driver.live.items():
        if driver.scheduler.has_request(request_id):
            assert not is_overdue(driver, expected), f"{request_id} has run out of time and goes on"


def is_overdue(driver: MixedDriver, expected: Expected) -> bool:
    config, now = driver.world.config, driver.world.now
    total = expected.deadline("timeout", config.request_timeout)
    queue = expected.deadline("queue_timeout", config.queue_timeout)
    return (total is not None and total <= now) or (
        queue is not None and queue <= now and not expected.has_run
    )


def check_queue_order(driver: MixedDriver, plan: SchedulerOutput) -> None:
    """Invariant 7: of the requests that stand in the queue, nobody is overtaken, but for large flows."""
    admitted = [one.request_id for one in (*plan.scheduled_new_reqs, *plan.scheduled_cached_reqs.resumed)]
    last = [driver.live[name].request for name in admitted if name in driver.live][-1:]
    if not last or driver.world.config.policy == "longest-prefix" or driver.world.may_misorder:
        return
    if driver.world.config.policy == "fair" and driver.live[last[0].request_id].has_run:
        return  # what was preempted goes before what its tenant has waiting
    for request_id, expected in driver.live.items():
        if stands_in_queue(driver, request_id) and not _gives_way(driver, expected.request):
            assert not _goes_before(driver, expected.request, last[0]), (
                f"{last[0]} overtook {expected.request}"
            )


def _gives_way(driver: MixedDriver, request: Request) -> bool:
    """Whether a request is behind others of its flow, or its flow may have had its share of the step."""
    state = driver.scheduler.accounts
    if state.waiting.queue.is_in_line(request.request_id):
        return True
    num_live = sum(
        max(1, other.request.sampling_params.beam_width)
        for name, other in driver.live.items()
        if other.request.flow == request.flow and driver.scheduler.has_request(name)
    )
    return num_live > max(1, driver.world.config.max_num_batched_tokens // MIN_SHARE)


def _goes_before(driver: MixedDriver, one: Request, other: Request) -> bool:
    config = driver.world.config
    match config.policy:
        case "priority" if config.priority_ageing:
            keys = [r.queued_time + config.priority_ageing * r.priority for r in (one, other)]
            return (keys[0], one.arrival) < (keys[1], other.arrival)
        case "priority":
            return (one.priority, one.arrival) < (other.priority, other.arrival)
        case "fair" if one.tenant != other.tenant:
            return False
    return one.arrival < other.arrival


def stands_in_queue(driver: MixedDriver, request_id: str) -> bool:
    """Whether nothing but its turn keeps a request from running."""
    expected = driver.live[request_id]
    request = expected.request
    if not driver.scheduler.has_request(request_id) or request.status not in QUEUED:
        return False
    connector = driver.world.connector
    if connector is not None and request_id in connector.put_off:
        return False
    if driver.scheduler.accounts.loads.is_loading(request.awaited_load):
        return False
    leader = driver.live.get(request.shares_prompt_with or "")
    return leader is None or (leader.has_run and any(leader.got.values()))


def check_progress(driver: MixedDriver, plan: SchedulerOutput, throttles: bool, num_ended: int) -> None:
    """Invariant 3: if anything could run, something does.

    What may keep everybody waiting: a pause, a step in flight, blocks in a transfer, or that no request is
    ready to run.
    """
    scheduler = driver.scheduler
    if throttles or scheduler.pause_state is not PauseState.UNPAUSED or driver.in_flight:
        return
    if plan.total_num_scheduled_tokens or num_ended or has_transfers(driver):
        return
    if driver.world.windows and plan.preempted_req_ids:  # it kept blocks to lend them, and starts again
        return
    ready = [
        request_id
        for request_id, expected in driver.live.items()
        if expected.request.status is RequestStatus.RUNNING or stands_in_queue(driver, request_id)
    ]
    assert not ready, f"a silent wait: {scheduler.explain(ready[0])}"


def has_transfers(driver: MixedDriver) -> bool:
    """Whether blocks are held that come back by themselves, or by the clock."""
    return driver.scheduler.accounts.holdings.num_blocks_in_transfer > 0


def check_output(driver: MixedDriver, expected: Expected, output) -> None:
    """Invariant 6, and that an end has the reason that it should have."""
    name, reason = output.request_id, output.finish_reason
    got = expected.got[name]
    got += output.new_token_ids
    wanted = expected.outputs[name]
    assert got == wanted[: len(got)], f"{name}: {got} is not the start of {wanted}"
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        assert got == wanted, f"{name}: {got}, expected {wanted}"
        assert reason is expected.reasons[name]
        assert output.error is None
    elif reason is not None:
        assert reason is FinishReason.ERROR
        assert output.error
        cause = _cause_of(driver, expected, output.error)
        assert cause, f"{name}: {output.error}"
        driver.counts[f"errors: {cause}"] += 1


def _cause_of(driver: MixedDriver, expected: Expected, error: str) -> str:
    """Return why this request may end with this error; empty: it may not."""
    world = driver.world
    causes = {
        "broken": ("runner", expected.may_break),
        "had not": ("timeout", is_overdue(driver, expected)),
        "compiled within": ("compilation never ended", bool(expected.grammar_kind)),
        "the grammar is not one": ("bad grammar", expected.grammar_kind == "bad"),
        "fell over": ("compiler crashed", expected.grammar_kind == "crashes"),
        "grammar": ("grammar cannot be followed", expected.grammar_kind == "dies"),
        "KV of this request": ("failed load", world.config.kv_load_failure == "fail"),
        "KV blocks that there is memory for": ("memory refused", world.grows),
    }
    for text, (cause, may_be) in causes.items():
        if text in error:
            return cause if may_be else ""
    return ""
