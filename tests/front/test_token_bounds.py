"""No text has fewer tokens than the bound says, whatever kind of tokenizer it is."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

import quire
from call_through import call_through
from quire.front.text.token_bounds import TokenBound
from quire.models.checkpoints.tokenizers.reading import read_tokenizer
from quire.models.text.tokenizer import Tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MINI = read_tokenizer(Path(quire.__file__).parent / "mini")


def bpe(symbols, words, **options):
    """Return a model that merges each of the words from its characters."""
    vocab = {symbol: index for index, symbol in enumerate(symbols)}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            pair = (word[: end - 1], word[end - 1])
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append(pair)
    return models.BPE(vocab, merges, **options)


def tokenizer(model, *, normalizer=None, pre_tokenizer=None, added=()):
    backend = tokenizers.Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(added))
    return Tokenizer(backend, special_tokens={}, eos_token_ids=[0], bos_token_id=None, chat_template=None)


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
BYTE_WORDS = ["Ġ" * 16, "aaaa", "Ċ" * 5, "ÃĊ", "ÃĤ"]
PIECES = [*string.printable, "▁", "é", "中"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]

TOKENIZERS = {
    "mini": MINI,
    "byte-level": tokenizer(bpe(BYTES, BYTE_WORDS), pre_tokenizer=BYTE_LEVEL, added=["<|a b|>"]),
    "composing": tokenizer(
        bpe(BYTES, BYTE_WORDS), normalizer=normalizers.NFC(), pre_tokenizer=BYTE_LEVEL, added=["é"]
    ),
    "greedy added tokens": tokenizer(
        bpe(BYTES, BYTE_WORDS), pre_tokenizer=BYTE_LEVEL, added=[AddedToken("<m>", lstrip=True, rstrip=True)]
    ),
    "dropping": tokenizer(
        bpe(BYTES, BYTE_WORDS),
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+"), "removed"), BYTE_LEVEL]),
    ),
    "sentencepiece": tokenizer(
        bpe([*PIECES, *BYTE_TOKENS], ["▁" * 8, "aaaa"], byte_fallback=True),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "fused unknown": tokenizer(
        bpe(["<unk>", *PIECES], ["▁▁"], unk_token="<unk>", fuse_unk=True),
        pre_tokenizer=pre_tokenizers.Metaspace(),
    ),
    "unigram": tokenizer(
        models.Unigram([("<unk>", -10.0), *((piece, -3.0) for piece in PIECES), ("aaa", -1.0)], unk_id=0),
        pre_tokenizer=pre_tokenizers.Metaspace(),
    ),
    "word pieces": tokenizer(
        models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]"),
        pre_tokenizer=pre_tokenizers.Whitespace(),
    ),
}

BOUNDS = {name: TokenBound(one) for name, one in TOKENIZERS.items()}

texts = st.lists(
    st.sampled_from(
        [
            " " * 5,
            "a" * 7,
            "\n",
            "é",
            "e\u0301",
            "\u1100\u1161\u11a8",
            "\u03b1\u0313\u0301\u0345",
            "▁▁",
            "中",
            "😀",
            "<|a b|>",
            "<m>",
            "\t",
            "hello",
            "\u0301" * 3,
            "Ġ",
            "\x00",
        ]
    )
    | st.text(max_size=5),
    max_size=40,
).map("".join)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(text=texts, repeats=st.sampled_from([1, 3]))
def test_no_text_has_fewer_tokens(name, text, repeats):
    text = text.encode("utf-8", "ignore").decode() * repeats
    bound = BOUNDS[name]
    num_tokens = len(TOKENIZERS[name].encode(text))
    assert bound.min_num_tokens(text, 10**9) <= num_tokens
    most = bound.max_characters(num_tokens)
    assert most is None or len(text) <= most


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=50, deadline=None)
@given(text=texts, num_tokens=st.integers(0, 20))
def test_a_part_has_more_than_so_many_tokens(name, from_end, text, num_tokens):
    text = text.encode("utf-8", "ignore").decode() * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.front.text.token_bounds._PIECE", 7)
        part = BOUNDS[name].part_with(text, num_tokens, from_end=from_end)
    assert part == (text[len(text) - len(part) :] if from_end else text[: len(part)])
    assert part == text or len(TOKENIZERS[name].encode(part)) > num_tokens


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_in_pieces_that_compose_where_they_meet(name, monkeypatch):
    monkeypatch.setattr("quire.front.text.token_bounds._PIECE", 3)
    text = "ae\u0301\u1100\u1161\u11a8\u03b1\u0313\u0301\u0345" * 9
    assert BOUNDS[name].min_num_tokens(text, 10**9) <= len(TOKENIZERS[name].encode(text))


@pytest.mark.parametrize(("name", "longest"), [("mini", 16), ("byte-level", 16), ("sentencepiece", 8)])
def test_the_bound_is_as_close_as_the_longest_token(name, longest):
    bound = BOUNDS[name]
    assert bound.min_num_tokens("z" * 400_000, 10**9) >= 400_000 // longest
    assert bound.max_characters(10) == 10 * longest


@pytest.mark.parametrize("name", ["dropping", "word pieces", "fused unknown", "greedy added tokens"])
def test_tokenizers_that_drop_characters_have_no_limit_of_them(name):
    assert BOUNDS[name].max_characters(10) is None


def test_a_long_text_is_not_read_to_its_end(monkeypatch):
    bound = BOUNDS["mini"]
    read = []

    def noted(count, self, piece):
        read.append(piece)
        return count(self, piece)

    call_through(monkeypatch, TokenBound, "_count", noted)
    assert bound.min_num_tokens("a" * 4_000_000, 4096) > 4096
    assert len("".join(read)) <= 131_072
