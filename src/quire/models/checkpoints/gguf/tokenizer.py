"""Converts a GGUF file's metadata to a tokenizer of the `tokenizers` library.

The file holds the vocabulary and names the rules by which text is cut into words; the rules are the published
tokenizers' own.
"""

from __future__ import annotations

import math
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from quire.errors import ModelError
from quire.models.checkpoints.gguf.file import GGUFFile
from quire.models.checkpoints.gguf.words import WORDS
from quire.models.checkpoints.special_ids import special_ids

_KEEP_SPACE = ("<s>", "<|endoftext|>")  # marks of Phi-3 that do not absorb following white space
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types
_TOKEN_TYPES = range(7)  # llama.cpp's numbers
_PREFIX = "tokenizer.ggml."
_MAX_CUTS = 1 << 28  # squared lengths of all tokens: how often one is cut in two, times what a cut copies
_SPACE = "\u2581"  # SentencePiece's space


def read_gguf_tokenizer(file: GGUFFile) -> tokenizers.Tokenizer:
    """Return the tokenizer in a GGUF file.

    Raises:
        ModelError: there is none, or it is of a kind that Quire does not build; put a tokenizer.json beside
            the file.
    """
    try:
        return _build(file)
    except (ModelError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, or panics
        raise ModelError(f"the tokenizer in {file.path} cannot be built: {error!s:.500}") from error


def _build(file: GGUFFile) -> tokenizers.Tokenizer:
    kind = _text(file, "model")
    if kind == "gpt2":
        backend = _byte_level(file)
    elif kind == "llama":
        backend = _sentence_piece(file)
    else:
        raise _refusal(file, f"of the model {kind or 'none':.100}", "gpt2 and llama")
    tokens, types = _texts(file, "tokens"), _types(file)
    is_phi_3 = kind == "llama" and file.entry("general.architecture", str) == "phi3"  # not Phi-4
    for is_special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [token for token, found in zip(tokens, types, strict=False) if found == wanted]
        backend.add_tokens(
            [
                AddedToken(
                    token,
                    special=is_special,
                    normalized=False,
                    rstrip=is_phi_3 and token not in _KEEP_SPACE,
                )
                for token in added
            ]
        )
    adds_bos = file.entry(f"{_PREFIX}add_bos_token", bool)
    if adds_bos is None:
        adds_bos = kind == "llama" or WORDS[_text(file, "pre") or ""].begins_with_bos
    bos = _special(file, "bos", tokens) if adds_bos else []
    eos = _special(file, "eos", tokens) if file.entry(f"{_PREFIX}add_eos_token", bool) else []
    if bos or eos:
        backend.post_processor = processors.TemplateProcessing(
            single=[token["id"] for token in bos] + ["$A"] + [token["id"] for token in eos],
            special_tokens=bos + eos,
        )
    return backend


def _byte_level(file: GGUFFile) -> tokenizers.Tokenizer:
    rules = _text(file, "pre")
    if not rules:  # a file from before May 2024; its rules are probably not GPT-2's
        raise _refusal(file, "that names no pre-tokenizer", ", ".join(WORDS))
    words = WORDS.get(rules)
    if words is None:
        raise _refusal(file, f"with the pre-tokenizer {rules:.100}", ", ".join(WORDS))
    merges = [(left, right) for left, _, right in (text.partition(" ") for text in _texts(file, "merges"))]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=_vocabulary(file), merges=merges, ignore_merges=words.keeps_known)
    )
    words.configure(backend)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(file: GGUFFile) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: merges the pair with the best-scoring token first."""
    tokens, scores = _texts(file, "tokens"), _scores(file)
    vocabulary, types = _vocabulary(file), _types(file)
    if (cost := sum(len(token) ** 2 for token in tokens)) > _MAX_CUTS:
        raise _refusal(file, f"whose tokens are too long ({cost} characters squared)", f"up to {_MAX_CUTS}")
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        ranked += [(score, pair) for pair in known]
    ranked.sort(key=lambda entry: -entry[0])
    unknown = tokens[types.index(_UNKNOWN)] if _UNKNOWN in types else None
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[pair for _, pair in ranked],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = file.entry(f"{_PREFIX}add_space_prefix", bool) is not False
    steps = [normalizers.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    ends = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return backend


def _special(file: GGUFFile, name: str, tokens: list[str]) -> list[dict[str, Any]]:
    """Return the post-processor's token for this role, if the file names it.

    The role is its name there: its text may have another meaning in a template, such as "$B".
    """
    key = f"{_PREFIX}{name}_token_id"
    ids = special_ids(file.metadata.get(key), source=f"{file.path}: {key}", vocab_size=len(tokens))
    return [{"id": name, "ids": [token_id], "tokens": [tokens[token_id]]} for token_id in ids[:1]]


def _vocabulary(file: GGUFFile) -> dict[str, int]:
    tokens = _texts(file, "tokens")
    if not tokens:
        raise _refusal(file, "without tokens", "a vocabulary in tokenizer.ggml.tokens")
    return {token: number for number, token in enumerate(tokens)}


def _types(file: GGUFFile) -> list[int]:
    """Return the type of each token; empty if the file has none."""
    types: list[int] = file.entries(f"{_PREFIX}token_type", int)
    if types:
        _require_one_for_each_token(file, "token_type", len(types))
    for kind in types:
        if kind not in _TOKEN_TYPES:
            raise ModelError(
                f"{file.path}: {_PREFIX}token_type has {kind}; token types are {_TOKEN_TYPES[0]} to "
                f"{_TOKEN_TYPES[-1]}"
            )
    return types


def _scores(file: GGUFFile) -> list[float]:
    scores: list[float] = file.entries(f"{_PREFIX}scores", float)
    _require_one_for_each_token(file, "scores", len(scores))
    if any(map(math.isnan, scores)):
        raise ModelError(f"{file.path}: {_PREFIX}scores has NaN; they must be numbers")
    return scores


def _require_one_for_each_token(file: GGUFFile, name: str, count: int) -> None:
    if count != (num_tokens := len(_texts(file, "tokens"))):
        raise ModelError(
            f"{file.path}: {_PREFIX}{name} has {count} values; one is needed for each of the {num_tokens} "
            "tokens"
        )


def _text(file: GGUFFile, name: str) -> str | None:
    text: str | None = file.entry(f"{_PREFIX}{name}", str)
    return text


def _texts(file: GGUFFile, name: str) -> list[str]:
    return file.entries(f"{_PREFIX}{name}", str)


def _refusal(file: GGUFFile, what: str, known: str) -> ModelError:
    return ModelError(
        f"{file.path} has a tokenizer {what}; Quire builds {known}: put the model's tokenizer.json beside "
        "the file"
    )
