"""Tokenizers whose class, rather than tokenizer.json, decides how text is split and joined.

`transformers` takes the vocabulary, the merges and the tokens around a text from the file, and the rest from
the class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from quire.errors import ModelError
from quire.models.checkpoints.gguf.words import QWEN2

_SPACE = "\u2581"  # SentencePiece's space
_END = "<|endoftext|>"
# Class by model, where tokenizer_config.json names none or a wrong one.
_OF_MODELS = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(
        ("qwen2", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl"),
        "Qwen2Tokenizer",
    ),
    **dict.fromkeys(
        (
            *("mistral", "mixtral", "mistral3", "ministral3", "voxtral", "llava", "llava_next", "smolvlm"),
            *("phi3", "granite", "olmo2", "olmo3"),
        ),
        "",
    ),
}
_OVERRIDES_FILE = "qwen2"  # published files name the wrong class


@dataclasses.dataclass(slots=True, frozen=True)
class TokenizerClass:
    """How a class rebuilds a tokenizer, and its default tokens by role."""

    configure: Callable[[tokenizers.Tokenizer, Mapping[str, Any]], None]
    """Called with the tokenizer, and its settings with the texts of special tokens by role."""
    tokens: dict[str, str]
    ignores_flags: bool = False  # flags of special tokens in the files

    def rebuild(self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
        """Return a tokenizer with the model and the post-processor of `backend`, and without added tokens."""
        rebuilt = tokenizers.Tokenizer(backend.model)
        rebuilt.post_processor = backend.post_processor
        self.configure(rebuilt, settings)
        return rebuilt


def tokenizer_class(
    settings: Mapping[str, Any], model_config: Mapping[str, Any], backend: tokenizers.Tokenizer
) -> TokenizerClass | None:
    """Return the class that decides; None: the file decides.

    Args:
        settings: the content of tokenizer_config.json.
        model_config: the content of config.json.
        backend: the tokenizer in the file.
    """
    model_type = model_config.get("model_type")
    declared = str(settings.get("tokenizer_class") or model_config.get("tokenizer_class") or "")
    name = declared.removesuffix("Fast")
    registered = _OF_MODELS.get(str(model_type))
    if model_type != _OVERRIDES_FILE and name == "LlamaTokenizer" and _is_byte_level(backend):
        return None  # Llama 3's
    if registered == "" or (registered is not None and (not name or model_type == _OVERRIDES_FILE)):
        name = registered
    return _CLASSES.get(name) if isinstance(backend.model, models.BPE) else None


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    parts = (backend.pre_tokenizer, backend.decoder, backend.post_processor)
    return any(b'"ByteLevel"' in part.__getstate__() for part in parts if part is not None)


def _llama(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    has_prefix = settings.get("add_prefix_space") in (None, True)
    scheme = ("always" if settings.get("legacy") else "first") if has_prefix else "never"
    _set_model(backend, fuse_unk=True, byte_fallback=True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    _join_pieces(backend, *([decoders.Strip(" ", 1, 0)] if has_prefix else []))


def _gemma(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    unknown = settings.get("unk_token")
    if unknown is not None and backend.token_to_id(unknown) is None:
        raise ModelError(f"unk_token is {unknown!r:.100}, which is not in the vocabulary of tokenizer.json")
    _set_model(backend, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    _join_pieces(backend)


def _qwen2(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    _set_model(backend)
    QWEN2.configure(backend, prefix_space=bool(settings.get("add_prefix_space")))
    backend.decoder = decoders.ByteLevel()


def _gpt2(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    _set_model(backend)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")))
    backend.decoder = decoders.ByteLevel()


def _set_model(
    backend: tokenizers.Tokenizer,
    *,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    unk_token: str | None = None,
) -> None:
    model = backend.model
    model.fuse_unk, model.byte_fallback, model.unk_token = fuse_unk, byte_fallback, unk_token
    model.dropout, model.ignore_merges = None, False


def _join_pieces(backend: tokenizers.Tokenizer, *ends: Any) -> None:
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    backend.decoder = decoders.Sequence(steps)


_CLASSES = {
    "LlamaTokenizer": TokenizerClass(_llama, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "GemmaTokenizer": TokenizerClass(
        _gemma,
        {f"{role}_token": f"<{role}>" for role in ("bos", "eos", "unk", "pad", "mask")},
    ),
    "Qwen2Tokenizer": TokenizerClass(
        _qwen2, dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END), ignores_flags=True
    ),
    "GPT2Tokenizer": TokenizerClass(_gpt2, dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END)),
}
