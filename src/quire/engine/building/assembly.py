"""Builds an engine from its configuration: ranks, the scheduler and its context."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.engine.building.kv_peers import build_peers, cached_block_events, cached_state_events
from quire.engine.building.kv_tier import build_tier, gpu_copier
from quire.engine.custom_classes import CONNECTORS, SCHEDULERS, knows_groups, moves_states
from quire.engine.ranks.group import RankGroup
from quire.errors import ConfigError, ModelError, known_prompts
from quire.grammar.llguidance_backend import LLGuidanceBackend
from quire.grammar.trials import TriedGrammars
from quire.kernels import has_native_kernels
from quire.kv.blocks.events import KVEventCollector, KVEventFanOut
from quire.kv.blocks.groups import WindowBlocks
from quire.kv.cache.memory_limits import available_memory
from quire.kv.connectors.interface import KVConnector
from quire.kv.tiers.connector import TierConnector
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.classification import scored_by_tokens
from quire.scheduling.context import SchedulerContext
from quire.scheduling.interface import SchedulerInterface

if TYPE_CHECKING:
    from quire.engine.memory.plan import MemoryPlan
    from quire.models.config import ModelConfig
    from quire.models.text.tokenizer import Tokenizer

RESERVED_SHARE = 0.05
"""Fraction of the memory available at start-up that a growing KV cache leaves free."""

RETRY_INTERVAL = 1.0
"""Seconds to wait after a refusal before asking for memory again."""

SLOW_MODULES = (
    "quire.execution.model_runner",
    "quire.kv.cache.paged_cache",
    "quire.kv.peers.connector",  # which engines with a KV tier look at, too
    "quire.models.checkpoints.loading",
    "quire.scheduling.scheduler",
)
"""Modules that are imported where an engine is built, because the front shall not import them."""


def engine_model(config: EngineConfig, model_path: Path) -> ModelConfig:
    """Return the config of an engine's model, which scores texts if `classifier_from_token` is set.

    Raises:
        ModelError: see `read_model_config`; or the model has no logits that could be scores.
        ConfigError: the tokenizer has no such token, or the model no prompt of the configured name.
    """
    model = read_model_config(model_path)
    if config.prompt_name:
        if config.prompt_name not in dict(model.prompts):
            raise ConfigError(
                f"EngineConfig.prompt_name is {config.prompt_name!r:.80}, and {config.model} has "
                f"{known_prompts(name for name, _ in model.prompts)}"
            )
        model = dataclasses.replace(model, prompt_name=config.prompt_name)
    if not config.classifier_from_token:
        return model
    # slow, and rarely needed
    from quire.models.checkpoints.tokenizers.engine_tokenizer import engine_tokenizer

    backend = engine_tokenizer(config, model_path).backend
    tokens: list[int] = []
    for text in config.classifier_from_token:
        if (token := backend.token_to_id(text)) is None:
            raise ConfigError(
                f"EngineConfig.classifier_from_token has {text!r:.80}, which is no token of the tokenizer of "
                f"{config.model}"
            )
        tokens.append(token)
    return scored_by_tokens(model, tuple(tokens))


def config_for_model(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the configuration with which a model can be served.

    Prompts of models that are not causal are computed whole, each in one step, and nothing of them is reused:
    steps have room for the longest, unless the configuration says how much.

    Raises:
        ConfigError: a field asks for what such a model cannot do.
        ModelError: the model is not causal, but would generate.
    """
    scheduler, method = config.scheduler, config.speculation.speculative_method
    if model.pooling is not None:
        of_generating: dict[str, object] = {
            "SpeculationConfig.speculative_method": "" if method == "none" else method,
            "SchedulerConfig.use_cache_eviction": scheduler.use_cache_eviction,
        }
        _refuse_set(of_generating, f"{model.architecture} makes a row of each prompt and generates nothing")
    if model.has_states:
        of_states: dict[str, object] = {
            "SchedulerConfig.use_cache_eviction": scheduler.use_cache_eviction,
            "EngineConfig.scheduler_cls": config.scheduler_cls * (not knows_groups(config)),
        }
        if not moves_states(config):
            of_states |= config.moves_kv_by
        why = f"{model.architecture} has recurrent layers, beside whose states that is not supported"
        _refuse_set(of_states, why)
        if config.tensor_parallel_size > 1:
            why = f"{model.architecture} has recurrent layers, and states of tensor_parallel_size "
            _refuse_set(config.moves_kv_by, f"{why}{config.tensor_parallel_size} are not moved")
    if not model.is_causal or not model.kv_specs:
        of_kv: dict[str, object] = {"SchedulerConfig.use_sparse_attention": scheduler.use_sparse_attention}
        of_kv |= config.moves_kv_by
        _refuse_set(of_kv, f"no KV of a prompt can be used again in {model.architecture}")
    if model.is_causal:
        return config
    ranks = config.tensor_parallel_size * (config.tensor_parallel_size > 1)
    why = f"{model.architecture} has attention to later tokens, which ranks do not share"
    _refuse_set({"EngineConfig.tensor_parallel_size": ranks}, why)
    if model.pooling is None:
        raise ModelError(f"{model.architecture} has layers that are not causal, so that it cannot generate")
    whole = dataclasses.replace(scheduler, dynamic_split_fuse=False, enable_prefix_caching=False)
    if not whole.max_num_batched_tokens:
        usual = scheduler.with_step_tokens().max_num_batched_tokens
        # Whole prompts fill small steps badly, and no next token waits for a step to end.
        longest = max(2 * usual, config.max_model_len or model.max_model_len)
        whole = dataclasses.replace(whole, max_num_batched_tokens=longest)
    return dataclasses.replace(config, scheduler=whole)


