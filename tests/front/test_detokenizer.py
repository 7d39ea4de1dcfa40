"""Token by token must give the text that the `tokenizers` library gives for all tokens at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.front.text.detokenizer import ByteLevelDecoder, ContextDecoder, DecoderFactory
from tokenizers_for_tests import SPECIALS, byte_level, sentencepiece, wrap

BYTE_LEVEL = byte_level()
SENTENCEPIECE = {kind: sentencepiece(kind) for kind in ("llama", "gemma", "metaspace")}
EMOJI = "😀"


def stream(tokenizer, ids, *, prompt=(0,), skip=True) -> list[str]:
    """Return what each token released, and what the end did."""
    decoder = DecoderFactory(tokenizer).make(list(prompt), skip_special_tokens=skip)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


def id_of(tokenizer, piece: str) -> int:
    found = tokenizer.backend.token_to_id(piece)
    assert found is not None
    return found


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=30),
    st.booleans(),
    st.sampled_from(["", "ééé", EMOJI]),
)
def test_byte_level_equals_decoding_at_once(ids, skip, text):
    ids = ids + BYTE_LEVEL.encode(text) + ids[:3]
    assert "".join(stream(BYTE_LEVEL, ids, skip=skip)) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300)
@given(st.data(), st.sampled_from(sorted(SENTENCEPIECE)), st.booleans())
def test_sentencepiece_equals_decoding_at_once(data, kind, skip):
    """Over words, specials, and characters spelled in bytes; faulty bytes have a test of their own."""
    tokenizer = SENTENCEPIECE[kind]
    words = [[index] for index in range(258 + 1, tokenizer.vocab_size)] + [[0], [1]]
    spelled = [[3 + byte for byte in character.encode()] for character in "é漢😀 \nA"]
    drawn = data.draw(st.lists(st.sampled_from(words + spelled), max_size=20))
    ids = [token_id for piece in drawn for token_id in piece]
    assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", sorted(SENTENCEPIECE))
def test_text_after_a_prompt_keeps_its_leading_space(kind):
    tokenizer = SENTENCEPIECE[kind]
    prompt, ids = [id_of(tokenizer, "a")], [id_of(tokenizer, "▁the")]
    assert "".join(stream(tokenizer, ids, prompt=prompt)) == " the"


def test_text_after_a_special_token_begins_anew():
    ids = [id_of(SENTENCEPIECE["llama"], "▁the")]
    assert "".join(stream(SENTENCEPIECE["llama"], ids, prompt=[0])) == "the"


@pytest.mark.parametrize("kind", sorted(SENTENCEPIECE))
@pytest.mark.parametrize("prompt", [[], [0]])
def test_verbatim_text_keeps_its_leading_space(kind, prompt):
    tokenizer = SENTENCEPIECE[kind]
    decoder = DecoderFactory(tokenizer).make(prompt, skip_special_tokens=True, is_verbatim=True)
    assert decoder.push(id_of(tokenizer, "▁the")) + decoder.flush() == " the"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE["llama"]], ids=["bytes", "sentencepiece"])
def test_an_unfinished_character_is_held_back(tokenizer):
    ids = (
        [id_of(tokenizer, piece) for piece in ("ðŁ", "ĺ", "Ģ")]
        if tokenizer is BYTE_LEVEL
        else [3 + byte for byte in EMOJI.encode()]
    )
    assert stream(tokenizer, ids) == [*[""] * (len(ids) - 1), EMOJI, ""]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE["llama"]], ids=["bytes", "sentencepiece"])
def test_the_end_flushes_an_unfinished_character(tokenizer):
    ids = [id_of(tokenizer, "ðŁ")] if tokenizer is BYTE_LEVEL else [3 + 0xF0, 3 + 0x9F]
    assert stream(tokenizer, ids) == [*[""] * len(ids), "\ufffd"]


def test_only_faulty_bytes_of_a_run_are_replaced():
    """The library would replace the whole run, and so take back a character that was released."""
    tokenizer = SENTENCEPIECE["llama"]
    ids = [id_of(tokenizer, "a"), *(3 + byte for byte in b"A\xffB"), id_of(tokenizer, "b")]
    assert stream(tokenizer, ids) == ["a", "A", "\ufffd", "B", "b", ""]


def test_ids_without_a_token_have_no_text():
    """Models pad their vocabulary beyond the tokenizer's."""
    assert stream(BYTE_LEVEL, [BYTE_LEVEL.vocab_size + 5]) == ["", ""]


def test_a_decoder_of_an_unknown_kind_holds_characters_back_too():
    from tokenizers import decoders

    tokenizer = byte_level()
    tokenizer.backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    other = wrap(tokenizer.backend)
    assert isinstance(DecoderFactory(other).make([0], skip_special_tokens=True), ContextDecoder)
    assert isinstance(DecoderFactory(BYTE_LEVEL).make([0], skip_special_tokens=True), ByteLevelDecoder)
    ids = [id_of(other, piece) for piece in ("hello", "ðŁ", "ĺ", "Ģ")]
    assert "".join(stream(other, ids)).startswith("hello")


def test_special_tokens_show_if_asked_for():
    ids = [id_of(BYTE_LEVEL, "hello"), id_of(BYTE_LEVEL, SPECIALS[1])]
    assert "".join(stream(BYTE_LEVEL, ids, skip=False)) == "hello</s>"
    assert "".join(stream(BYTE_LEVEL, ids)) == "hello"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, sentencepiece("llama")])
def test_single_special_tokens_show_if_asked_for(tokenizer):
    begin, end = (id_of(tokenizer, text) for text in ("<s>", "</s>"))
    decoder = DecoderFactory(tokenizer).make([begin], skip_special_tokens=True, shown=frozenset({end}))
    assert "".join(map(decoder.push, [begin, end, begin])) == "</s>"
