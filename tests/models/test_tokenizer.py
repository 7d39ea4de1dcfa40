"""The tokenizer and chat templates against `transformers` on generated tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, processors

from checkpoints import CHAT_TEMPLATE, make_tokenizer
from quire.errors import InvalidRequestError, ModelError
from quire.models.checkpoints.tokenizers.reading import read_tokenizer
from quire.models.text.tokenizer import Tokenizer

TEXTS = [
    "",
    "the cache holds keys and values",
    "  two  spaces\n\n\tand a tab ",
    "naïve café — 中文, emoji 🙂👩‍👩‍👧, and ﬁ",
    "<|im_start|>user\nhi<|im_end|>",
    "a\u0000b\u200d",
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'What is a "KV block"? <b>é</b>'},
    {"role": "assistant", "content": "A fixed number of tokens."},
    {"role": "user", "content": "Thanks"},
]


def _make_sentencepiece_like(directory: Path) -> None:
    """Write a tokenizer in Llama 2's manner: "▁" for spaces, byte fallback, a bos token put in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "t", "h", "e", "c", "a", "▁t", "▁th", "▁the", "ca"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("c", "a")]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(params=["byte-level", "sentencepiece-like"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "byte-level":
        make_tokenizer(tmp_path)
    else:
        _make_sentencepiece_like(tmp_path)
    return tmp_path


