"""Random runs of a scheduler under a recorder, with everything it can be asked and told."""

from __future__ import annotations

import contextlib
import random

import numpy as np

from memory_connector import MemoryConnector
from quire.errors import InvalidRequestError, QuireError
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduling.context import SchedulerContext
from quire.scheduling.interface import PauseState, StepWithdrawnError
from quire.status import RequestStatus
from quire.step import NO_TOKEN, DraftTokenIds, KVConnectorOutput, ModelRunnerOutput, PositionLogprobs
from quire.structured_outputs import StructuredOutputsParams


class Clock:
    """Never the same twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self.rng.random() / 50
        return self.now


class RandomGrammar:
    """Answers by chance; refuses to go on now and then."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def accept(self, token_ids) -> bool:
        if self.rng.random() < 0.05:
            raise InvalidRequestError("too deep")
        return self.rng.random() < 0.9

    num_bytes = 100

    def rollback(self, num_tokens: int) -> None: ...

    def num_valid(self, token_ids) -> int:
        return self.rng.randint(0, len(token_ids))

    def fill_bitmask(self, row) -> None:
        row[:] = self.rng.randint(0, 9)

    def copy(self):
        return RandomGrammar(self.rng)


class RandomGrammars:
    vocab_size = 128

    def __init__(self, rng: random.Random, share_of_failures: float) -> None:
        self.rng = rng
        self.share_of_failures = share_of_failures

    def compile(self, spec):
        if self.rng.random() < self.share_of_failures:
            raise InvalidRequestError("no grammar")
        return RandomGrammar(self.rng)


