"""Small tokenizers with the decoders that real models have."""

from __future__ import annotations

import functools
import json

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from quire.models.text.tokenizer import Tokenizer

SPECIALS = ["<s>", "</s>"]


def wrap(backend: tokenizers.Tokenizer, **settings) -> Tokenizer:
    defaults = {"special_tokens": {}, "eos_token_ids": (), "bos_token_id": None, "chat_template": None}
    return Tokenizer(backend, **{**defaults, **settings})


def byte_level(**settings) -> Tokenizer:
    """All bytes, some merges that end within a character, one added token that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    halves = ["Ã", "©", "ð", "Ł", "ĺ", "Ģ"]  # é is two bytes, an emoji four
    pieces = [*SPECIALS, *alphabet, "Ġthe", "hello", "STOP", "ĠST", "ðŁ", "ĺĢ", "aÃ", "©b"]
    assert set(halves) <= set(alphabet)
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    backend.add_tokens([AddedToken("<think> 思", special=False)])
    return wrap(backend, **settings)


def sentencepiece(kind: str, **settings) -> Tokenizer:
    """A byte-fallback vocabulary with the decoder of `kind`: llama, gemma or metaspace."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", "▁▁", "▁the", "▁STOP", "ST", "OP", "a", "b", "é", "漢", "▁漢", "!"]
    vocab = {piece: index for index, piece in enumerate([*SPECIALS, "<unk>", *bytes_, *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = {
        "llama": decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)]),
        "gemma": decoders.Sequence(chain),
        "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]),
    }[kind]
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return wrap(backend, **settings)


def trained(model, trainer, *, added=(), **parts) -> Tokenizer:
    """A tokenizer with a trained vocabulary; `parts` are its normalizer, pre-tokenizer and decoder."""
    backend = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    trainer.special_tokens = [AddedToken(text, special=True) for text in ["<unk>", *SPECIALS]]
    trainer.show_progress = False
    trainer.vocab_size = 600
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(list(added))
    return wrap(backend, eos_token_ids=[backend.token_to_id("</s>")])


CORPUS = [
    "The quick brown fox jumps over the lazy dog. It doesn't say what the café's <tool_call> means!",
    'def f(x): return {"name": "naïve", "n": [1, 22, 333]}  # Übergröße 漢字 🙂',
    "use the tools now, and then use them again: a b c d e f g h i j k l m n o p q r s t u v w x y z",
] * 3
ADDED = (
    AddedToken("<tool_call>", special=False, normalized=False),
    AddedToken("[TOOLS]", special=False, normalized=False, lstrip=True, rstrip=True),
    AddedToken("  ", special=False, normalized=False),
    AddedToken("now", special=False, normalized=True, single_word=True),
    AddedToken("<mask>", special=True, normalized=False, lstrip=True),
)


def _byte_level(*, added=ADDED, prefix_space=False, normalizer=None) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(
        models.BPE(),
        trainers.BpeTrainer(initial_alphabet=alphabet),
        added=added,
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=prefix_space),
        decoder=decoders.ByteLevel(),
        post_processor=processors.ByteLevel(trim_offsets=True),
    )


def _byte_fallback(decoder, *, normalizer=None, pre_tokenizer=None) -> Tokenizer:
    """A BPE vocabulary with spaces as SentencePiece writes them, and a token for every byte."""
    model = json.loads(
        trained(
            models.BPE(unk_token="<unk>"),
            trainers.BpeTrainer(),
            normalizer=normalizers.Replace(" ", "▁"),
        ).backend.to_str()
    )["model"]
    vocab = model["vocab"] | {f"<0x{byte:02X}>": len(model["vocab"]) + byte for byte in range(256)}
    merges = [tuple(pair) for pair in model["merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, pre_tokenizer, decoder
    backend.add_special_tokens([AddedToken(text, special=True) for text in ["<unk>", *SPECIALS]])
    backend.add_tokens(list(ADDED))
    return wrap(backend, eos_token_ids=[backend.token_to_id("</s>")])


def _unigram(scheme: str) -> Tokenizer:
    return trained(
        models.Unigram(),
        trainers.UnigramTrainer(unk_token="<unk>"),
        added=ADDED,
        normalizer=normalizers.NFKC(),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme),
        decoder=decoders.Metaspace(prepend_scheme=scheme),
    )


_LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
KINDS = {
    "byte level": _byte_level,
    "byte level, prefix space": lambda: _byte_level(prefix_space=True),
    "byte level, NFC": lambda: _byte_level(normalizer=normalizers.NFC()),
    "byte level, lower case": lambda: _byte_level(normalizer=normalizers.Lowercase()),
    "byte level, prepended": lambda: _byte_level(normalizer=normalizers.Prepend(" ")),
    "byte fallback, prepended": lambda: _byte_fallback(
        decoders.Sequence([*_LLAMA, decoders.Strip(" ", 1, 0)]),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "byte fallback": lambda: _byte_fallback(
        decoders.Sequence(_LLAMA), normalizer=normalizers.Replace(" ", "▁")
    ),
    "byte fallback, metaspace": lambda: _byte_fallback(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first"),
    ),
    "unigram, always": lambda: _unigram("always"),
    "unigram, first": lambda: _unigram("first"),
    "unigram, never": lambda: _unigram("never"),
    "word pieces": lambda: trained(
        models.WordPiece(unk_token="<unk>"),
        trainers.WordPieceTrainer(),
        added=ADDED,
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    ),
    "words": lambda: trained(
        models.WordLevel(unk_token="<unk>"),
        trainers.WordLevelTrainer(),
        added=ADDED,
        pre_tokenizer=pre_tokenizers.WhitespaceSplit(),
    ),
    "characters": lambda: trained(
        models.BPE(unk_token="<unk>"),
        trainers.BpeTrainer(),
        added=ADDED,
        pre_tokenizer=pre_tokenizers.Split("", "isolated"),
        decoder=decoders.Fuse(),
    ),
}
"""Tokenizers of all kinds, by name: what `tokenizers` can express and models have."""


@functools.cache
def of_kind(kind: str) -> Tokenizer:
    """Return one of the tokenizers in `KINDS`, which is shared."""
    return KINDS[kind]()
