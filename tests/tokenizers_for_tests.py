"""Small tokenizers with the decoders that real models have."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from quire.models.tokenizer import Tokenizer

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
