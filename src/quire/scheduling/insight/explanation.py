"""What a request does or waits for, in a sentence."""

from __future__ import annotations

import dataclasses

from quire.request import Request
from quire.scheduling.accounts.accounts import Accounts
from quire.scheduling.interface import PauseState
from quire.status import RequestStatus


@dataclasses.dataclass(eq=False)
class Explanation:
    """Says what requests do or wait for."""

    accounts: Accounts

    def explain(self, request_id: str, pause_state: PauseState) -> str:
        """Return what the request does or waits for; see `SchedulerInterface.explain`."""
        accounts = self.accounts
        slot = accounts.running.slot_of(request_id)
        if slot is not None:
            return self._explain_running(slot, pause_state)
        request = accounts.waiting.get(request_id)
        if request is None:
            return "not known: it has ended, or was never accepted"
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return "waiting: its grammar is being compiled"
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return self._explain_loading(request_id)
        leader_id = accounts.waiting.leader_of(request_id)
        if leader_id is not None:
            return "waiting: the first of its siblings computes the prompt that they share"
        return f"waiting{self._since(request)}: {self._waiting_for(request, pause_state)}"

    def _explain_running(self, slot: int, pause_state: PauseState) -> str:
        running = self.accounts.running
        known, computed = int(running.num_tokens[slot]), int(running.num_computed[slot])
        prompt = int(running.num_prompt[slot])
        if pause_state is PauseState.PAUSED_ALL:
            return f"running, but the engine is paused: {computed} of {known} tokens computed"
        if computed < prompt:
            return f"running: {computed} of {prompt} prompt tokens computed"
        limit = int(running.token_limit[slot]) - prompt
        return f"running: {known - prompt} output tokens, of at most {limit}{self._evicted(slot)}"

    def _evicted(self, slot: int) -> str:
        """Return what of a request's KV is evicted, as the end of a sentence."""
        running = self.accounts.running
        evicted, computed = int(running.num_evicted[slot]), int(running.num_computed[slot])
        if self.accounts.eviction is None or not evicted:
            return ""
        return f"; the cache keeps {computed - evicted} of its {computed} tokens, the others were evicted"

    def _explain_loading(self, request_id: str) -> str:
        load = self.accounts.loads.get(request_id)
        assert load is not None, "a request with this status has a load"
        return (
            f"waiting: the KV of {load.num_tokens} tokens is on its way into {load.num_blocks} blocks; "
            f"given up in {load.deadline - self.accounts.clock.read():.1f} s"
        )

    def _since(self, request: Request) -> str:
        waited = self.accounts.clock.read() - request.arrival_time
        if request.status is RequestStatus.PREEMPTED:
            return f", preempted, {waited:.1f} s after it arrived"
        return f" for {waited:.1f} s"

    def _waiting_for(self, request: Request, pause_state: PauseState) -> str:
        accounts = self.accounts
        if pause_state is not PauseState.UNPAUSED:
            return "the engine is paused and admits nothing"
        if request.request_id in accounts.suspects:
            return "a step that computed it has failed; its requests are tried again in turns"
        if accounts.loads.is_loading(request.awaited_load):
            return "KV of its first tokens is on its way for another request"
        if accounts.waiting.queue.is_in_line(request.request_id):
            return "it takes its place in the queue when those before it of the same flow have left that"
        head = accounts.waiting.queue.head()
        if head is not None and head is not request:
            num_before = accounts.waiting.queue.num_before(request)
            goes = "goes" if num_before == 1 else "go"
            return f"at present, {_count(num_before, 'request')} {goes} first; the next {self._needs(head)}"
        return self._needs(request)

    def _needs(self, request: Request) -> str:
        """Say what the head of the queue lacks, in blocks and slots."""
        accounts = self.accounts
        config, pools = accounts.config, accounts.kv.pools
        num_slots = max(1, request.sampling_params.beam_width)
        if accounts.running.num_free < num_slots:
            num_free = accounts.running.num_free
            return f"needs {num_slots} of {config.max_num_seqs} slots (max_num_seqs), {num_free} free"
        prefix = accounts.kv.find_prefix(request.request_id, request.all_token_array())
        needed = accounts.kv.blocks_for(request.num_tokens) - prefix.num_full
        held = [
            f"{summary.num_blocks} held by {_count(summary.num_leases, summary.kind)} for up to "
            f"{max(0.0, summary.last_deadline - accounts.clock.read()):.1f} s"
            for summary in accounts.holdings.describe_leases()
        ]
        loading = sum(load.num_blocks for load in accounts.loads)
        if loading:
            held.append(f"{loading} held by loads from elsewhere")
        kept = int(config.watermark * pools.first.num_blocks)
        parts = [f"needs {needed} blocks", f"{pools.num_free} free", *held, f"{kept} kept free (watermark)"]
        return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"a {noun}" if number == 1 else f"{number} {noun}s"
