"""The tokenizer of an engine: that of its model, or another that was given. Nothing here needs torch."""

from __future__ import annotations

from pathlib import Path

from quire.config import EngineConfig
from quire.errors import ModelError
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.gguf.location import find_gguf
from quire.models.checkpoints.tokenizers.reading import eos_ids_of_configs, read_tokenizer
from quire.models.text.tokenizer import Tokenizer

_QWEN3_TOKENS = ("no", "yes")
_QWEN3_PAIRS = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "{% for role, name in [('system', 'Instruct'), ('query', 'Query'), ('document', 'Document')] %}"
    "{% set said = messages | selectattr('role', 'eq', role) | map(attribute='content') | first %}"
    "{{ '\n' if not loop.first }}<{{ name }}>: {{ said | default("
    "'Given a web search query, retrieve relevant passages that answer the query') }}{% endfor %}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n\n"
)
"""What Qwen3-Reranker was trained on; its first files had the template of conversations."""


def engine_tokenizer(config: EngineConfig, model_path: Path) -> Tokenizer:
    """Read the tokenizer of an engine, whose configuration `resolve_files` has returned.

    Raises:
        ModelError: it cannot be read, or has tokens that the model does not know.
    """
    tokenizer = _tokenizer(config, model_path)
    has_own = bool(config.chat_templating.chat_template) or tokenizer.joins_pairs
    is_reranker = tuple(config.classifier_from_token) == _QWEN3_TOKENS and not has_own
    if is_reranker and read_model_config(model_path).family == "qwen3":
        tokenizer.chat_template_source = _QWEN3_PAIRS
    return tokenizer


def _tokenizer(config: EngineConfig, model_path: Path) -> Tokenizer:
    if not config.tokenizer:
        return read_tokenizer(model_path, config.chat_templating)
    vocab_size = read_model_config(model_path).vocab_size
    eos_ids = [] if find_gguf(model_path) else eos_ids_of_configs(model_path, vocab_size)
    tokenizer = read_tokenizer(Path(config.tokenizer), config.chat_templating, extra_eos_ids=eos_ids)
    if tokenizer.vocab_size > vocab_size:
        raise ModelError(
            f"EngineConfig.tokenizer {config.tokenizer} has {tokenizer.vocab_size} tokens, and "
            f"{config.model} has {vocab_size}; give the tokenizer that the model was trained with"
        )
    return tokenizer
