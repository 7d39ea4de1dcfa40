"""A scheduler with a fake runner, a clock that passes when told to, and what came out for each request."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque

import numpy as np
from eviction_rules import rules_of
from fake_runner import VOCAB, FakeRunner, naive_generation

from quire.config import SchedulerConfig
from quire.errors import InvalidRequestError
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduling import Scheduler
from quire.scheduling.context import SchedulerContext
from quire.status import FinishReason
from quire.step import NO_TOKEN, DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from quire.structured_outputs import StructuredOutputsParams

BLOCK_SIZE = 4
EOS = 99  # beyond the fake vocabulary: nothing ends by itself


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Scene:
    """Every plan is checked by the fake runner, every state by the scheduler's own invariants."""

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        max_model_len: int = 64,
        connector=None,
        grammars=None,
        draft_length=None,
        draft_accuracy: float = 0.7,
        commit_blocks=None,
        kv_events=None,
        clock=None,
        windows=(),
        **config,
    ) -> None:
        pins = {"max_pinned_share": 1.0, "max_pinned_share_per_tenant": 1.0}
        config = SchedulerConfig(**{"block_size": BLOCK_SIZE, "watermark": 0.0, **pins, **config}).validate()
        self.config = config = config.with_step_tokens()
        self.clock = Clock()
        context = {"clock": clock or self.clock, "connector": connector, "grammars": grammars}
        context |= {"commit_blocks": commit_blocks, "kv_events": kv_events, "windows": windows}
        if draft_length is not None:
            context["draft_length"] = draft_length
        self.connector = connector
        self.scheduler = Scheduler(
            config, num_blocks=num_blocks, max_model_len=max_model_len, context=SchedulerContext(**context)
        )
        self.num_blocks = num_blocks
        self.runner = FakeRunner(
            num_blocks, config.block_size, connector, rules=rules_of(config), windows=windows
        )
        self.runner.draft_accuracy = draft_accuracy
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.errors: dict[str, str | None] = {}
        self.ends: dict[str, object] = {}  # the terminal outputs
        self.cached: dict[str, int] = {}
        self.clients: dict[str, int] = {}

    def add(self, request_id: str, prompt, *, max_tokens: int = 4, salt: str = "", **fields) -> Request:
        """Add a request; what is no parameter of `Request` is one of `SamplingParams`."""
        own = {name: fields.pop(name) for name in list(fields) if name in _REQUEST_FIELDS}
        params = SamplingParams(max_tokens=max_tokens, **fields)
        request = Request(request_id, list(prompt), params, cache_salt=salt, eos_token_ids=(EOS,), **own)
        self.scheduler.add_request(request)
        self.requests[request_id] = request
        for name in own.get("beam_sequence_ids", (request_id,)):
            self.outputs[name] = []
            self.ends.pop(name, None)
        return request

    def plan(self) -> SchedulerOutput:
        plan = self.scheduler.schedule()
        assert plan.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert len(plan.request_ids) <= self.config.max_num_seqs
        self.scheduler.check_invariants()
        return plan

    def compute(self, plan: SchedulerOutput):
        """Run a plan as the runner does; its outcome may be applied later."""
        return self.runner.execute(plan, self.scheduler.get_grammar_bitmask(plan))

    def apply(self, plan: SchedulerOutput, computed=None) -> None:
        computed = self.compute(plan) if computed is None else computed
        for client, message in self.scheduler.update_from_output(plan, computed).items():
            for output in message.outputs:
                name = output.request_id
                assert name not in self.ends, f"{name} had its terminal output already"
                self.outputs[name] += output.new_token_ids
                self.clients[name] = client
                self.cached[name] = output.num_cached_tokens
                if output.finish_reason is not None:
                    self.ends[name] = output
                    self.reasons[name] = output.finish_reason
                    self.errors[name] = output.error
        self.scheduler.check_invariants()

    def step(self) -> dict[str, int]:
        plan = self.plan()
        self.apply(plan)
        return dict(plan.num_scheduled_tokens)

    def finish(self, max_steps: int = 500) -> None:
        """Step until nothing is left to do; then nothing may be held."""
        self.finish_but_pins(max_steps)
        self.check_nothing_is_held()

    def finish_but_pins(self, max_steps: int = 500) -> None:
        """Step until nothing is left to do; pinned blocks stay."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                break
            self.step()
        assert not self.scheduler.has_requests(), "it does not end"

    def finish_overlapped(self, max_steps: int = 500, *, late_drafts: bool = False) -> None:
        """The same with the next step planned before the last one is applied; drafts may come later."""
        in_flight: deque = deque()
        apply = self.apply_but_drafts if late_drafts else self.apply
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                break
            plan = self.plan()
            waits = plan.pending_structured_output_tokens
            computed = None if waits else self.compute(plan)
            if in_flight:
                apply(*in_flight.popleft())
            in_flight.append((plan, self.compute(plan) if waits else computed))
        while in_flight:
            apply(*in_flight.popleft())
        self.finish(max_steps=2)

    def apply_but_drafts(self, plan: SchedulerOutput, computed: ModelRunnerOutput) -> None:
        """Apply a step, and tell what is proposed after it when that is done."""
        without = dataclasses.replace(computed, draft_token_ids=None, num_steps_without_drafts=None)
        self.apply(plan, without)
        if computed.draft_token_ids is not None:
            drafts = [row[row != NO_TOKEN].tolist() for row in computed.draft_token_ids]
            pauses = computed.num_steps_without_drafts.tolist()
            self.scheduler.update_draft_token_ids(DraftTokenIds(plan.request_ids, drafts, pauses))
            self.scheduler.check_invariants()

    def check_nothing_is_held(self) -> None:
        assert self.scheduler.get_kv_cache_usage() == 0
        assert self.scheduler.make_stats().num_leased_blocks == 0
        assert self.runner.tables == {}
        assert self.runner.tokens == {}

    def naive(self, request_id: str, grammar=None) -> list[int]:
        """What a request generates alone, by its own history."""
        request = self.requests[request_id]
        stops = set(request.sampling_params.stop_token_ids)
        max_tokens = request.sampling_params.max_tokens
        return naive_generation(request.prompt_token_ids, max_tokens, stops, grammar, self.runner.rules)

    def check_naive(self, *request_ids: str) -> None:
        """Check the outputs of these requests, or of all, against naive generation."""
        for request_id in request_ids or self.requests:
            assert self.outputs[request_id] == self.naive(request_id), request_id


def drafts_wanted(plan: SchedulerOutput) -> dict[str, int]:
    """Return how many drafts a plan asks for after each of its requests."""
    wanted = plan.num_drafts_wanted
    counts = [0] * len(plan.request_ids) if wanted is None else wanted.tolist()
    return dict(zip(plan.request_ids, counts, strict=True))


_REQUEST_FIELDS = (
    "priority", "client_index", "tenant", "flow", "tenant_weight", "timeout", "queue_timeout", "pin_prefix",
    "shares_prompt_with", "kv_transfer_params", "beam_sequence_ids", "pooling_params",
)  # fmt: skip

MODULUS = 5


def allowed_by_class(output: list[int]) -> set[int]:
    """The tokens that `ClassGrammar` allows after an output: one residue class after the other."""
    return set(range(len(output) % MODULUS, VOCAB, MODULUS))


class ClassGrammar:
    """Token number i must be i modulo 5."""

    def __init__(self) -> None:
        self.num_accepted = 0

    def accept(self, token_ids) -> bool:
        if self.num_valid(token_ids) < len(token_ids):
            return False
        self.num_accepted += len(token_ids)
        return True

    num_bytes = 100

    def rollback(self, num_tokens: int) -> None:
        self.num_accepted -= num_tokens

    def num_valid(self, token_ids) -> int:
        for place, token in enumerate(token_ids):
            if token % MODULUS != (self.num_accepted + place) % MODULUS:
                return place
        return len(token_ids)

    def fill_bitmask(self, row) -> None:
        bits = np.zeros(len(row) * 32, dtype=np.uint8)
        bits[sorted(allowed_by_class([0] * self.num_accepted))] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def copy(self) -> ClassGrammar:
        other = ClassGrammar()
        other.num_accepted = self.num_accepted
        return other


class GatedGrammars:
    """Compiles nothing before its gate is open; "bad" is no grammar."""

    vocab_size = VOCAB

    def __init__(self, *, is_open: bool = True) -> None:
        self.gate = threading.Event()
        if is_open:
            self.gate.set()

    def compile(self, spec: StructuredOutputsParams) -> ClassGrammar:
        assert self.gate.wait(60)
        if spec.regex == "bad":
            raise InvalidRequestError("the pattern is bad")
        return ClassGrammar()


CLASSES = StructuredOutputsParams(regex="classes")
BAD = StructuredOutputsParams(regex="bad")
