"""Building the proposer of drafts from the configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.memory.model_sizes import dtype_of
from quire.errors import ConfigError
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.hub import resolve_model
from quire.models.config import ModelConfig
from quire.models.weights import count_parameters

if TYPE_CHECKING:
    from quire.config import EngineConfig, SpeculationConfig
    from quire.engine.memory.plan import MemoryPlan
    from quire.execution.drafts.draft_states import DraftStates
    from quire.execution.drafts.proposer import Proposer
    from quire.kernels.interface import Capture
    from quire.kv.cache.state_cache import StateCache
    from quire.models.checkpoints.loading import WeightOptions
    from quire.models.decoder import Decoder


@dataclasses.dataclass(frozen=True, slots=True)
class DraftModel:
    """Directory and configuration of the draft model."""

    path: Path
    config: ModelConfig


def find_draft_model(
    config: EngineConfig, model: ModelConfig, model_path: Path, *, weights: bool = True
) -> DraftModel | None:
    """Return the configured draft model, or None if there is none.

    Args:
        config: of the engine.
        model: the target model.
        model_path: its directory or GGUF file.
        weights: download the weights too, if the model has to be downloaded.

    Raises:
        ConfigError: it has recurrent layers, and the target model has none or its states are moved with KV;
            or its vocabulary has another size than the target model's, and an id that both have stands for
            different tokens.
        ModelError: it cannot be found, is malformed or is not supported, or there is no tokenizer to compare.
    """
    name = config.speculation.draft_model
    if not name:
        return None
    path = resolve_model(name, weights=weights)
    draft = read_model_config(path)
    if draft.has_states:
        _check_states(config, model, draft)
    if draft.vocab_size != model.vocab_size:
        own = resolve_model(config.tokenizer, weights=False) if config.tokenizer else model_path
        _check_tokens(config, (model.vocab_size, _tokens(own)), (draft.vocab_size, _tokens(path)))
    return DraftModel(path, draft)


def _check_states(config: EngineConfig, model: ModelConfig, draft: ModelConfig) -> None:
    """Raise ConfigError if the states of a draft model cannot be kept as part of the target model's."""
    given = (
        f"SpeculationConfig.draft_model is {config.speculation.draft_model!r}, a {draft.architecture}, which "
        "has recurrent layers"
    )
    if not model.has_states:
        raise ConfigError(
            f"{given}, but {config.model!r} has none, beside whose states its own could be kept; choose a "
            "draft model without such layers"
        )
    for field, value in config.moves_kv_by.items():
        raise ConfigError(
            f"{given}, and {field} is {value!r}: an engine that reads these states may have no such draft "
            "model; set one of them to its default"
        )


def _tokens(path: Path) -> dict[int, str]:
    """Return the tokens of a model by their ids."""
    from quire.models.checkpoints.tokenizers.reading import read_tokenizer

    vocabulary = read_tokenizer(path).backend.get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}


def _check_tokens(
    config: EngineConfig, target: tuple[int, dict[int, str]], draft: tuple[int, dict[int, str]]
) -> None:
    """Raise ConfigError unless each id that both vocabularies have, (size, tokens), is of the same token.

    Models of one family may differ in how far a vocabulary is padded, or in tokens that were added last.
    """
    (size, tokens), (draft_size, draft_tokens) = target, draft
    for token_id in sorted(tokens.keys() & draft_tokens.keys()):
        if tokens[token_id] != draft_tokens[token_id]:
            raise ConfigError(
                f"SpeculationConfig.draft_model is {config.speculation.draft_model!r}, with a vocabulary of "
                f"{draft_size} tokens; {config.model!r} has {size}, and token {token_id} is "
                f"{tokens[token_id]!r:.50} there, not {draft_tokens[token_id]!r:.50}: choose a model of the "
                "same family"
            )


def load_draft_model(config: EngineConfig, draft_model: DraftModel, plan: MemoryPlan) -> Decoder:
    """Load the weights of the draft model."""
    from quire.models.checkpoints.loading import load_decoder

    shape = dataclasses.replace(draft_model.config, max_model_len=plan.max_model_len)
    return load_decoder(draft_model.path, shape, options=weight_options(config, shape))


def build_proposer(
    config: EngineConfig,
    draft_model: Decoder | None,
    plan: MemoryPlan,
    *,
    vocab_size: int,
    states: StateCache | None = None,
    capture: Capture | None = None,
) -> Proposer | None:
    """Return the proposer of drafts, or None without speculation; allocates the draft model's KV cache.

    Args:
        config: of the engine.
        draft_model: the model that drafts, if any.
        plan: of memory.
        vocab_size: of the target model.
        states: of recurrent layers of both models, if there are any.
        capture: captures the draft model's steps.
    """
    speculation = config.speculation
    if speculation.speculative_method in ("ngram", "suffix"):
        from quire.execution.drafts.adaptive_proposer import AdaptiveProposer

        max_num_seqs = config.scheduler.max_num_seqs
        proposer = _copying_proposer(speculation, max_num_seqs)
        return AdaptiveProposer(
            proposer,
            max_num_seqs,
            overlaps=config.scheduler.overlap_steps,
            repeats=plan.states is not None,
        )
    if draft_model is None:
        return None
    from quire.execution.drafts.draft_model_proposer import DraftGraphs, DraftModelProposer
    from quire.kv.cache.paged_cache import PagedAttentionCache

    assert plan.draft_cache is not None
    kv_cache = PagedAttentionCache.on_device(plan.draft_cache, draft_model.kernels.device)
    own_states = _draft_states(draft_model, plan, states)
    graphs = None
    if capture is not None and own_states is None:
        graphs = DraftGraphs(draft_model, kv_cache, capture, config.scheduler.max_num_batched_tokens)
    return DraftModelProposer(draft_model, kv_cache, graphs, vocab_size=vocab_size, states=own_states)


def _draft_states(draft_model: Decoder, plan: MemoryPlan, states: StateCache | None) -> DraftStates | None:
    """Return the states of the draft model's recurrent layers; None: it has no such layers."""
    if states is None or plan.states is None or plan.states.draft_layout is None:
        return None
    from quire.execution.drafts.draft_states import DraftStates
    from quire.kv.cache.state_cache import StateCache

    layout, num_slots = plan.states.draft_layout, states.num_slots
    copies = StateCache.on_device(
        layout, draft_model.kernels.device, num_slots=num_slots, num_states=num_slots
    )
    return DraftStates(states.layers[-len(layout.layers) :], copies)


def _copying_proposer(speculation: SpeculationConfig, max_num_seqs: int) -> Proposer:
    """Return a proposer that copies earlier text."""
    if speculation.speculative_method == "ngram":
        from quire.execution.drafts.ngram_proposer import NgramProposer

        return NgramProposer(speculation.ngram_min, speculation.ngram_max)
    from quire.execution.drafts.suffix_proposer import SuffixProposer

    return SuffixProposer(
        speculation.ngram_min, speculation.suffix_max, speculation.suffix_history, max_num_seqs
    )


def weight_options(config: EngineConfig, model: ModelConfig) -> WeightOptions:
    """Return how to load the weights of the target or the draft model."""
    from quire.models.checkpoints.loading import WeightOptions
    from quire.models.checkpoints.weight_cache import choose_cache

    return WeightOptions(
        dtype=dtype_of(config, model),
        quantization=config.quantization,
        group_size=config.quantization_group_size,
        int4_activations=config.int4_activations,
        kernels=config.kernels,
        cache=choose_cache(
            config.weight_cache,
            max_bytes=int(config.weight_cache_size * 1e9),
            num_parameters=count_parameters(model),
        ),
    )