def from_transformers(directory: Path) -> Any:
    """The same tokenizer by `transformers`, which takes seconds to import."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_and_text_equal_transformers(directory: Path, text: str, add_special_tokens: bool) -> None:
    ours, theirs = read_tokenizer(directory), from_transformers(directory)
    ids = ours.encode(text, add_special_tokens=add_special_tokens)
    assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("flags", [{"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize(
    "processor",
    [
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]),
    ],
    ids=["adds nothing", "adds a token"],
)
def test_what_stands_around_a_text_is_for_tokenizer_json_to_say(
    flags: dict[str, bool], processor: Any, tmp_path: Path
) -> None:
    """DeepSeek-R1-Distill-Qwen has add_bos_token true beside a tokenizer.json that adds none."""
    make_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = processor
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "LlamaTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | flags))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    text = "the cache"
    assert read_tokenizer(tmp_path).encode(text) == from_transformers(tmp_path).encode(text)


def test_facts_equal_transformers(directory: Path) -> None:
    ours, theirs = read_tokenizer(directory), from_transformers(directory)
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert set(theirs.all_special_ids) <= ours.special_token_ids


def test_token_texts_join_to_the_text(directory: Path) -> None:
    tokenizer = read_tokenizer(directory)
    ids = tokenizer.encode("the cat", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids)).lstrip() == "the cat"
    assert tokenizer.token_text(ids[-1])
    assert tokenizer.token_text(tokenizer.encode("é", add_special_tokens=False)[-1]) == "\ufffd"


def test_eos_ids_of_all_files_are_merged(directory: Path) -> None:
    named = read_tokenizer(directory).eos_token_ids
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    (directory / "config.json").write_text('{"eos_token_id": 9}')
    assert read_tokenizer(directory).eos_token_ids == (7, 9, *named)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("found", ["4294967295", "-1", '"2"', "true", "[3, 100000]", "[1.5]", '{"a": 1}'])
def test_an_end_that_is_no_token_id_is_an_error(directory: Path, file: str, found: str) -> None:
    (directory / file).write_text(f'{{"eos_token_id": {found}}}')
    with pytest.raises(ModelError, match=rf"{file}: eos_token_id has .*: the vocabulary has ids 0 to \d+"):
        read_tokenizer(directory)


def test_ids_go_up_to_the_larger_vocabulary_of_model_and_tokenizer(directory: Path) -> None:
    (directory / "config.json").write_text('{"vocab_size": 5000, "eos_token_id": 4999}')
    assert 4999 in read_tokenizer(directory).eos_token_ids
    (directory / "config.json").write_text('{"vocab_size": 5000, "eos_token_id": 5000}')
    with pytest.raises(ModelError, match=r"eos_token_id has 5000.*0 to 4999"):
        read_tokenizer(directory)


def test_a_beginning_that_is_no_token_id_is_an_error(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "config.json").write_text('{"bos_token_id": 123456}')
    with pytest.raises(ModelError, match=r"config\.json: bos_token_id has 123456"):
        read_tokenizer(tmp_path)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer(tmp_path)
    assert len(tokenizer.encode("a")) == 1
    assert tokenizer.decode(tokenizer.encode("the cache holds")) == "the cache holds"


def test_only_tokenizers_that_encode_and_template_alike_share_a_fingerprint(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    original = read_tokenizer(tmp_path)
    assert read_tokenizer(tmp_path).fingerprint == original.fingerprint

    def other(**changes: Any) -> Tokenizer:
        facts = {"special_tokens": {}, "eos_token_ids": (), "bos_token_id": None, "chat_template": None}
        backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        return Tokenizer(changes.pop("backend", backend), **{**facts, **changes})

    more = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    more.add_tokens(["<think>"])
    split = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "isolated")
    different = [
        other(),
        other(chat_template="{{ messages }}"),
        other(special_tokens={"bos_token": "<s>"}),
        other(backend=more),
        other(backend=split),
    ]
    assert len({tokenizer.fingerprint for tokenizer in [original, *different]}) == 6
    assert other(eos_token_ids=(7,)).fingerprint == other().fingerprint


@pytest.mark.parametrize("text", ["\ud800", "ab\udfff", "\ud83d\ude42"])
def test_lone_surrogates_are_refused(directory: Path, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
        read_tokenizer(directory).encode(text)


@pytest.mark.parametrize("length", [1999, 2000, 2001, 30_000])
def test_long_texts_have_the_same_ids(directory: Path, length: int) -> None:
    tokenizer = read_tokenizer(directory)
    text = ("".join(TEXTS) * length)[:length]
    assert tokenizer.encode(text) == tokenizer.backend.encode(text).ids
    with pytest.raises(InvalidRequestError, match=f"U\\+D800 at character {length}"):
        tokenizer.encode(text + "\ud800")


def test_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        read_tokenizer(tmp_path)


TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "blocks": """
    {%- for message in messages %}
        {%- if loop.first and message.role == 'system' %}
            {{- bos_token + message.content | trim + '\\n' }}
            {%- continue %}
        {%- endif %}
        {% if message['role'] == 'assistant' %}
            {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
        {% else %}
            {{ message | tojson }} {{ [1, 'é<'] | tojson(indent=2) }}
        {% endif %}
    {%- endfor %}
    {% if add_generation_prompt %}go{% endif %}
    {% if tools %}tools{% endif %}""",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    "{% if ns.n == 3 %}{% break %}{% endif %}{% endfor %}{{ messages[-1]['content'].split('a')[0] }}",
    "refuses": "{{ raise_exception('roles must alternate') }}",
}


@pytest.mark.parametrize("name", ["chatml", "blocks", "namespaces"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_template_equals_transformers(tmp_path: Path, name: str, add_generation_prompt: bool) -> None:
    make_tokenizer(tmp_path, chat_template=TEMPLATES[name])
    expected = from_transformers(tmp_path).apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=add_generation_prompt) == expected


@pytest.mark.parametrize("content", ["", "It is", "Two  ", "a\n\nb"])
def test_a_continued_message_equals_transformers(tmp_path: Path, content: str) -> None:
    make_tokenizer(tmp_path, chat_template=TEMPLATES["chatml"])
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    whole = from_transformers(tmp_path).apply_chat_template(messages, tokenize=False)
    tokenizer = read_tokenizer(tmp_path)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert whole.startswith(text)
    assert text.endswith(f"assistant\n{content}")


@pytest.mark.parametrize(
    ("message", "template", "words"),
    [
        ({"content": None}, "chatml", "has no text"),
        ({"content": "a", "tool_calls": [{}]}, "chatml", "calls tools"),
        ({"content": "a"}, "namespaces", "does not show the content"),
    ],
)
def test_a_message_that_cannot_be_continued(tmp_path: Path, message, template: str, words: str) -> None:
    make_tokenizer(tmp_path, chat_template=TEMPLATES[template])
    messages = [*MESSAGES, {"role": "assistant", **message}]
    with pytest.raises(InvalidRequestError, match=words) as caught:
        read_tokenizer(tmp_path).apply_chat_template(
            messages, add_generation_prompt=False, continue_final_message=True
        )
    assert caught.value.param == "continue_final_message"


def _set_template(directory: Path, template: Any) -> Tokenizer:
    make_tokenizer(directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return read_tokenizer(directory)


def test_the_default_of_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert _set_template(tmp_path, named).apply_chat_template(MESSAGES) == "yes"


_FOR_TOOLS = """
{%- macro named(tool, depth) %}{{ named(tool, depth - 1) if depth else tool.name }}{% endmacro %}
{% for tool in tools %}
{{ named(tool, 2) }}
{% endfor %}
    {{ messages[0].content }}
"""
_FOR_NO_TOOLS = "\n{% if tools is defined %}  {{ messages[0].content }}{% endif %}\n\n"


@pytest.mark.parametrize("in_files", [False, True])
def test_conversations_with_tools_have_a_template_of_their_own(tmp_path: Path, in_files: bool) -> None:
    """As in Hermes 2 and 3."""
    texts = {"default": _FOR_NO_TOOLS, "tool_use": _FOR_TOOLS}
    _set_template(tmp_path, None if in_files else [{"name": k, "template": v} for k, v in texts.items()])
    if in_files:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "chat_template.jinja").write_text(_FOR_NO_TOOLS)
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(_FOR_TOOLS)
    found, wanted = read_tokenizer(tmp_path), from_transformers(tmp_path)
    for tools in (None, [{"name": "search"}, {"name": "add"}]):
        text = wanted.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
        assert found.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=False) == text


def test_a_template_file_wins(tmp_path: Path) -> None:
    _set_template(tmp_path, "from the settings")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert read_tokenizer(tmp_path).apply_chat_template(MESSAGES) == "from the file"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{% if %}", "not valid jinja2"),
        (TEMPLATES["refuses"], "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "refuses these messages"),
        ("{{ messages[9]['content'].x }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses these messages"),
        ("{{ cycler.__init__.__globals__.os.popen('id') }}", "refuses these messages"),
    ],
)
def test_refusals_belong_to_the_request(tmp_path: Path, template: str | None, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        _set_template(tmp_path, template).apply_chat_template(MESSAGES)
    assert caught.value.param == "messages"


def test_strftime_now(tmp_path: Path) -> None:
    assert len(_set_template(tmp_path, "{{ strftime_now('%Y') }}").apply_chat_template(MESSAGES)) == 4


def test_variables_of_a_template(tmp_path: Path) -> None:
    template = "{{ enable_thinking }} {{ documents }} {{ add_generation_prompt }}"
    tokenizer = _set_template(tmp_path, template)
    variables = {"enable_thinking": False, "documents": [1]}
    assert tokenizer.apply_chat_template(MESSAGES, variables=variables) == "False [1] True"
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(InvalidRequestError, match=name) as caught:
            tokenizer.apply_chat_template(MESSAGES, variables={name: []})
        assert caught.value.param == "chat_template_kwargs"