def _refuse_set(fields: Mapping[str, object], why: str) -> None:
    """Raise `ConfigError` for a field that is set, although it has no meaning for a model."""
    for name, value in fields.items():
        if value:
            raise ConfigError(f"{name} is {value!r}, but {why}; leave it out")


def build_context(
    config: EngineConfig,
    model_path: Path,
    model_config: ModelConfig,
    plan: MemoryPlan,
    kv_events: KVEventCollector | None,
) -> SchedulerContext:
    """Return what the engine's scheduler has around it whatever the size of its cache is."""
    connector = build_connector(config, model_path, model_config, plan)
    # What peers read comes first: a removal that it missed because another sink raised would be wrong text.
    sinks = [*cached_block_events(connector)[:1], *filter(None, [kv_events])]
    return SchedulerContext(
        grammars=_grammar_backend(config, model_path, model_config),
        connector=connector,
        kv_events=KVEventFanOut(sinks) if sinks else None,
        draft_length=config.speculation.draft_length,
    )


def build_connector(
    config: EngineConfig, model_path: Path, model_config: ModelConfig, plan: MemoryPlan
) -> KVConnector | None:
    """Return the connector, which moves the KV of the engine's device; None: none is asked for.

    Raises:
        ConfigError: its class or an option of it cannot be used.
    """
    connector = _connector(config, model_path, model_config, plan)
    if config.device == "cuda" and isinstance(connector, TierConnector) and connector.copier_of is None:
        connector.copier_of = gpu_copier
    return connector


def _connector(
    config: EngineConfig, model_path: Path, model_config: ModelConfig, plan: MemoryPlan
) -> KVConnector | None:
    if config.kv_tiering.kv_tier:
        return build_tier(config, model_path, model_config, plan)
    if config.shares_kv:
        return build_peers(config, model_path, model_config, plan)
    if not config.kv_connector:
        return None
    return CONNECTORS.build(config.kv_connector, block_size=config.scheduler.block_size)


def _grammar_backend(config: EngineConfig, model_path: Path, model_config: ModelConfig) -> TriedGrammars:
    @functools.cache
    def tokenizer() -> Tokenizer:
        # slow, and rarely needed
        from quire.models.checkpoints.tokenizers.engine_tokenizer import engine_tokenizer

        return engine_tokenizer(config, model_path)

    def tokenizer_json() -> str:
        text: str = tokenizer().backend.to_str()
        return text

    scheduler = config.scheduler
    backend = LLGuidanceBackend(
        tokenizer_json,
        model_config.vocab_size,
        lambda: tokenizer().eos_token_ids,
        closes_objects=scheduler.closed_json_objects,
    )
    return TriedGrammars(backend, seconds_per_token=scheduler.max_grammar_time_per_token)


