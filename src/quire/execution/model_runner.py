"""Running one step: prefill chunks, decodes and drafts as one ragged batch, and the tokens that follow."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from quire.config import CacheEvictionConfig, SparseAttentionConfig
from quire.execution.connector_worker import KVTransfers
from quire.execution.device_step import DeviceStep, report_tokens
from quire.execution.drafts.proposer import GuardedProposer, Proposer
from quire.execution.eviction.cache_evictor import CacheEvictor
from quire.execution.failed_requests import KnownErrors, StepErrors
from quire.execution.model import Model
from quire.execution.persistent_batch import InconsistentPlanError, PersistentBatch, RunnerRequest
from quire.execution.pooling import Pooler
from quire.execution.sampling.constraints import RowMasks
from quire.execution.sampling.positions import SamplingPositions
from quire.execution.sampling.prompt_logprobs import NO_PROMPT_LOGPROBS, PromptLogprobs, StepPromptLogprobs
from quire.execution.sampling.sampler import Sampler
from quire.execution.sparse_prefill import SparsePrefill
from quire.execution.step_graphs import StepGraphs, StepLogits
from quire.kernels.attention.batch import AttentionBatch, StepStates
from quire.kernels.attention.sparse_prefill import KeySelection, SkippedKeys
from quire.kernels.devices.device import array_to_device
from quire.kernels.interface import Capture
from quire.kv.cache.paged_cache import PagedAttentionCache, views_of_layers
from quire.kv.cache.state_cache import StateCache
from quire.kv.connectors.interface import KVConnector
from quire.step import (
    NO_TOKEN,
    BoolArray,
    DraftTokenIds,
    GrammarSource,
    GraphStats,
    Int64Array,
    IntArray,
    KVConnectorOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    StepInFlight,
)

_PLACEHOLDER = 0
_MAX_RECORDED_TOKENS = 64
"""Of a single text that is pooled: a longer one takes longer to compute than to ask for its operations."""


class ModelRunner:
    """Executes the steps that the scheduler plans.

    Sampled tokens are appended at once; the scheduler ends a request by naming it in `finished_req_ids`.

    Args:
        model: the decoder.
        kv_caches: where keys and values of each cache group live; may hold garbage.
        max_num_seqs: number of slots.
        max_model_len: maximum number of tokens of a request, prompt and output.
        block_size: tokens per KV block.
        proposer: makes the drafts that the scheduler asks for; None: no speculation.
        connector: moves KV in and out of the caches; more than one only with `KVConnector.by_group`.
        sparse_attention: which keys the tokens of prompts leave out; None: none.
        eviction: which KV blocks sequences evict; None: they keep all. Not beside a connector, a proposer, or
            more than one cache.
        states: of recurrent layers, by slot, and checkpoints; None: there are no such layers.
        capture: captures what the device is asked for, for decode steps and for others of up to
            `max_captured_tokens`; None: nothing is captured, nor is it beside eviction and a connector that
            works layer by layer. Steps that leave out keys are not captured. Of models that pool, steps with
            one short text are, on the host.

    Attributes:
        max_captured_tokens: maximum size of a captured step with chunks of prompts; see `profile_run`.
        states: as given.
    """

    def __init__(
        self,
        model: Model,
        kv_caches: Sequence[PagedAttentionCache],
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        proposer: Proposer | None = None,
        connector: KVConnector | None = None,
        eviction: CacheEvictionConfig | None = None,
        sparse_attention: SparseAttentionConfig | None = None,
        states: StateCache | None = None,
        capture: Capture | None = None,
    ) -> None:
        self._model = model
        self._kv_caches = tuple(kv_caches)
        needs_one = eviction is not None or (connector is not None and not connector.by_group)
        if len(kv_caches) > 1 and needs_one:
            raise ValueError(
                f"there are {len(kv_caches)} cache groups; eviction, and connectors that are not by_group, "
                "need all layers in one"
            )
        self._kv = views_of_layers(kv_caches)
        self.states = states
        self._block_size = block_size
        self._vocab_size = model.config.vocab_size
        self._proposer = None if proposer is None else GuardedProposer(proposer, self._vocab_size)
        self._transfers = None if connector is None else KVTransfers(connector, kv_caches, block_size, states)
        self._layer_hook = None if self._transfers is None else self._transfers.layer_hook
        pooling = model.config.pooling
        is_plain = eviction is None and self._layer_hook is None
        if not is_plain or (pooling is not None and not model.kernels.sampling.is_synchronous):
            capture = None
        self._sampler = Sampler(
            max_num_seqs,
            self._vocab_size,
            max_model_len,
            model.kernels,
            capture=None if model.kernels.sampling.is_synchronous else capture,
        )
        self._batch = PersistentBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=[cache.num_blocks for cache in kv_caches],
        )
        self._pooler: Pooler | None = None  # of a model without logits
        if pooling is not None:
            self._pooler = Pooler(
                self._batch,
                max_num_seqs=max_num_seqs,
                hidden_size=model.config.hidden_size,
                kernels=model.kernels,
                row_layers=model.row_layers,
                activation=model.config.label_activation,
            )
        self._prompt_logprobs = PromptLogprobs(self._batch, model, max_num_seqs)
        self._connector_needs_tokens = connector is not None and not connector.saves_before_tokens
        self._in_flight: list[DeviceStep] = []  # whose tokens the batch lacks
        self._newest: SchedulerOutput | None = None  # of the steps with rows
        self.max_captured_tokens = 0
        self._graphs: StepGraphs | None = None
        if capture is not None:
            self._graphs = StepGraphs(
                model.whole_step, self._kv, capture, self._sampler.input_ids, model.kernels
            )
        self._sparse = None if sparse_attention is None else SparsePrefill(sparse_attention, block_size)
        self._evictor = None
        if eviction is not None:
            self._evictor = CacheEvictor(eviction, model.config, kv_caches[0], self._batch, block_size)

    def compile_only(self) -> AbstractContextManager[None] | None:
        """See `KernelSet.compile_only`; of all ranks."""
        return self._model.compile_only()

    @property
    def kv_caches(self) -> tuple[PagedAttentionCache, ...]:
        """Where keys and values of each cache group live."""
        return self._kv_caches

    @property
    def is_pooled(self) -> bool:
        """Whether prompts become rows, and nothing is sampled."""
        return self._pooler is not None

    @property
    def captures(self) -> bool:
        """Whether steps are captured that a device computes."""
        return self._graphs is not None and not self._sampler.is_synchronous

    @property
    def graph_stats(self) -> GraphStats | None:
        """How steps were computed so far; None: nothing is captured. Any thread may ask."""
        return dataclasses.replace(self._graphs.stats) if self._graphs is not None and self.captures else None

    @property
    def max_array_bytes(self) -> int:
        """See `StepGraphs.max_array_bytes`; 0 if nothing is captured."""
        of_proposer = 0 if self._proposer is None else self._proposer.max_array_bytes
        return of_proposer + (0 if self._graphs is None else self._graphs.max_array_bytes)

    @property
    def num_requests(self) -> int:
        """Requests that hold memory here, running or preempted."""
        return len(self._batch)

    @torch.inference_mode()
    def execute(
        self, output: SchedulerOutput, grammar: GrammarSource | None = None
    ) -> ModelRunnerOutput | StepInFlight:
        """Run one step and return its tokens, or have the device choose them, which the next step may use.

        The device does where it can, unless a row is the host's to choose, or a connector needs the tokens:
        see `KVConnector.saves_before_tokens`.

        Args:
            output: the plan.
            grammar: returns the tokens that requests with a grammar may sample; called behind everything
                that does not depend on them, and may wait until they are known.

        Raises:
            InconsistentPlanError: the plan contradicts what the runner knows.
        """
        if self._in_flight:
            self._note_tokens()
        self._apply_changes(output)
        if self._transfers is not None:
            self._transfers.begin(output)
        width = 1 + output.draft_token_ids.shape[1]
        sampled_token_ids = np.full((len(output.slots), width), NO_TOKEN, dtype=np.int32)
        result = ModelRunnerOutput(output.request_ids, sampled_token_ids)
        if len(output.slots):
            self._newest = output
            self._batch.check(output)
            if self._pooler is not None:
                hidden = self._forward(output)
                self._batch.note_computed(output)
                self._pooler.pool(output, hidden, result)
                reported = self._end_transfers(output, KnownErrors(result.errors))
                return (
                    result if reported is None else dataclasses.replace(result, kv_connector_output=reported)
                )
            if output.draft_token_ids.size:
                self._batch.write_drafts(output)
            if self._proposer is not None:
                self._proposer.begin_step(output.total_num_scheduled_tokens, is_alone=not self._in_flight)
            sampling = SamplingPositions.of(output)
            replays = self._graphs is not None and self._can_replay(output, sampling)
            num_largest = self._num_largest(output, sampling)
            compute = self._replay if replays else self._compute
            computed = compute(output, sampling, num_largest)
            in_flight = self._sample(output, sampling, grammar, computed, result)
            if in_flight is not None:
                reported = self._end_transfers(output, in_flight)
                return dataclasses.replace(in_flight, kv_connector_output=reported)
            if computed.prompt_logprobs is not NO_PROMPT_LOGPROBS:
                computed.prompt_logprobs.report(result)
        if self._proposer is None and self._transfers is None:
            return result
        drafts = num_steps_without = None
        if self._asks_for_drafts(output):
            drafts, num_steps_without = self._propose(output, _has_tokens(sampled_token_ids))
        return dataclasses.replace(
            result,
            draft_token_ids=drafts,
            num_steps_without_drafts=num_steps_without,
            kv_connector_output=self._end_transfers(output, KnownErrors(result.errors)),
        )

    def only_launches(self, output: SchedulerOutput) -> bool:
        """See `quire.engine.stepping.Runner`: steps of requests that each decode one token."""
        return (
            self.captures
            and self._proposer is None
            and self._transfers is None
            and output.total_num_scheduled_tokens == len(output.slots)
            and not output.scheduled_new_reqs
            and not output.scheduled_cached_reqs.resumed
        )

    def _end_transfers(self, output: SchedulerOutput, errors: StepErrors) -> KVConnectorOutput | None:
        if self._transfers is None:
            return None
        return self._transfers.end(output, errors, lambda: self._batch.block_tables(output.slots)[0])

    def _apply_changes(self, output: SchedulerOutput) -> None:
        """Apply the changes in the order of the plan's fields: slots are freed before they are reused."""
        for request_id in output.finished_req_ids:
            slot = self._batch.finish(request_id)
            if slot is not None and self._proposer is not None:
                self._proposer.finish(slot, self._batch.output(slot))
            self._clear(slot)
        for request_id in output.preempted_req_ids:
            self._clear(self._batch.preempt(request_id))
        for new in output.scheduled_new_reqs:
            # A plan that was lost is sent again: discard the first attempt.
            self._clear(self._batch.finish(new.request_id))
            self._open(self._batch.admit(new))
        self._batch.fork(output.forks)
        for resumed in output.scheduled_cached_reqs.resumed:
            self._open(self._batch.resume(resumed))
        if len(output.scheduled_cached_reqs.slots):
            self._batch.extend_block_tables(output.scheduled_cached_reqs)
        if self.states is not None and output.state_copies is not None:
            self.states.fork(np.array([(fork.parent_slot, fork.slot) for fork in output.forks], np.int32))
            self.states.restore(output.state_copies.restored)
        self._batch.drop_withdrawn_tokens(output)
        if len(output.chosen_tokens.slots):
            self._batch.choose_last_tokens(output.chosen_tokens)
        if len(output.block_copies):
            for cache, copies in zip(self._kv_caches, np.moveaxis(output.block_copies, 2, 0), strict=True):
                cache.copy_blocks(copies)
            if self._proposer is not None:  # what it keeps is in blocks of group 0
                self._proposer.copy_blocks(output.block_copies[:, :, 0])

    def _clear(self, slot: int | None) -> None:
        if slot is not None:
            self._sampler.table.clear(slot)
            if self._evictor is not None:
                self._evictor.close(slot)

    def _open(self, request: RunnerRequest) -> None:
        if (request.pooling_params is None) != (self._pooler is None):
            pooled = "is not" if self._pooler is None else "is"
            raise InconsistentPlanError(
                f"request {request.request_id!r} has pooling_params {request.pooling_params}, but the model "
                f"{pooled} pooled"
            )
        if self._pooler is not None:
            self._pooler.open(request.slot)
        if self._proposer is not None:
            num_tokens = int(self._batch.num_tokens[request.slot])
            self._proposer.open(request.slot, num_tokens, request.draft_scope)
        if self._evictor is not None:
            self._evictor.open(request.slot, request.num_prompt_tokens)
        self._sampler.table.write(
            request.slot,
            request.sampling_params,
            num_prompt_tokens=request.num_prompt_tokens,
            eos_token_ids=request.eos_token_ids,
        )

    def _can_replay(self, output: SchedulerOutput, sampling: SamplingPositions) -> bool:
        """Return whether a step can be captured, and is small enough to be."""
        return (
            (_is_decode(output, sampling) or self._is_small(output, sampling))
            and not self._batch.prompt_logprobs_end[output.slots].any()
            and self._left_out_keys(output) == (None, None)
        )

    def _is_small(self, output: SchedulerOutput, sampling: SamplingPositions) -> bool:
        return len(sampling.tokens) > 0 and output.total_num_scheduled_tokens <= self.max_captured_tokens

    def _num_largest(self, output: SchedulerOutput, sampling: SamplingPositions) -> int | None:
        """Return the `num_largest` of `Decoder.logits` for a step; None: the model does not find them."""
        if not self._model.finds_largest_logits:
            return None
        return self._sampler.table.num_largest(output.slots[sampling.rows])

    def _replay(
        self, output: SchedulerOutput, sampling: SamplingPositions, num_largest: int | None
    ) -> _Computed:
        """Replay a step's capture, or compute it as it will be captured."""
        assert self._graphs is not None
        batch = self._attention_batch(output)
        rows = np.repeat(output.slots, output.num_tokens)
        encoded = self._encoded_ids(rows, batch.positions.numpy())
        if self._proposer is not None and self._proposer.follows_tokens:
            self._proposer.follow(self._input_ids(encoded), batch, is_captured=True)
        logit_rows = None if _is_decode(output, sampling) else sampling.tokens
        logits = self._graphs.logits(encoded, batch, logit_rows, num_largest)
        self._save_states(output)
        self._batch.note_computed(output)
        return _Computed(logits)

    def _compute(
        self, output: SchedulerOutput, sampling: SamplingPositions, num_largest: int | None
    ) -> _Computed:
        """Compute any step."""
        if self._graphs is not None:
            self._graphs.stats.num_launched += 1
        hidden = self._forward(output)
        self._batch.note_computed(output)
        prompt_logprobs = self._prompt_logprobs.begin(output, hidden)
        logits = None
        if sampling.rows.size:
            rows = array_to_device(sampling.tokens, hidden.device)
            logits = StepLogits(self._model.logits(hidden[rows], num_largest))
        if self._evictor is not None:  # while a device computes the logits
            self._evictor.end(output)
        return _Computed(logits, prompt_logprobs)

    def _forward(self, output: SchedulerOutput) -> torch.Tensor:
        """Return the last hidden state of every scheduled token, [T, hidden], and write its KV."""
        batch = self._attention_batch(output)
        if self._pooler is not None and self._model.config.token_types > 1:
            batch.token_types = self._pooler.token_types(output)
        rows = np.repeat(output.slots, output.num_tokens)
        positions = batch.positions.numpy()
        if self._evictor is not None:
            positions = self._evictor.positions_in_text(positions, output)
        encoded = self._encoded_ids(rows, positions)
        if self._pooler is not None and self._graphs is not None and _is_short_text(batch):
            return self._graphs.forward(encoded, batch)
        token_ids = self._input_ids(encoded)
        if self._proposer is not None and self._proposer.follows_tokens:
            self._proposer.follow(token_ids, batch, is_captured=False)
        hook = self._layer_hook
        if self._evictor is not None:
            self._evictor.begin(batch.key_scores)
            hook = self._evictor
        hidden = self._model.forward(token_ids, self._kv, batch, hook=hook)
        self._save_states(output)
        return hidden

    def _save_states(self, output: SchedulerOutput) -> None:
        if self.states is not None and output.state_copies is not None:
            self.states.save(output.state_copies.saved)

    def _input_ids(self, encoded: Int64Array) -> torch.Tensor:
        """Return the token ids of a step on the device, [T] both."""
        return self._sampler.input_ids(array_to_device(encoded, self._model.kernels.device))

    def _encoded_ids(self, rows: IntArray, positions: Int64Array) -> Int64Array:
        """Return the token ids of a step as `Sampler.encoded_ids` encodes them, [T]."""
        known = self._batch.token_ids[rows, positions].astype(np.int64)
        if self._sampler.is_synchronous:
            return known
        return self._sampler.encoded_ids(known, self._batch.slots_of_unknown(rows, positions))

    def _attention_batch(self, output: SchedulerOutput) -> AttentionBatch:
        skipped_keys, key_selection = (
            self._left_out_keys(output) if self._sparse is not None else (None, None)
        )
        options: dict[str, Any] = {"num_computed_tokens": output.num_computed_tokens}
        if self._evictor is not None and output.evictions is not None:
            options = self._evictor.batch_options(output, output.evictions, skipped_keys)
        if self.states is not None:
            taken_in = None if output.state_copies is None else output.state_copies.num_tokens
            options["states"] = StepStates(output.slots.astype(np.int64), self.states.layers, taken_in)
        tables = self._batch.block_tables(output.slots)
        return AttentionBatch.build(
            num_tokens=output.num_tokens,
            block_tables=tables[0],
            other_tables=list(tables[1:]),
            block_size=self._block_size,
            skipped_keys=skipped_keys,
            key_selection=key_selection,
            **options,
        )

    def _left_out_keys(self, output: SchedulerOutput) -> tuple[SkippedKeys | None, KeySelection | None]:
        if self._sparse is None:
            return None, None
        num_computed = output.num_computed_tokens.astype(np.int64)
        rows = num_computed, output.num_tokens.astype(np.int64), self._batch.num_prompt_tokens[output.slots]
        return self._sparse.skipped_keys(*rows), self._sparse.key_selection(*rows)

    # -- next tokens ---------------------------------------------------------------------------------------

    def _sample(
        self,
        output: SchedulerOutput,
        sampling: SamplingPositions,
        grammar: GrammarSource | None,
        computed: _Computed,
        result: ModelRunnerOutput,
    ) -> DeviceStep | None:
        """Sample, and put the tokens into `result`; or return a step in flight that has them later."""
        if computed.logits is None:
            return None
        slots = output.slots[sampling.rows].astype(np.int64)
        allowed = None if grammar is None else grammar()
        slots_of_rows = slots[sampling.request]
        sampled = self._sampler.sample(
            computed.logits,
            slots_of_rows,
            sampling.positions,
            None if allowed is None else RowMasks.of(allowed, output, sampling),
            self._batch.known_tokens,
        )
        if not (self._sampler.is_synchronous or self._connector_needs_tokens):
            unknown = self._batch.append_unknown(slots, ~output.awaits_tokens[sampling.rows])
            propose = functools.partial(self._propose_later, output)
            step = DeviceStep(result, sampling, sampled, computed.prompt_logprobs, unknown, propose)
            self._in_flight.append(step)
            return step
        emitted = report_tokens(result, sampling, sampled.sampled())
        self._batch.append(output.slots[sampling.rows], _with_placeholders(emitted))
        return None

    def _note_tokens(self) -> None:
        """Give the batch the tokens of steps in flight that have arrived."""
        steps, self._in_flight = self._in_flight, []
        for step in steps:
            if not step.tokens.have_arrived:
                self._in_flight.append(step)
                continue
            try:
                emitted = step.emitted()
            except Exception:  # which `result` of the step raises, too: these tokens are discarded
                continue
            self._batch.fill_in(step.unknown, _with_placeholders(emitted))

    @torch.inference_mode()
    def _propose_later(
        self, output: SchedulerOutput, computed: ModelRunnerOutput, seconds_known: float
    ) -> DraftTokenIds | None:
        """Return the drafts after a step that was in flight; see `StepInFlight`."""
        if not self._asks_for_drafts(output):
            return None
        self._note_tokens()
        is_there = _has_tokens(computed.sampled_token_ids) & self._batch.holds(output)
        drafts, num_steps_without = self._propose(output, is_there, seconds_known)
        if num_steps_without is None:
            return None
        rows = np.flatnonzero(is_there)
        ids: list[list[int]] = [[]] * len(rows) if drafts is None else drafts[rows].tolist()
        request_ids = [output.request_ids[row] for row in rows.tolist()]
        return DraftTokenIds(request_ids, ids, num_steps_without[rows].tolist())

    def _asks_for_drafts(self, output: SchedulerOutput) -> bool:
        return self._proposer is not None and output.num_drafts_wanted is not None

    def _propose(
        self, output: SchedulerOutput, has_sampled: BoolArray, seconds_known: float = 0.0
    ) -> tuple[IntArray | None, IntArray | None]:
        """Return drafts [R, K], and for how many steps [R] there will be none; None: neither.

        Args:
            output: a step that asks for drafts.
            has_sampled: [R] rows that may have some.
            seconds_known: for which their tokens have been known.
        """
        assert self._proposer is not None
        assert output.num_drafts_wanted is not None
        rows = np.flatnonzero(has_sampled)
        max_drafts = output.num_drafts_wanted[rows]
        if not max_drafts.any():
            return None, None
        width = int(max_drafts.max())
        to_continue = self._batch.to_continue(
            output.slots[rows],
            max_drafts,
            is_newest=output is self._newest,
            seconds_known=seconds_known,
        )
        proposed = self._proposer.propose(to_continue, width)
        num_steps_without = np.zeros(len(output.slots), dtype=np.int32)
        num_steps_without[rows] = self._proposer.num_idle_steps(output.slots[rows].astype(np.int64))
        if proposed is None:
            return None, num_steps_without
        drafts = np.full((len(output.slots), width), NO_TOKEN, dtype=np.int32)
        drafts[rows[max_drafts > 0]] = proposed
        return drafts, num_steps_without


