"""From a GGUF file's metadata to a tokenizer of the `tokenizers` library.

The file holds the vocabulary and names the rules by which text is cut into words; the rules are the published
tokenizers' own.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from quire.errors import ModelError
from quire.models.checkpoints.gguf.file import GGUFFile
from quire.models.checkpoints.special_ids import special_ids

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {  # by tokenizer.ggml.pre; None: GPT-2's
    "gpt-2": None,
    "qwen2": _WORDS.format(digits=r"\p{N}"),
    "llama-bpe": _WORDS.format(digits=r"\p{N}{1,3}"),
}
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types
_SPACE = "\u2581"  # stands for a space in SentencePiece's vocabularies


def read_gguf_tokenizer(file: GGUFFile) -> tokenizers.Tokenizer:
    """Return the tokenizer in a GGUF file.

    Raises:
        ModelError: there is none, or it is of a kind that Quire does not build; put a tokenizer.json beside
            the file.
    """
    kind = _entry(file, "model")
    if kind == "gpt2":
        backend = _byte_level(file)
    elif kind == "llama":
        backend = _sentence_piece(file)
    else:
        raise _refusal(file, f"of the model {kind}", "gpt2 and llama")
    tokens, types = _entry(file, "tokens"), _entry(file, "token_type") or []
    for is_special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [token for token, found in zip(tokens, types, strict=False) if found == wanted]
        backend.add_tokens([AddedToken(token, special=is_special, normalized=False) for token in added])
    source = f"{file.path}: tokenizer.ggml.bos_token_id"
    bos_ids = special_ids(_entry(file, "bos_token_id"), source=source, vocab_size=len(tokens))
    adds_bos = _entry(file, "add_bos_token")
    if bos_ids and (kind == "llama" if adds_bos is None else adds_bos):
        bos = bos_ids[0]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return backend


def _byte_level(file: GGUFFile) -> tokenizers.Tokenizer:
    rules = _entry(file, "pre") or "gpt-2"
    if rules not in _SPLITS:
        raise _refusal(file, f"with the pre-tokenizer {rules}", ", ".join(_SPLITS))
    merges = [tuple(merge.split(" ", 1)) for merge in _entry(file, "merges") or []]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=_vocabulary(file), merges=merges, ignore_merges=rules == "llama-bpe")
    )
    split = _SPLITS[rules]
    if split is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if rules == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(file: GGUFFile) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: the pair whose token has the best score is joined first."""
    tokens, scores = _entry(file, "tokens"), _entry(file, "scores") or []
    vocabulary = _vocabulary(file)
    types = _entry(file, "token_type") or []
    ranked = []
    for token, score in zip(tokens, scores, strict=False):
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
    has_prefix = _entry(file, "add_space_prefix") is not False
    steps = [normalizers.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    ends = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return backend


def _vocabulary(file: GGUFFile) -> dict[str, int]:
    tokens = _entry(file, "tokens")
    if not tokens:
        raise _refusal(file, "without tokens", "a vocabulary in tokenizer.ggml.tokens")
    return {token: number for number, token in enumerate(tokens)}


def _entry(file: GGUFFile, name: str) -> Any:
    return file.metadata.get(f"tokenizer.ggml.{name}")


def _refusal(file: GGUFFile, what: str, known: str) -> ModelError:
    return ModelError(
        f"{file.path} has a tokenizer {what}; Quire builds {known}: put the model's tokenizer.json beside "
        "the file"
    )