class CacheGrowth:
    """Grants blocks of the reserved address space of caches; see `SchedulerContext.commit_blocks`.

    Blocks that were granted but not yet written still count as available memory in the system. So all
    granted blocks are also subtracted from what was available at the start.

    Args:
        spare_bytes: memory to leave free.
        reserved_bytes: memory that others have allocated, and not written to yet.
        read_available: returns the bytes currently available to this process.
        clock: returns seconds.
    """

    def __init__(
        self,
        spare_bytes: int,
        *,
        reserved_bytes: int = 0,
        read_available: Callable[[], int] = available_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spare_bytes = spare_bytes
        self._read_available = read_available
        self._clock = clock
        self._available_at_start = read_available() - reserved_bytes
        self._granted_bytes = 0
        self._short_until = clock()

    def grant(self, bytes_per_block: int, num_blocks: int) -> int:
        """Return how many of `num_blocks` additional blocks may be used, which are those of any cache."""
        now = self._clock()
        if now < self._short_until:
            return 0
        left = min(self._read_available(), self._available_at_start - self._granted_bytes)
        granted = min(num_blocks, max(0, left - self._spare_bytes) // bytes_per_block)
        self._granted_bytes += granted * bytes_per_block
        if granted < num_blocks:
            self._short_until = now + RETRY_INTERVAL
        return granted


def commits_of_groups(config: EngineConfig, plan: MemoryPlan) -> list[Callable[[int], int] | None]:
    """Return what commits the memory of each cache group's blocks; see `SchedulerContext.commit_blocks`.

    A cache does not grow on a GPU, with a given size, or if its blocks take no memory.
    """
    if config.device == "cuda" or config.scheduler.num_kv_blocks or config.scheduler.cache_size:
        return [None] * len(plan.kv_caches)
    spare_bytes = int(plan.available_bytes * RESERVED_SHARE) + plan.activation_bytes
    growth = CacheGrowth(spare_bytes * plan.num_ranks, reserved_bytes=plan.state_bytes * plan.num_ranks)
    return [
        functools.partial(growth.grant, size * plan.num_ranks) if size else None
        for size in plan.group_sizes.bytes_per_block
    ]


def scheduler_class(config: EngineConfig) -> type[SchedulerInterface]:
    """Return the class of the engine's scheduler; raise `ConfigError` if there is none of that name."""
    return SCHEDULERS.class_of(config.scheduler_cls)


def build_scheduler(config: EngineConfig, plan: MemoryPlan, context: SchedulerContext) -> SchedulerInterface:
    """Return the engine's scheduler over the planned cache, wrapped in a recorder if `record_path` is set.

    Raises:
        ConfigError: the scheduler class, a policy or the file of the recording cannot be used.
    """
    commit_blocks, *others = commits_of_groups(config, plan)
    sinks = cached_block_events(context.connector)[1:] or itertools.repeat(None, len(others))
    windows = [
        WindowBlocks(window, cache.num_pages_per_layer, commit, events)
        for window, cache, commit, events in zip(plan.windows, plan.kv_caches[1:], others, sinks, strict=True)
    ]
    context = dataclasses.replace(context, commit_blocks=commit_blocks, windows=tuple(windows))
    if plan.states is not None:
        states = plan.states.for_scheduler(config.scheduler, plan.kv_bytes_per_block)
        events = cached_state_events(context.connector)
        context = dataclasses.replace(context, states=states, state_events=events)
    scheduler_cls = scheduler_class(config)
    size = {"num_blocks": plan.num_blocks, "max_model_len": plan.max_model_len}
    if not config.record_path:
        return scheduler_cls(config.scheduler, context=context, **size)
    from quire.recording.recorder import RecordingScheduler

    return RecordingScheduler(
        config.scheduler, context=context, scheduler_cls=scheduler_cls, path=Path(config.record_path), **size
    )


def start_ranks(config: EngineConfig) -> RankGroup | None:
    """Start the processes of the other ranks, which import what they need; return None if there are none."""
    _limit_spinning()
    if config.tensor_parallel_size == 1:
        return None
    return RankGroup(
        config.tensor_parallel_size,
        timeout=config.tensor_parallel_timeout,
        shares_kv=config.shares_kv,
        on_gpus=config.device == "cuda",
    )


def import_ahead() -> None:
    """Import what an engine would import while it is built, torch above all."""
    _limit_spinning()
    for name in SLOW_MODULES:
        importlib.import_module(name)
    if has_native_kernels():
        importlib.import_module("quire.kernels.cpu.kernel_set")


def _limit_spinning() -> None:
    """Set how long threads of OpenMP spin, before torch loads it.

    Threads that spin for long after each parallel region take the cores from the front and from other
    processes; threads that sleep at once wake up too late.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