class ArrayBlocks:
    """A KV cache of one number per block."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = np.zeros((num_blocks, 8), dtype=np.uint8)
        self.bytes_per_block = 8

    def read_block(self, block_id: int, into) -> None:
        into[:] = self.blocks[block_id]

    def write_block(self, block_id: int, content) -> None:
        self.blocks[block_id] = content


class UnreliableConnector(MemoryConnector):
    """Fails now and then, and says so before it has done anything."""

    def __init__(self, rng: random.Random, share_of_failures: float, block_size: int, **options) -> None:
        super().__init__(block_size, **options)
        self.rng = rng
        self.share_of_failures = share_of_failures

    def _fail_now_and_then(self) -> None:
        if self.share_of_failures and self.rng.random() < self.share_of_failures:
            raise ConnectionError("no answer")

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self._fail_now_and_then()
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self._fail_now_and_then()
        super().update_state_after_alloc(request, block_ids, num_external_tokens)

    def request_finished(self, request, block_ids):
        self._fail_now_and_then()
        return super().request_finished(request, block_ids)

    def build_connector_meta(self, scheduler_output):
        self._fail_now_and_then()
        return super().build_connector_meta(scheduler_output)


def random_context(
    rng: random.Random,
    block_size: int,
    *,
    grammars: bool = True,
    has_connector: bool = True,
    share_of_failures: float = 0.0,
) -> SchedulerContext:
    """Surroundings that answer by chance, with this share of grammars, and of answers, that are none."""
    connector = None
    if has_connector:
        connector = UnreliableConnector(
            rng,
            share_of_failures / 4,
            block_size,
            load_steps=rng.choice([0, 2]),
            send_steps=rng.choice([None, 2]),
        )
        connector.register_kv_caches(ArrayBlocks(500))
    return SchedulerContext(
        clock=Clock(rng),
        grammars=RandomGrammars(rng, share_of_failures) if grammars else None,
        connector=connector,
        draft_length=lambda num_running: rng.randint(0, 2),
    )


def random_request(rng: random.Random, name: str, *, grammars: bool) -> Request:
    prompt = [rng.randint(0, 3) for _ in range(rng.randint(1, 30))]
    prompt = list(range(16)) + prompt if rng.random() < 0.5 else prompt
    has_grammar = grammars and rng.random() < 0.3
    params = SamplingParams(
        max_tokens=rng.randint(1, 12),
        temperature=0.0,
        logit_bias={3: 1.0},
        structured_outputs=StructuredOutputsParams(regex="a" * rng.randint(1, 99)) if has_grammar else None,
    )
    return Request(
        name,
        prompt,
        params,
        eos_token_ids=(49,),
        cache_salt=rng.choice(["", "salt"]),
        kv_transfer_params={"peer": 7},
    )


def run(scheduler, rng: random.Random, num_steps: int, *, grammars: bool = True) -> int:
    """Drive a scheduler by chance, what it refuses is passed over; return the steps that could be planned."""
    added: list[str] = []
    num_planned = 0
    for _ in range(num_steps):
        for _ in range(rng.choice([0, 0, 1, 2])):
            request = random_request(rng, f"request-{len(added)}", grammars=grammars)
            added.append(request.request_id)
            with contextlib.suppress(QuireError):
                scheduler.add_request(request)
        interfere(scheduler, rng, added)
        scheduler.explain(added[-1] if added else "nobody")
        try:
            plan = scheduler.schedule(throttle_prefills=rng.random() < 0.1)
        except StepWithdrawnError:
            continue
        num_planned += 1
        with contextlib.suppress(InvalidRequestError):
            scheduler.get_grammar_bitmask(plan)
        if rng.random() < 0.1 and plan.num_drafts.any():
            row = int(np.flatnonzero(plan.num_drafts)[0])
            scheduler.update_draft_token_ids_in_output(DraftTokenIds([plan.request_ids[row]], [[]]), plan)
        with contextlib.suppress(InvalidRequestError):
            scheduler.update_from_output(plan, computed(scheduler, plan, rng))
        if plan.request_ids and rng.random() < 0.5:
            scheduler.update_draft_token_ids(DraftTokenIds([plan.request_ids[0]], [[1, 2]]))
    scheduler.set_pause_state(PauseState.UNPAUSED)
    scheduler.shutdown()
    return num_planned


def interfere(scheduler, rng: random.Random, added: list[str]) -> None:
    chance = rng.random()
    if chance < 0.1 and added:
        scheduler.finish_requests(iter([rng.choice(added), "unknown"]), RequestStatus.FINISHED_ABORTED)
    elif chance < 0.13:
        scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5, reset_connector=True)
    elif chance < 0.2:
        scheduler.set_pause_state(rng.choice(list(PauseState)))
    elif chance < 0.3:
        scheduler.set_pause_state(PauseState.UNPAUSED)


def computed(scheduler, plan, rng: random.Random) -> ModelRunnerOutput:
    width = plan.draft_token_ids.shape[1] + 1
    sampled = np.full((len(plan.request_ids), width), NO_TOKEN, dtype=np.int32)
    counts = np.where(plan.samples, [rng.randint(1, int(n) + 1) for n in plan.num_drafts], 0)
    for row, count in enumerate(counts.tolist()):
        sampled[row, :count] = [rng.randint(0, 48) for _ in range(count)]
    first = plan.request_ids[:1]
    return ModelRunnerOutput(
        plan.request_ids,
        sampled,
        logprobs={name: [PositionLogprobs([1], [-0.5], [1])] for name in first},
        prompt_logprobs={name: [PositionLogprobs([1], [-0.5], [1])] * 3 for name in first},
        num_steps_without_drafts=np.full(len(plan.request_ids), 2, np.int32) if plan.step % 3 == 0 else None,
        kv_connector_output=transferred(scheduler, plan),
    )


def transferred(scheduler, plan) -> KVConnectorOutput | None:
    connector = scheduler.get_kv_connector()
    if connector is None:
        return None
    connector.start_load_kv(plan.kv_connector_metadata)
    connector.wait_for_save(frozenset())
    sent, received = connector.get_finished(plan.finished_req_ids)
    return KVConnectorOutput(sent, received, connector.get_block_ids_with_load_errors())
