"""An engine: model, KV cache, runner and scheduler."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import msgspec

from quire.config import EngineConfig, SchedulerConfig
from quire.engine.building import kv_peers
from quire.engine.building.assembly import (
    build_context,
    build_scheduler,
    config_for_model,
    engine_model,
    scheduler_class,
    start_ranks,
)
from quire.engine.building.drafting import find_draft_model
from quire.engine.building.kv_identity import loaded_kv_identity, model_files_key
from quire.engine.building.measurement import explaining_shortage, measure
from quire.engine.building.runner import ProgressCallback, build_runner, load_models
from quire.engine.devices import device_name, on_one_device, watched_memory
from quire.engine.memory.cache_warming import CacheWarmer
from quire.engine.memory.checks import cache_knob
from quire.engine.memory.eviction import refuse_model_beside_eviction
from quire.engine.memory.plan import plan_memory_again
from quire.engine.messages import EngineCoreRequest, EngineInfo
from quire.engine.owned_requests import OwnedRequests
from quire.engine.stepping import OverlappedStepper, SerialStepper, describe_failure
from quire.errors import EngineDeadError, InvalidRequestError, KVFileError
from quire.grammar.trials import TriedGrammars
from quire.kv.blocks.events import KVCacheEvent, KVEventCollector
from quire.kv.connectors.interface import KVConnector
from quire.kv.connectors.stats import KVConnectorStats, KVPeerStats
from quire.kv.tiers.connector import TierConnector
from quire.request import Request
from quire.sampling_params import ONE_TOKEN
from quire.scheduling.accounts.suspects import PROBE_ID
from quire.scheduling.interface import PauseState, SchedulerInterface, StepWithdrawnError
from quire.scheduling.outputs import EngineCoreOutput, SchedulerStats
from quire.status import FinishReason, RequestStatus

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 8
"""Steps that may fail in a row before the engine ends: it is not a request that makes them fail."""

MAX_WITHDRAWN_STEPS = 3
"""Steps that may be taken back in a row before their requests end."""


class EngineCore:
    """Accepts requests and runs them, step by step.

    Args:
        config: of the engine.
        model_path: directory of the model that `config.model` names.
        on_progress: called with (bytes read, total bytes) while the weights load.
        num_blocks_before: KV blocks of the engine that this one replaces; 0: it replaces none.
        publish_events: publishes the KV events of a step; None: they are not collected.

    Raises:
        QuireError: the model cannot be read, or does not fit into memory, or a rank cannot be started.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        on_progress: ProgressCallback | None = None,
        num_blocks_before: int = 0,
        publish_events: Callable[[Sequence[KVCacheEvent]], None] | None = None,
    ) -> None:
        started = time.monotonic()
        model_config = engine_model(config, model_path)
        config = on_one_device(config_for_model(config, model_config))
        refuse_model_beside_eviction(config.scheduler, model_config)
        draft_model = find_draft_model(config, model_config, model_path)
        memory = watched_memory(config)
        plan_again = functools.partial(
            plan_memory_again,
            config,
            num_blocks=num_blocks_before,
            draft_model=None if draft_model is None else draft_model.config,
        )
        plan = plan_again(model=model_config)
        config = _with_sequences(config, plan.max_num_seqs)
        # Some rotary embeddings depend on the maximum sequence length.
        model_config = dataclasses.replace(model_config, max_model_len=plan.max_model_len)
        self._scheduler_config = config.scheduler
        self._kv_events = None if publish_events is None else KVEventCollector()
        self._publish_events = publish_events
        context = build_context(config, model_path, model_config, plan, self._kv_events)
        self._connector = context.connector
        self._grammars = context.grammars
        # An error in the scheduler's name is reported before the weights are loaded.
        defined = scheduler_class(config).get_grammar_bitmask
        self._reads_grammars = defined is not SchedulerInterface.get_grammar_bitmask
        files = model_files_key(model_path)
        self.ranks = start_ranks(config)
        try:
            with explaining_shortage(memory):
                models = load_models(
                    config,
                    model_path,
                    model_config,
                    plan,
                    ranks=self.ranks,
                    draft_model=draft_model,
                    on_progress=on_progress,
                )
            max_captured_tokens = 0
            if memory is not None:
                measured = measure(
                    config, plan, models, memory, functools.partial(plan_again, model=model_config)
                )
                plan, max_captured_tokens = measured.plan, measured.max_captured_tokens
            self.scheduler = build_scheduler(config, plan, context)
            with explaining_shortage(memory):
                self.runner = build_runner(
                    config,
                    models,
                    plan,
                    connector=context.connector,
                    max_captured_tokens=max_captured_tokens,
                )
        except BaseException:
            self._close_ranks()
            raise
        self._kv_identity = functools.cache(
            functools.partial(loaded_kv_identity, files, config, model_path, model_config, plan)
        )
        self._stats_failure_is_logged = False
        self._probes = False  # after a failed step
        self._requests = OwnedRequests()
        stepper_cls = OverlappedStepper if config.scheduler.overlap_steps else SerialStepper
        self._stepper = stepper_cls(self.scheduler, self.runner)
        self._warmer = CacheWarmer(self.runner.kv_caches[0].tensor, self.scheduler.next_blocks)
        self._warmer.resume()
        self.info = EngineInfo(
            model=config.model,
            max_model_len=plan.max_model_len,
            vocab_size=model_config.vocab_size,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            kv_cache_bytes=plan.kv_bytes * plan.num_ranks,
            dtype=plan.dtype,
            load_seconds=time.monotonic() - started,
            role=config.role,
            kv_transfer_address=kv_peers.lending_address(self._connector),
            reads_priority=self.scheduler.reads_priority,
            reads_kv_transfer_params=not isinstance(self._connector, TierConnector | None),
            device=device_name(config),
            cache_knob=cache_knob(config, plan),
            pooling=model_config.pooling,
            row_size=model_config.row_size,
            row_sizes=model_config.row_sizes,
            labels=model_config.labels,
            prompts=dict(model_config.prompts),
            prompt_name=model_config.prompt_name,
            similarity=model_config.similarity,
            scores_tokens=any(layer.tokens for layer in model_config.row_layers),
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )

    def add(self, request: EngineCoreRequest) -> None:
        """Queue all sequences of `request`, or none. A beam search is queued as one.

        Raises:
            InvalidRequestError, DuplicateRequestError, QueueFullError: the scheduler rejects one of them.
        """
        queued = request.queued_sequence_ids
        _refuse_if_never_queued(request, len(queued), self._scheduler_config)
        if request.sampling_params.structured_outputs is not None and not self._reads_grammars:
            raise InvalidRequestError(
                "the engine's scheduler does not define get_grammar_bitmask(), which structured outputs "
                "need; use another scheduler_cls",
                param="structured_outputs",
            )
        admitted: list[str] = []
        try:
            for index in range(len(queued)):
                sequence = _sequence(
                    request, index, shares_prompt=not self._scheduler_config.use_cache_eviction
                )
                self.scheduler.add_request(sequence)
                admitted.append(sequence.request_id)
        except Exception:
            self.scheduler.finish_requests(admitted, RequestStatus.FINISHED_ABORTED)
            raise
        for request_id in admitted:
            is_beam_search = request.sampling_params.beam_width > 0
            self._requests[request_id] = request.sequence_ids if is_beam_search else [request_id]

    def finish(
        self, sequence_ids: Sequence[str] | None, status: RequestStatus, error: str | None = None
    ) -> list[EngineCoreOutput]:
        """End sequences (None: all) and return the terminal output of each that had not ended."""
        asked = list(self._requests) if sequence_ids is None else sequence_ids
        ended = self.scheduler.finish_requests(asked, status)
        is_told = ended is not None and all(isinstance(request, Request) for request in ended)
        ids = [request.request_id for request in ended or ()] if is_told else asked
        return self._requests.end(ids, FinishReason.of(status), error)

    def withdraw(self, sequence_ids: Sequence[str] | None, status: RequestStatus) -> list[EngineCoreOutput]:
        """End sequences like `finish`; if the scheduler fails, they still end for their clients."""
        try:
            return self.finish(sequence_ids, status)
        except Exception:
            logger.exception("the scheduler could not end requests; their later outputs are dropped")
            asked = self._requests if sequence_ids is None else sequence_ids
            return self._requests.end(asked, FinishReason.of(status), None)

    def step(self) -> tuple[list[EngineCoreOutput], bool]:
        """Run one step; return its outputs, and whether anything was done.

        If computing the step fails, its requests are computed again in other steps, and the one at fault
        ends. If planning it or applying its results fails, all requests end. The engine continues.

        Raises:
            EngineDeadError: the engine cannot continue: a rank has failed, steps fail again and again, even
                of one token, or a failure has left the scheduler's accounts wrong.
        """
        self._warmer.pause()
        if self.ranks is not None:
            self.ranks.raise_failure()
        num_failed = self._stepper.num_failed_steps
        if num_failed > MAX_FAILED_STEPS:
            raise EngineDeadError(f"{num_failed} steps have failed in a row; the log has the reasons")
        try:
            outputs, progressed = self._stepper.step()
            is_failed = self._stepper.num_failed_steps > num_failed
        except EngineDeadError:
            raise
        except Exception as error:
            outputs, progressed, is_failed = self._end_requests_after(error), True, False
        if self.ranks is not None:
            self.ranks.raise_failure()  # on GPUs, a step goes on after one, with numbers that mean nothing
        outputs += self._requests.settle(outputs, self.scheduler)
        if self._probes:
            outputs = self._drop_probe_output(outputs)
        is_busy = self.has_unfinished_requests()
        if is_failed and is_busy:
            self._add_probe()
        if self._kv_events is not None:
            self._publish_kv_events()
        if not is_busy:
            self._resume_warming()
        return outputs, progressed

    def _add_probe(self) -> None:
        """Queue a probe of one token: if that fails, too, no request is to blame for failed steps."""
        if self._probes:
            return
        probe = Request(PROBE_ID, [0], ONE_TOKEN, is_resumed=True, pooling_params=self.info.pooling)
        try:
            self.scheduler.add_request(probe)
        except Exception:
            logger.exception("the scheduler refused the probe after a failed step")
            return
        self._probes = True
        self._requests[PROBE_ID] = [PROBE_ID]

    def _drop_probe_output(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Raise `EngineDeadError` if the probe has failed; return all other outputs."""
        self._probes = PROBE_ID in self._requests
        for output in outputs:
            if output.request_id == PROBE_ID and output.finish_reason is FinishReason.ERROR:
                raise EngineDeadError(f"a step failed, and then even a step of one token: {output.error}")
        return [output for output in outputs if output.request_id != PROBE_ID]

    def _end_requests_after(self, error: Exception) -> list[EngineCoreOutput]:
        """End all requests because a step could not be planned or applied; return their terminal outputs.

        A step that was rolled back ends no request, unless that has happened too often.

        Raises:
            EngineDeadError: the requests cannot be ended, or something is left of them.
        """
        self._stepper.num_failed_steps += 1
        is_withdrawn = isinstance(error, StepWithdrawnError)
        if is_withdrawn and self._stepper.num_failed_steps < MAX_WITHDRAWN_STEPS:
            logger.error("a step was rolled back; its requests continue", exc_info=error)
            return []
        logger.error("a step could not be planned or applied; all requests end", exc_info=error)
        try:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            outputs = self.finish(None, RequestStatus.FINISHED_ERROR, describe_failure(cause))
            self.scheduler.check_invariants()
        except Exception as consequence:
            raise EngineDeadError(
                f"a step failed and left the scheduler inconsistent: {type(error).__name__}: {error}; "
                f"then {type(consequence).__name__}: {consequence}"
            ) from error
        return outputs

    def raise_rank_failure(self) -> None:
        """Raise `EngineDeadError` if a rank has failed."""
        if self.ranks is not None:
            self.ranks.raise_failure()

    def has_requests(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._requests) or self._answer_of(self.scheduler.has_requests, False)

    def next_due(self) -> float | None:
        """Return when a step has something to do without any request (seconds); None: at no time."""
        return self._answer_of(self.scheduler.next_due, None)

    def has_unfinished_requests(self) -> bool:
        """Whether any sequence is waiting or running, or its end has not been reported."""
        return bool(self._requests) or self._answer_of(self.scheduler.has_unfinished_requests, False)

    @staticmethod
    def _answer_of(ask: Callable[[], Answer], default: Answer) -> Answer:
        """Return what the scheduler answers; the default if it cannot."""
        try:
            return ask()
        except Exception:
            logger.exception("the scheduler could not report whether it has work")
            return default

    def stats(self) -> SchedulerStats:
        """Return the scheduler's state and counters, and those of the runner and the KV connector."""
        stats = self.scheduler.make_stats()
        if not isinstance(stats, SchedulerStats):
            stats = SchedulerStats()
        stats.graphs = self.runner.graph_stats
        if self._connector is not None:
            stats.kv_connector = self._connector_stats(self._connector)
        return stats

    def explain(self, sequence_id: str) -> str:
        """Return a sentence about what a sequence is doing or waiting for."""
        return self.scheduler.explain(sequence_id)

    def explain_oldest(self) -> str:
        """Return a sentence about what the oldest waiting request waits for."""
        oldest = self.scheduler.oldest_waiting_request()
        if oldest is None:
            return "no request is waiting"
        return f"the oldest request, {oldest!r}, is {self.explain(oldest)}"

    def may_stall(self) -> bool:
        """Whether a stall is legitimate: requests wait for grammars or KV, or the scheduler is paused."""
        scheduler = self.scheduler
        is_paused = scheduler.pause_state is not PauseState.UNPAUSED
        return is_paused or scheduler.get_kv_connector() is not None or self.stats().num_awaiting > 0

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; while any block is in use, do nothing and return False."""
        options = {} if self._connector is None else {"reset_connector": True}  # not in eSurge's interface
        is_reset = bool(self.scheduler.reset_prefix_cache(**options))
        self._publish_kv_events()
        return is_reset

    def release_kv(self, transfer_id: str) -> None:
        """Free the KV that is held for a peer under this transfer id, as soon as the next step."""
        kv_peers.release_kv(self._connector, transfer_id)

    def save_kv(self, path: Path, token_ids: list[int], cache_salt: str) -> Future[tuple[int, bool]]:
        """Save a prompt's KV, see `TierConnector.save`.

        Raises:
            KVFileError: there is no tier, or the prompt has no full block.
        """
        block_size = self.info.block_size
        if len(token_ids) < block_size:
            raise KVFileError(
                f"the prompt has {len(token_ids)} tokens, and KV is saved in blocks of {block_size}: there "
                "is nothing to save"
            )
        return self._tier_connector().save(path, token_ids, cache_salt, self._kv_identity)

    def restore_kv(self, path: Path, cache_salt: str) -> Future[list[int]]:
        """Restore a prompt's KV, see `TierConnector.restore`.

        Raises:
            KVFileError: there is no tier.
        """
        return self._tier_connector().restore(path, cache_salt, self._kv_identity)

    def _tier_connector(self) -> TierConnector:
        if not isinstance(self._connector, TierConnector):
            raise KVFileError(
                "KV is saved from a KV tier and restored to it, and this engine has none; set kv_tier to "
                "'memory' or 'disk'"
            )
        return self._connector

    def shutdown(self) -> list[EngineCoreOutput]:
        """Abort all remaining requests and release everything; return the terminal outputs."""
        self._stepper.close()
        self._warmer.close()
        outputs = self.withdraw(None, RequestStatus.FINISHED_ABORTED)
        outputs += self._requests.end_all(FinishReason.ABORT)
        _close(self.scheduler.shutdown, "the scheduler")
        if isinstance(self._grammars, TriedGrammars):
            self._grammars.close()
        if self._connector is not None:
            _close(self._connector.close, "the KV connector")
        self._close_ranks()
        return outputs

    def _connector_stats(self, connector: KVConnector) -> KVConnectorStats | KVPeerStats | None:
        try:
            stats = connector.stats()
            if stats is not None and not isinstance(stats, KVConnectorStats | KVPeerStats):
                raise TypeError(f"stats() returned {type(stats).__name__}, not KVConnectorStats")
            if stats is not None:
                msgspec.convert(msgspec.to_builtins(stats), type(stats))  # the front reads no other types
            return stats
        except Exception:
            if not self._stats_failure_is_logged:
                self._stats_failure_is_logged = True
                logger.exception("the KV connector could not report its statistics")
            return None

    def _close_ranks(self) -> None:
        if self.ranks is not None:
            self.ranks.close()

    def _resume_warming(self) -> None:
        try:
            self._warmer.resume()
        except Exception:  # no thread can be started, for one
            logger.exception("could not touch the memory of the next KV blocks")

    def _publish_kv_events(self) -> None:
        if self._kv_events is not None and self._publish_events is not None:
            try:
                if events := self._kv_events.take():
                    self._publish_events(events)
            except Exception:  # a step's outputs matter more than its events
                logger.exception("the KV events of a step could not be published")


def _close(close: Callable[[], None], what: str) -> None:
    try:
        close()
    except Exception:
        logger.exception("%s could not be closed", what)


def _with_sequences(config: EngineConfig, max_num_seqs: int) -> EngineConfig:
    """Return the configuration with as many sequences as the memory plan has."""
    asked = config.scheduler.max_num_seqs
    if max_num_seqs == asked:
        return config
    logger.warning(
        "SchedulerConfig.max_num_seqs is %d; memory has room for the states of %d sequences",
        asked,
        max_num_seqs,
    )
    scheduler = dataclasses.replace(config.scheduler, max_num_seqs=max_num_seqs)
    return dataclasses.replace(config, scheduler=scheduler)


def _refuse_if_never_queued(request: EngineCoreRequest, n: int, config: SchedulerConfig) -> None:
    """Raise `InvalidRequestError` if not even an empty queue has room for the `n` sequences of `request`."""
    prompt_length = len(request.prompt_token_ids)
    param = "n" if request.sampling_params.best_of is None else "best_of"
    if n > config.max_num_queued_reqs:
        raise InvalidRequestError(
            f"{param} is {n}, but at most max_num_queued_reqs {config.max_num_queued_reqs} sequences can "
            f"wait; lower {param} to that, or raise max_num_queued_reqs",
            param=param,
        )
    if n > 1 and n * prompt_length > config.max_num_queued_tokens:  # there is always room for one sequence
        raise InvalidRequestError(
            f"{param} is {n} and the prompt has {prompt_length} tokens, together {n * prompt_length}, but at "
            f"most max_num_queued_tokens {config.max_num_queued_tokens} can wait; lower {param} to at most "
            f"{max(1, config.max_num_queued_tokens // prompt_length)}, or raise max_num_queued_tokens",
            param=param,
        )


def _sequence(request: EngineCoreRequest, index: int, *, shares_prompt: bool = True) -> Request:
    params, options = request.sampling_params, request.options
    resumed = request.resumed_outputs
    is_beam_search = params.beam_width > 0
    params = params.with_checked(
        n=params.n if is_beam_search else 1,
        best_of=None,
        seed=request.seeds[index],
        prompt_logprobs=params.prompt_logprobs if index == 0 else None,
    )
    return Request(
        request.sequence_ids[index],
        request.prompt_token_ids,
        params,
        eos_token_ids=request.eos_token_ids,
        priority=options.priority,
        cache_salt=options.cache_salt,
        tenant=options.tenant,
        tenant_weight=options.tenant_weight,
        flow=request.flow or request.sequence_ids[0],
        timeout=options.timeout,
        queue_timeout=options.queue_timeout,
        pin_prefix=options.pin_prefix,
        kv_transfer_params=None if options.kv_transfer_params is None else dict(options.kv_transfer_params),
        shares_prompt_with=request.sequence_ids[0] if index and shares_prompt else None,
        beam_sequence_ids=tuple(request.sequence_ids) if is_beam_search else (),
        output_token_ids=() if resumed is None else resumed[index],
        is_resumed=request.was_accepted,
        pooling_params=request.pooling_params,
        arrival_time=request.arrival_time,
    )
