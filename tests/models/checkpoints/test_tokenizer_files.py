"""Tokenizer files of every age and mixture, against what `transformers` makes of the same directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from quire.errors import ModelError
from quire.models.checkpoints.tokenizers.reading import read_tokenizer

TEXTS = [
    "",
    "the cat",
    " the  cat ",
    "<s>the</s> cat<|im_end|> the",
    "the<extra>the <extra> cat<TOOL>",
    "cat [PAD]<image>the<pad>the<bos>the<|endoftext|>the",
    "e\u0301 é 12 cat's\n\n the",
]
MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "smollm3", "granite", "olmo2"),
    *("gemma3", "mistral3", "ministral3", "qwen2_5_vl", "qwen3_vl", "llava", "smolvlm", "gpt_oss"),
)
CLASSES = (
    "LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast", "Qwen2Tokenizer",
    "Qwen2TokenizerFast", "GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast",
    "TokenizersBackend", "SomethingElse", None,
)  # fmt: skip
IN_VOCABULARY = ("<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<|endoftext|>", "<|im_end|>", "<extra>")
VOCAB_SIZE = 400


def _byte_level() -> tokenizers.Tokenizer:
    pieces = [*IN_VOCABULARY, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġc", "Ġca", "Ġcat"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "c"), ("Ġc", "a"), ("Ġca", "t")]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces() -> tokenizers.Tokenizer:
    """SentencePiece's vocabulary, as the files of Llama 2 have it."""
    pieces = [*IN_VOCABULARY, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"thecax"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "c"), ("▁c", "a"), ("▁ca", "t"), ("▁", "▁")]
    pieces += ["".join(merge) for merge in merges]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend


_TOKENS = st.sampled_from([*IN_VOCABULARY, "[PAD]", "<TOOL>", "<image>"])


@st.composite
def _objects(draw: st.DrawFn, *, tagged: bool = False) -> dict[str, Any]:
    flags = {name: draw(st.booleans()) for name in ("lstrip", "rstrip", "normalized")}
    return {"content": draw(_TOKENS), "single_word": False, **flags} | (
        {"__type": "AddedToken"} if tagged else {}
    )


@st.composite
def _roles(draw: st.DrawFn, *, tagged: bool) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(["bos_token", "eos_token", "unk_token", "pad_token"]), unique=True))
    values = _TOKENS | _objects(tagged=tagged)
    return {name: draw(values | st.none() if tagged else values) for name in names}


@st.composite
def _directories(draw: st.DrawFn) -> dict[str, Any]:
    """Return the files of a tokenizer, but for the tokenizer.json itself, by name."""
    files: dict[str, Any] = {}
    if draw(st.booleans()):
        files["config.json"] = {"model_type": draw(st.sampled_from(MODEL_TYPES)), "vocab_size": VOCAB_SIZE}
    config: dict[str, Any] = {**draw(_roles(tagged=True))}
    config["tokenizer_class"] = draw(st.sampled_from(CLASSES if files else CLASSES[:-1]))
    for name in ("add_bos_token", "add_eos_token", "legacy", "add_prefix_space", "split_special_tokens"):
        if draw(st.integers(0, 2)) == 0:
            config[name] = draw(st.booleans())
    if draw(st.booleans()):
        config["clean_up_tokenization_spaces"] = True
    extra = draw(st.sampled_from(["", "extra_special_tokens", "additional_special_tokens", "named", "own"]))
    if extra in ("extra_special_tokens", "additional_special_tokens"):
        config[extra] = draw(st.lists(_TOKENS, unique=True, max_size=3))
    elif extra == "named":
        config["extra_special_tokens"] = {"image_token": "<image>"}
    elif extra == "own":
        config["image_token"] = "<image>"
    config["sep_token"] = draw(st.sampled_from([None, ""]))
    age = draw(st.sampled_from(["new", "old", "old", "oldest"]))
    if age == "new":
        config["added_tokens_decoder"] = {
            str(IN_VOCABULARY.index(token["content"])): token | {"special": draw(st.booleans())}
            for token in draw(st.lists(_objects(), max_size=4))
            if token["content"] in IN_VOCABULARY
        }
    else:
        files["special_tokens_map.json"] = draw(_roles(tagged=False))
        if age == "oldest":
            files["added_tokens.json"] = {
                token: IN_VOCABULARY.index(token)
                for token in draw(st.lists(_TOKENS, unique=True, max_size=3))
                if token in IN_VOCABULARY
            }
    return {"tokenizer_config.json": config, **files}


@st.composite
def _backends(draw: st.DrawFn) -> str:
    backend = draw(st.sampled_from([_byte_level, _pieces]))()
    listed = draw(st.lists(st.sampled_from(IN_VOCABULARY[1:]), unique=True, max_size=4))
    backend.add_tokens([AddedToken(text, special=draw(st.booleans()), normalized=False) for text in listed])
    if draw(st.booleans()):
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend.to_str()