@dataclasses.dataclass(slots=True, frozen=True)
class _Computed:
    """The result of a step before its tokens are chosen."""

    logits: StepLogits | None  # of its P sampling positions; None without any
    prompt_logprobs: StepPromptLogprobs = NO_PROMPT_LOGPROBS


def _has_tokens(sampled_token_ids: IntArray) -> BoolArray:
    """Return which rows [R] of tokens [R, 1 + K] have any."""
    has_tokens: BoolArray = sampled_token_ids[:, 0] != NO_TOKEN
    return has_tokens


def _with_placeholders(emitted: IntArray) -> IntArray:
    """Return what rows emit [S, 1 + K] with a token for those with an error.

    A step that was planned before the error is known fits then.
    """
    placed = emitted.copy()
    np.maximum(placed[:, 0], _PLACEHOLDER, out=placed[:, 0])
    return placed


def _is_short_text(batch: AttentionBatch) -> bool:
    """Return whether a step of a model that pools may be recorded: there are few sizes of such steps."""
    return (
        len(batch.num_tokens) == 1
        and not batch.num_cached_tokens.any()
        and batch.num_rows <= _MAX_RECORDED_TOKENS
        and batch.token_types is None
        and batch.states is None
    )


def _is_decode(output: SchedulerOutput, sampling: SamplingPositions) -> bool:
    """Return whether a step samples after each of its tokens, drafts included."""
    return len(sampling.tokens) == output.total_num_scheduled_tokens
