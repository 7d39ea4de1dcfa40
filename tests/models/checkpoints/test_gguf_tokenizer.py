"""Tokenizers in GGUF files: the ids that `transformers` finds for the same vocabularies."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers

from checkpoints import CHAT_TEMPLATE, make_tokenizer
from quire.errors import ModelError
from quire.models.checkpoints.gguf.words import WORDS
from quire.models.checkpoints.tokenizers.reading import read_tokenizer

TEXTS = [
    "the cache holds keys and values of the tokens",
    "  It's 12345 o'clock,\n\n\tisn't it?  I'LL see… ",
    "größer 漢字 e\u0301 🙂<|im_start|>user<|im_end|>x",
    "",
]


def _write(path: Path, model: str, tokens: list[str], *, architecture: str = "llama", **entries: Any) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for name, value in entries.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(f"tokenizer.{name.replace('__', '.')}", value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return path


def _byte_level(published: Path, path: Path, *, pre: str, **entries: Any) -> Path:
    """Write the published tokenizer's vocabulary with the rules `pre`; empty: they are not named."""
    model = json.loads((published / "tokenizer.json").read_text())
    tokens = sorted(model["model"]["vocab"], key=model["model"]["vocab"].get)
    special = {entry["content"] for entry in model["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["model"]["merges"]]
    return _write(
        path,
        "gpt2",
        tokens,
        ggml__merges=merges,
        ggml__token_type=[3 if token in special else 1 for token in tokens],
        **({"ggml__pre": pre} if pre else {}),
        **{"ggml__bos_token_id": 0, "ggml__eos_token_id": 2} | entries,
    )


def test_the_same_as_the_tokenizer_it_was_made_of(published: Path, tmp_path: Path) -> None:
    wanted = read_tokenizer(published)
    file = _byte_level(published, tmp_path / "m.gguf", pre="gpt-2", chat_template=CHAT_TEMPLATE)
    found = read_tokenizer(file)
    for text in TEXTS:
        ids = wanted.encode(text)
        assert found.encode(text) == ids
        assert found.decode(ids) == wanted.decode(ids)
    assert (found.bos_token_id, found.eos_token_ids) == (0, (2,))
    assert found.special_token_ids == wanted.special_token_ids
    messages = [{"role": "user", "content": "hello"}]
    assert found.apply_chat_template(messages) == wanted.apply_chat_template(messages)


def test_as_the_text_of_a_tokenizer_json(published: Path, tmp_path: Path) -> None:
    file = _byte_level(published, tmp_path / "m.gguf", pre="gpt-2")
    text = read_tokenizer(file).backend.to_str()
    found, wanted = tokenizers.Tokenizer.from_str(text), read_tokenizer(published)
    assert [found.encode(text).ids for text in TEXTS] == [wanted.encode(text) for text in TEXTS]


@pytest.mark.parametrize("pre", ["qwen2", "qwen35"])
def test_the_rules_of_qwen(pre: str, published: Path, tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer  # takes seconds
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    model = json.loads((published / "tokenizer.json").read_text())["model"]
    merges = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]
    ]
    wanted = (Qwen2Tokenizer if pre == "qwen2" else Qwen3_5Tokenizer)(
        vocab=model["vocab"], merges=merges, extra_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    found = read_tokenizer(_byte_level(published, tmp_path / "m.gguf", pre=pre))
    for text in TEXTS:
        assert found.encode(text) == wanted.encode(text)


def test_the_rules_of_llama_3_keep_up_to_three_digits_together(published: Path, tmp_path: Path) -> None:
    found = read_tokenizer(_byte_level(published, tmp_path / "m.gguf", pre="llama-bpe"))
    words = [word for word, _ in found.backend.pre_tokenizer.pre_tokenize_str("a 12345, I'LL go\n\n x")]
    assert words == ["a", "Ġ", "123", "45", ",", "ĠI", "'LL", "Ġgo", "ĊĊ", "Ġx"]


@pytest.mark.parametrize(
    ("pre", "wanted"),
    [
        ("refact", "It|'s| aBc|,| |1|2|3|4|5| e|\u0301|e|\n\n| x|/|Y|/|\n|漢字|、|か|    | end"),
        ("smaug-bpe", "It|'s| aBc|,| |123|45| e|\u0301e|\n\n| x|/Y|/\n|漢字|、か|    | end"),
        ("qwen35", "It|'s| aBc|,| |1|2|3|4|5| e\u0301e|\n\n| x|/Y|/\n|漢字|、か|    | end"),
        ("tekken", "It|'s| a|Bc|,| |1|2|3|4|5| e\u0301e|\n\n| x|/Y|/\n|漢字|、か|    | end"),
        ("gpt-4o", "It's| a|Bc|,| |123|45| e\u0301e|\n\n| x|/Y|/\n|漢字|、か|    | end"),
        ("llama4", "It's| a|Bc|,| |123|45| e\u0301e|\n\n| x|/Y|/\n|漢字|、か|    | end"),
        ("deepseek-v3", "It|'s| aBc|,| |123|45| e\u0301e|\n\n| x|/Y|/\n|漢字|、|か|    | end"),
    ],
)
def test_the_rules_of_other_tokenizers(pre: str, wanted: str, published: Path, tmp_path: Path) -> None:
    """As the regular expressions in the tokenizer.json of Granite 3, OLMo 2, Qwen3.5 and so on cut it."""
    text = wanted.replace("|", "")
    found = read_tokenizer(_byte_level(published, tmp_path / "m.gguf", pre=pre))
    words = found.backend.pre_tokenizer.pre_tokenize_str(text)
    assert "|".join(text[start:end] for _, (start, end) in words) == wanted


@pytest.mark.parametrize("pre", WORDS)
def test_every_text_comes_back(pre: str, published: Path, tmp_path: Path) -> None:
    found = read_tokenizer(_byte_level(published, tmp_path / "m.gguf", pre=pre))
    for text in TEXTS[:2]:
        assert found.decode(found.encode(text, add_special_tokens=False)) == text


def test_a_token_at_the_start_where_the_file_asks_for_it(published: Path, tmp_path: Path) -> None:
    file = _byte_level(published, tmp_path / "m.gguf", pre="gpt-2", ggml__add_bos_token=True)
    found = read_tokenizer(file)
    assert found.encode("the")[0] == 0
    assert found.encode("the", add_special_tokens=False)[0] != 0


def test_a_token_at_the_start_of_llama_3_unless_the_file_forbids_it(published: Path, tmp_path: Path) -> None:
    """As its tokenizer.json asks for; llama.cpp's conversion wrote no add_bos_token."""
    found = read_tokenizer(_byte_level(published, tmp_path / "m.gguf", pre="llama-bpe"))
    assert found.encode("the") == [0, *found.encode("the", add_special_tokens=False)]
    file = _byte_level(published, tmp_path / "no.gguf", pre="llama-bpe", ggml__add_bos_token=False)
    assert read_tokenizer(file).encode("the")[0] != 0


@pytest.mark.parametrize("has_bos", [True, False])
def test_a_token_at_the_end_where_the_file_asks_for_it(
    published: Path, tmp_path: Path, has_bos: bool
) -> None:
    """As llama.cpp tokenizes prompts; embedding models are made so."""
    entries = {"ggml__add_bos_token": has_bos, "ggml__add_eos_token": True}
    found = read_tokenizer(_byte_level(published, tmp_path / "m.gguf", pre="gpt-2", **entries))
    ids = found.encode("the", add_special_tokens=False)
    assert found.encode("the") == [0] * has_bos + ids + [2]
    no = _byte_level(published, tmp_path / "no.gguf", pre="gpt-2", ggml__add_eos_token=False)
    assert read_tokenizer(no).encode("the") == ids


@pytest.mark.parametrize("text", ["$B:1", "$A", "$", "a:b", ":", "<s>:1"])
def test_the_text_of_a_token_around_a_prompt_says_nothing_else(tmp_path: Path, text: str) -> None:
    """`tokenizers` would take some of these for a prompt, or for a second one, which ends it in a panic."""
    tokens = ["x", "xx", text, "</s>"]
    entries = {"ggml__pre": "gpt-2", "ggml__merges": ["x x"], "ggml__add_bos_token": True}
    entries |= {"ggml__add_eos_token": True, "ggml__bos_token_id": 2, "ggml__eos_token_id": 3}
    assert read_tokenizer(_write(tmp_path / "m.gguf", "gpt2", tokens, **entries)).encode("x") == [2, 0, 3]


def test_tokens_with_a_role_are_found_by_the_keys_that_llama_cpp_writes(
    published: Path, tmp_path: Path
) -> None:
    keys = gguf.Keys.Tokenizer
    roles = {"unk_token": keys.UNK_ID, "pad_token": keys.PAD_ID, "sep_token": keys.SEP_ID}
    roles |= {"mask_token": keys.MASK_ID, "cls_token": "tokenizer.ggml.cls_token_id"}
    entries = {key.removeprefix("tokenizer."): number for number, key in enumerate(roles.values(), start=3)}
    found = read_tokenizer(_byte_level(published, tmp_path / "m.gguf", pre="gpt-2", **entries))
    names = {name: found.token_name(number) for number, name in enumerate(roles, start=3)}
    assert found.special_tokens == names | {
        "bos_token": found.token_name(0),
        "eos_token": found.token_name(2),
    }


def test_a_role_that_no_token_has(published: Path, tmp_path: Path) -> None:
    """Published files have -1, also as an unsigned number; llama.cpp passes over it."""
    entries = {"ggml__padding_token_id": 2**31 - 1, "ggml__seperator_token_id": -1}
    found = read_tokenizer(_byte_level(published, tmp_path / "m.gguf", pre="gpt-2", **entries))
    assert found.special_tokens.keys() == {"bos_token", "eos_token"}
    wrong = _byte_level(published, tmp_path / "x.gguf", pre="gpt-2", ggml__padding_token_id="x")
    with pytest.raises(ModelError, match=r"ggml\.padding_token_id is of the type str, not int"):
        read_tokenizer(wrong)


def _sentence_piece(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """Join the pair with the best score, the first such, until none is left; bytes for what is unknown."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (scores[tokens.index(a + b)], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in tokens
        ]
        if not pairs:
            break
        place = max(pairs, key=lambda pair: (pair[0], -pair[1]))[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    ids = []
    for piece in pieces:
        found = [piece] if piece in tokens else [f"<0x{byte:02X}>" for byte in piece.encode()]
        ids += [tokens.index(token) for token in found]
    return ids


def test_sentence_piece(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    words = [
        "▁",
        "t",
        "h",
        "e",
        "c",
        "a",
        "s",
        "▁t",
        "he",
        "▁the",
        "▁c",
        "ca",
        "▁cac",
        "che",
        "▁cache",
        "▁the▁",
    ]
    tokens += words
    types += [1] * len(words)
    scores = [0.0] * 259 + [float(-number) for number in range(len(words))]
    entries = {
        "ggml__token_type": types,
        "ggml__scores": scores,
        "ggml__bos_token_id": 1,
        "ggml__eos_token_id": 2,
    }
    found = read_tokenizer(_write(tmp_path / "m.gguf", "llama", tokens, **entries))
    for text in ["the cache", "cache the  each", "é the", "hat"]:
        ids = found.encode(text, add_special_tokens=False)
        assert ids == _sentence_piece(text, tokens, scores)
        assert found.encode(text) == [1, *ids]
        assert found.decode(ids) == text


def test_a_tokenizer_beside_the_file_is_used(published: Path, tmp_path: Path) -> None:
    file = _write(tmp_path / "m.gguf", "bert", ["a", "b"], ggml__eos_token_id=1)
    with pytest.raises(
        ModelError, match=r"a tokenizer of the model bert; .*put the model's tokenizer\.json beside"
    ):
        read_tokenizer(file)
    (tmp_path / "tokenizer.json").write_bytes((published / "tokenizer.json").read_bytes())
    found = read_tokenizer(file)
    assert found.encode("the cache") == read_tokenizer(published).encode("the cache")
    assert found.eos_token_ids == (1,)


def test_the_end_of_a_turn_ends_an_answer_although_no_entry_names_it(tmp_path: Path) -> None:
    """As in files of Phi-3, whose eos_token_id is that of <|endoftext|>."""
    tokens = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|end|>", "a"]
    entries = {"ggml__token_type": [2, 3, 3, 3, 3, 3, 1], "ggml__scores": [0.0] * 7}
    file = _write(tmp_path / "m.gguf", "llama", tokens, ggml__eos_token_id=3, **entries)
    assert read_tokenizer(file).eos_token_ids == (3, 5)


@pytest.mark.parametrize("name", ["bos", "eos", "eot"])
def test_a_special_id_outside_the_vocabulary_is_an_error(published: Path, tmp_path: Path, name: str) -> None:
    file = _byte_level(published, tmp_path / "m.gguf", pre="gpt-2", **{f"ggml__{name}_token_id": 99999})
    with pytest.raises(ModelError, match=rf"ggml\.{name}_token_id has 99999.*ids 0 to \d+"):
        read_tokenizer(file)


def test_unknown_rules_are_named(published: Path, tmp_path: Path) -> None:
    file = _byte_level(published, tmp_path / "m.gguf", pre="hieroglyphs")
    with pytest.raises(
        ModelError, match="the pre-tokenizer hieroglyphs; Quire builds gpt-2, olmo, starcoder"
    ):
        read_tokenizer(file)


def test_rules_that_are_not_named_are_not_guessed(published: Path, tmp_path: Path) -> None:
    """As in files that were converted before May 2024: Qwen1.5 and Llama 3 do not cut text as GPT-2 does."""
    file = _byte_level(published, tmp_path / "m.gguf", pre="")
    with pytest.raises(
        ModelError, match=r"that names no pre-tokenizer; .*put the model's tokenizer\.json beside"
    ):
        read_tokenizer(file)


def test_conversations_with_tools_have_a_template_of_their_own(published: Path, tmp_path: Path) -> None:
    templates = {"chat_template": "none", "chat_template__tool_use": "{{ tools[0].name }}"}
    found = read_tokenizer(_byte_level(published, tmp_path / "m.gguf", pre="gpt-2", **templates))
    messages = [{"role": "user", "content": "hello"}]
    assert found.apply_chat_template(messages) == "none"
    assert found.apply_chat_template(messages, tools=[{"name": "search"}]) == "search"


@pytest.mark.parametrize(("architecture", "space"), [("phi3", []), ("llama", ["\u2581", "<0x0A>"])])
def test_the_marks_of_phi_3_take_the_white_space_behind_them(
    tmp_path: Path, architecture: str, space: list[str]
) -> None:
    """Its tokenizer.json says that of each mark; a GGUF file has no place for it."""
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["\u2581", "a", "\u2581a"]
    marks = ["<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"]
    tokens = ["<unk>", "<s>", "</s>", *octets, *words, *marks]
    entries = {
        "ggml__token_type": [2, 3, 4, *[6] * 256, 1, 1, 1, 3, 3, 3, 3],
        "ggml__scores": [0.0] * 259 + [-1.0, -2.0, -3.0] + [0.0] * 4,
    }
    file = _write(tmp_path / "m.gguf", "llama", tokens, architecture=architecture, **entries)
    found = read_tokenizer(file)
    ids = found.encode("<|user|> \na<|end|>\n<|endoftext|>\n<|assistant|>")
    newline = ["\u2581", "<0x0A>"]
    user = ["\u2581a"] if architecture == "phi3" else ["\u2581", "\u2581", "<0x0A>", "a"]
    assert [found.token_name(token_id) for token_id in ids] == [
        *("<|user|>", *user, "<|end|>", *space, "<|endoftext|>", *newline, "<|assistant|>")
    ]