@pytest.fixture(scope="module", autouse=True)
def _quiet_transformers() -> None:
    import transformers  # takes seconds

    transformers.logging.set_verbosity_error()


def _object(*, normalized: bool) -> dict[str, Any]:
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": normalized}
    return {"__type": "AddedToken", "content": "<unk>", **flags}


# A text is not the same as an object with the flags that the text gets.
ONE_TOKEN = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<unk>",
    "eos_token": _object(normalized=True),
    "unk_token": _object(normalized=False),
    "added_tokens_decoder": {},
}


@given(text=_backends(), files=_directories())
@example(text=_byte_level().to_str(), files={"tokenizer_config.json": ONE_TOKEN})
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_ids_and_texts_are_those_of_transformers(text: str, files: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for file in tmp_path.iterdir():
        file.unlink()
    (tmp_path / "tokenizer.json").write_text(text)
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    try:
        ours = read_tokenizer(tmp_path)
    except ModelError as error:
        assert "which is not in the vocabulary" in str(error)  # transformers fails when it meets such a text
        reject()
    try:
        theirs(TEXTS)
    except Exception as error:
        assert "Unk token `None`" in str(error)  # Gemma's without one
        reject()
    for sample in TEXTS:
        for add in (True, False):
            ids = ours.encode(sample, add_special_tokens=add)
            assert ids == theirs.encode(sample, add_special_tokens=add)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special_tokens.get("bos_token") == theirs.bos_token
    assert ours.special_tokens.get("eos_token") == theirs.eos_token
    assert repr(ours.backend.get_added_tokens_decoder()) == repr(theirs.added_tokens_decoder)
    if theirs.eos_token is not None and theirs.eos_token_id is not None:
        assert theirs.eos_token_id in ours.eos_token_ids


def _write(path: Path, **files: Any) -> None:
    """Write a small tokenizer with other files beside it, whose names have two underscores for the dot."""
    (path / "tokenizer.json").write_text(_byte_level().to_str())
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("__", ".")).write_text(text)


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]


@pytest.mark.parametrize("has_file", [True, False])
@pytest.mark.parametrize("extra", [{}, {"tool_use": "more tools"}, {"rag": "documents"}])
@pytest.mark.parametrize(
    "template", [None, "one", NAMED, {one["name"]: one["template"] for one in NAMED}, NAMED[1:], NAMED[:1]]
)
def test_the_template_is_that_of_transformers(
    template: Any, extra: dict[str, str], has_file: bool, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    _write(tmp_path, config__json={"model_type": "llama"})
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {} if template is None else {"chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if has_file:
        (tmp_path / "chat_template.jinja").write_text("of the file")
    for name, text in extra.items():
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), read_tokenizer(tmp_path)
    for tools in (None, [{"type": "function"}]):
        try:
            wanted = theirs.get_chat_template(tools=tools)
        except ValueError:  # there is none, or none for this
            continue
        assert ours.has_chat_template
        assert jinja2.Template(ours.chat_template_source).render(tools=tools) == wanted


def test_a_token_that_the_model_has_no_vector_for_is_left_out(tmp_path: Path) -> None:
    size = len(json.loads(_byte_level().to_str())["model"]["vocab"])
    settings = {"extra_special_tokens": ["<new>", "<newer>"], "pad_token": "<s>"}
    _write(tmp_path, config__json={"vocab_size": size + 1}, tokenizer_config__json=settings)
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.encode("<new><s>") == [size, 1]
    assert max(tokenizer.encode("<newer>")) < size
    assert tokenizer.added_tokens == {"<new>": size, "<s>": 1}


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_another_format_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ModelError, match=rf"no tokenizer\.json, .*; convert {name} by saving it"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": ["<s>"]}, "added_tokens_decoder is .* an object"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"x": "<s>"}},
            "the key 'x'; it must be a token id",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: "<s>"}}, "it must be a token id"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": {"content": ""}}}, r"decoder\.1 is "),
        ("tokenizer_config.json", {"extra_special_tokens": [["<s>"]]}, "extra_special_tokens is "),
        (
            "tokenizer_config.json",
            {"extra_special_tokens": ["x"] * 70_000},
            "has 70000 tokens; at most 65536",
        ),
        ("tokenizer_config.json", {"extra_special_tokens": {"a": 3}}, "a is 3; it must be a text"),
        ("tokenizer_config.json", {"tokenizer_class": ["x"], "image_token": "x" * 5000}, "image_token is "),
        ("special_tokens_map.json", {"additional_special_tokens": [3]}, "additional_special_tokens is 3"),
        ("added_tokens.json", {"<s>": "1"}, "has '1' for '<s>'; it must be a token id"),
        ("added_tokens.json", {"": 1}, r"added_tokens\.json is ''"),
    ],
)
def test_unusable_entries_are_named(file: str, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / file).write_text(json.dumps(values))
    with pytest.raises(ModelError, match=message):
        read_tokenizer(tmp_path)
