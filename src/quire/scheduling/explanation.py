"""What a request does or waits for, in a sentence for people."""

from __future__ import annotations

from quire.request import Request
from quire.scheduling.interface import PauseState
from quire.scheduling.state import SchedulerState
from quire.status import RequestStatus


def explain(state: SchedulerState, request_id: str, pause_state: PauseState) -> str:
    """Return what the request does or waits for; see `SchedulerInterface.explain`."""
    slot = state.running.slot_of(request_id)
    if slot is not None:
        return _explain_running(state, slot, pause_state)
    request = state.waiting.get(request_id)
    if request is None:
        return "not known: it has ended, or was never accepted"
    if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        return "waiting: its grammar is being compiled"
    if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
        return _explain_loading(state, request_id)
    leader_id = state.waiting.leader_of(request_id)
    if leader_id is not None:
        return "waiting: the first of its siblings computes the prompt that they share"
    return f"waiting{_since(state, request)}: {_what_keeps(state, request, pause_state)}"


def _explain_running(state: SchedulerState, slot: int, pause_state: PauseState) -> str:
    running = state.running
    known, computed = int(running.num_tokens[slot]), int(running.num_computed[slot])
    prompt = int(running.num_prompt[slot])
    if pause_state is PauseState.PAUSED_ALL:
        return f"running, but the engine is paused: {computed} of {known} tokens computed"
    if computed < prompt:
        return f"running: {computed} of {prompt} prompt tokens computed"
    return f"running: {known - prompt} output tokens, of at most {int(running.token_limit[slot]) - prompt}"


def _explain_loading(state: SchedulerState, request_id: str) -> str:
    load = state.waiting.loads.get(request_id)
    assert load is not None, "a request with this status has a load"
    return (
        f"waiting: the KV of {load.num_tokens} tokens is on its way into {len(load.block_ids)} blocks; given "
        f"up in {load.deadline - state.context.clock():.1f} s"
    )


def _since(state: SchedulerState, request: Request) -> str:
    waited = state.context.clock() - request.arrival_time
    if request.status is RequestStatus.PREEMPTED:
        return f", preempted, {waited:.1f} s after it arrived"
    return f" for {waited:.1f} s"


def _what_keeps(state: SchedulerState, request: Request, pause_state: PauseState) -> str:
    if pause_state is not PauseState.UNPAUSED:
        return "the engine is paused and admits nothing"
    head = state.waiting.queue.head()
    if head is not None and head is not request:
        num_before = sum(state.order.key(other) < state.order.key(request) for other in state.waiting.queue)
        goes = "goes" if num_before == 1 else "go"
        return (
            f"as things stand, {_count(num_before, 'request')} {goes} first; the next {_needs(state, head)}"
        )
    return _needs(state, request)


def _count(number: int, noun: str) -> str:
    return f"a {noun}" if number == 1 else f"{number} {noun}s"


def _needs(state: SchedulerState, request: Request) -> str:
    """Say what the head of the queue lacks, in blocks and slots."""
    config, pool = state.config, state.pool
    num_slots = max(1, request.sampling_params.beam_width)
    if state.running.num_free < num_slots:
        num_free = state.running.num_free
        return f"needs {num_slots} of {config.max_num_seqs} slots (max_num_seqs), {num_free} free"
    needed = state.kv.blocks_for(request.num_tokens) - len(
        state.kv.find_prefix(request.request_id, request.all_token_array()).block_ids
    )
    held = [
        f"{summary.num_blocks} held by {_count(summary.num_leases, summary.kind)} for up to "
        f"{max(0.0, summary.last_deadline - state.context.clock()):.1f} s"
        for summary in state.leases.describe()
    ]
    loading = sum(len(load.block_ids) for load in state.waiting.loads)
    if loading:
        held.append(f"{loading} held by loads from elsewhere")
    kept = int(config.watermark * state.num_blocks)
    parts = [f"needs {needed} blocks", f"{pool.num_free} free", *held, f"{kept} kept free (watermark)"]
    return ", ".join(parts)
