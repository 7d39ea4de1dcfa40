"""A scheduler of about 150 lines, for tests of what is around a scheduler: it asks its context everything."""

from __future__ import annotations

import dataclasses

import numpy as np

from quire.errors import DuplicateRequestError, QueueFullError
from quire.scheduling.context import SchedulerContext
from quire.scheduling.interface import PauseState, SchedulerInterface
from quire.scheduling.outputs import EngineCoreOutput, EngineCoreOutputs, SchedulerStats
from quire.status import FinishReason, RequestStatus
from quire.step import (
    NO_TOKEN,
    CachedRequestData,
    ChosenTokens,
    NewRequestData,
    SchedulerOutput,
)

EMPTY = np.empty(0, dtype=np.int32)


@dataclasses.dataclass
class Running:
    request: object
    slot: int
    blocks: list[int]
    num_computed: int
    tokens: list[int]
    grammar: object | None
    started: float


class SmallScheduler(SchedulerInterface):
    """First come, first served; whole prompts, all blocks at once, one second to live after the start."""

    def __init__(self, config, *, num_blocks, max_model_len, context=None) -> None:
        self.context = context or SchedulerContext()
        self.config = config
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.free_blocks = list(range(num_blocks))
        self.free_slots = list(range(config.max_num_seqs))
        self.waiting, self.running, self.loading = [], {}, {}
        self.finished_ids, self.notices, self.drafts = [], [], {}
        self.state = PauseState.UNPAUSED
        self.steps = 0
        self.born = self.context.clock()

    def add_request(self, request):
        if self.has_request(request.request_id):
            raise DuplicateRequestError(f"{request.request_id} is in use")
        if len(self.waiting) >= self.config.max_num_queued_reqs:
            raise QueueFullError(f"full at {self.context.clock():.3f}")
        grammar = None
        if request.sampling_params.structured_outputs is not None and self.context.grammars:
            grammar = self.context.grammars.compile(request.sampling_params.structured_outputs).copy()
        self.waiting.append((request, grammar))

    def schedule(self, throttle_prefills=False):
        now = self.context.clock()
        self._end_late(now)
        new = []
        if self.state is PauseState.UNPAUSED and not throttle_prefills:
            while self.waiting and self.free_slots and self._admit(new, now):
                pass
        rows = (
            [] if self.state is PauseState.PAUSED_ALL else sorted(self.running.values(), key=lambda r: r.slot)
        )
        drafts = [self.drafts.pop(row.request.request_id, [])[: self._draft_length()] for row in rows]
        plan = SchedulerOutput(
            step=self.steps,
            request_ids=[row.request.request_id for row in rows],
            slots=ints(row.slot for row in rows),
            num_tokens=ints(
                len(r.tokens) + len(d) - r.num_computed for r, d in zip(rows, drafts, strict=True)
            ),
            num_computed_tokens=ints(row.num_computed for row in rows),
            num_known_tokens=ints(len(row.tokens) for row in rows),
            draft_token_ids=padded(drafts),
            finished_req_ids=self.finished_ids,
            preempted_req_ids=[],
            scheduled_new_reqs=new,
            scheduled_cached_reqs=CachedRequestData(EMPTY, EMPTY, EMPTY.reshape(1, 0), []),
            forks=[],
            chosen_tokens=ChosenTokens(EMPTY, EMPTY),
            block_copies=np.empty((0, 2, 1), dtype=np.int32),
        )
        self.finished_ids = []
        self.steps += 1
        if self.context.connector is None:
            return plan
        metadata = self.context.connector.build_connector_meta(plan)
        return dataclasses.replace(plan, kv_connector_metadata=metadata)

    def _draft_length(self):
        return self.context.draft_length(len(self.running))

    def _end_late(self, now):
        for row in list(self.running.values()):
            if now - row.started > 1.0:
                self.notices.append(self._end(row, RequestStatus.FINISHED_ERROR))
        if self.context.connector is not None:
            self.context.connector.leases_renewed()

    def _admit(self, new, now):
        request, grammar = self.waiting[0]
        wanted = -(-self._limit(request) // self.config.block_size)
        if wanted > len(self.free_blocks):
            if self.context.commit_blocks is None or not self.context.commit_blocks(wanted):
                return False
            first = self.num_blocks
            self.num_blocks += wanted
            self.free_blocks += range(first, self.num_blocks)
        blocks = [self.free_blocks.pop(0) for _ in range(wanted)]
        self.waiting.pop(0)
        slot = self.free_slots.pop(0)
        row = Running(request, slot, blocks, 0, list(request.prompt_token_ids), grammar, now)
        num_external, is_async = 0, False
        if self.context.connector is not None:
            num_external, is_async = self.context.connector.get_num_new_matched_tokens(request, 0)
            self.context.connector.update_state_after_alloc(request, blocks, num_external)
        row.num_computed = num_external
        if is_async:
            self.loading[request.request_id] = row
        else:
            self._start(row, new)
        return True

    def _start(self, row, new):
        request = row.request
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = row
        new.append(
            NewRequestData(
                request.request_id,
                row.slot,
                request.prompt_array,
                [],
                request.sampling_params,
                request.eos_token_ids,
                ints(row.blocks).reshape(1, -1),
                row.num_computed,
            )
        )

    def _limit(self, request):
        return min(self.max_model_len, request.num_prompt_tokens + request.sampling_params.max_tokens)

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs, self.notices = self.notices, []
        transfers = model_runner_output.kv_connector_output
        for request_id in sorted(transfers.finished_receiving) if transfers else []:
            row = self.loading.pop(request_id, None)
            if row is not None:  # starts over: this scheduler computes what has been loaded again
                self.free_blocks += row.blocks
                self.free_slots.append(row.slot)
                self.waiting.insert(0, (row.request, row.grammar))
        for index, request_id in enumerate(scheduler_output.request_ids):
            row = self.running.get(request_id)
            if row is None:
                continue
            sampled = [int(t) for t in model_runner_output.sampled_token_ids[index] if t != NO_TOKEN]
            if row.grammar is not None:
                row.grammar.accept(sampled)
            row.num_computed = len(row.tokens) + len(sampled) - 1
            row.tokens += sampled
            output = EngineCoreOutput(request_id, sampled)
            if len(row.tokens) >= self._limit(row.request):
                output = self._end(row, RequestStatus.FINISHED_LENGTH_CAPPED, sampled)
            outputs.append(output)
        return {0: EngineCoreOutputs(outputs)} if outputs else {}

    def _end(self, row, status, tokens=()):
        request = row.request
        request.status = status
        request.output_token_ids = row.tokens[request.num_prompt_tokens :]
        del self.running[request.request_id]
        self.free_blocks += row.blocks
        self.free_slots.append(row.slot)
        self.finished_ids.append(request.request_id)
        if self.context.connector is not None:
            self.context.connector.request_finished(request, row.blocks)
        return EngineCoreOutput(request.request_id, list(tokens), finish_reason=FinishReason.of(status))

    def finish_requests(self, request_ids, finished_status):
        if request_ids is None:
            request_ids = [*self.running, *self.loading, *(request.request_id for request, _ in self.waiting)]
        ended = []
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if request_id in self.loading:
                self.context.connector.cancel_load(request_id)
                self.running[request_id] = self.loading.pop(request_id)
            if request_id in self.running:
                ended.append(self.running[request_id].request)
                self._end(self.running[request_id], finished_status)
            for item in [item for item in self.waiting if item[0].request_id == request_id]:
                self.waiting.remove(item)
                ended.append(item[0])
        return ended

    def update_draft_token_ids(self, draft_token_ids):
        self.drafts.update(zip(draft_token_ids.request_ids, draft_token_ids.draft_token_ids, strict=True))

    def update_draft_token_ids_in_output(self, draft_token_ids, scheduler_output):
        for request_id in draft_token_ids.request_ids:
            row = scheduler_output.request_ids.index(request_id)
            scheduler_output.num_tokens[row] -= np.count_nonzero(scheduler_output.draft_token_ids[row] >= 0)
            scheduler_output.draft_token_ids[row] = NO_TOKEN

    def get_grammar_bitmask(self, scheduler_output):
        for request_id in scheduler_output.request_ids:
            grammar = self.running[request_id].grammar
            if grammar is not None:
                grammar.fill_bitmask(np.zeros(4, dtype=np.int32))

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        if reset_connector and self.context.connector is not None:
            return self.context.connector.reset()
        return not self.running

    def has_request(self, request_id):
        waits = any(request.request_id == request_id for request, _ in self.waiting)
        return waits or request_id in self.running or request_id in self.loading

    def get_num_unfinished_requests(self):
        return len(self.running) + len(self.waiting) + len(self.loading)

    def has_finished_requests(self):
        return bool(self.finished_ids)

    def get_request_counts(self):
        return len(self.running), len(self.waiting) + len(self.loading)

    @property
    def pause_state(self):
        return self.state

    def set_pause_state(self, pause_state):
        self.state = pause_state

    def get_kv_connector(self):
        return self.context.connector

    def explain(self, request_id):
        return f"asked at {self.context.clock()}"

    def get_kv_cache_usage(self):
        return 1 - len(self.free_blocks) / self.num_blocks

    def make_stats(self):
        return SchedulerStats(num_blocks=self.num_blocks, num_free_blocks=len(self.free_blocks))

    def shutdown(self):
        self.finish_requests(None, RequestStatus.FINISHED_ABORTED)


def ints(values):
    return np.array(list(values), dtype=np.int32)


def padded(rows):
    width = max(map(len, rows), default=0)
    padding = [[*row, *[NO_TOKEN] * (width - len(row))] for row in rows]
    return np.array(padding, dtype=np.int32).reshape(len(rows), width)
