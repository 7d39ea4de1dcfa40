"""Tokenizers as the families of models have them, chat templates of all manners, and what strangers write."""

from __future__ import annotations

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from quire.models.text.tokenizer import Tokenizer

COMMANDS = [
    AddedToken("<s>", special=True, normalized=False),
    AddedToken("</s>", special=True, normalized=False),
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False),
    AddedToken("<|user|>", special=True, normalized=False, rstrip=True),
    AddedToken("<|assistant|>", special=True, normalized=False, rstrip=True, lstrip=True),
    AddedToken("[INST]", special=True, normalized=True),
    AddedToken("[/INST]", special=True, normalized=True, single_word=True),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("</think>", special=False, normalized=False),
    AddedToken("<tool_call>", special=False, normalized=True),
    AddedToken("<\uff5cUser\uff5c>", special=False, normalized=False),
    AddedToken("[{word}]", special=False, normalized=True, single_word=True),
]
SPACES = [AddedToken("  ", special=False, normalized=False), AddedToken("\n\n", special=False)]
SPELLINGS = [token.content for token in COMMANDS]

_MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("an", "d")]
_SPACED = ["▁", "▁t", "▁th", "▁the", "▁a", "▁an"]
_SPACED_MERGES = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "a"), ("▁a", "n")]


def _bytes() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _byte_level(
    *, nfc: bool = False, prefix_space: bool = False, merged: bool = False
) -> tokenizers.Tokenizer:
    pieces = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "th",
        "the",
        "in",
        "an",
        "and",
        "Ġt",
        "Ġth",
        "Ġthe",
    ]
    merges = [*_MERGES, ("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e")]
    if merged:  # the model itself has pieces that spell commands, and makes them of ordinary text
        pieces += ["<s", "<s>", "/s", "</s", "</s>"]
        merges += [("<", "s"), ("<s", ">"), ("/", "s"), ("<", "/s"), ("</s", ">")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={one: at for at, one in enumerate(pieces)}, merges=merges)
    )
    backend.pre_tokenizer = (
        pre_tokenizers.Split(tokenizers.Regex(r"\s+|[^\s]+"), "isolated")
        if merged
        else pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    )
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _lowercase() -> tokenizers.Tokenizer:
    backend = _byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return backend


def _whole_words() -> tokenizers.Tokenizer:
    """Its model takes a word that is in the vocabulary as it is, commands too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "the", "\u0120the", "<|im_end|>", "</think>", "\u0120<s>"]
    vocab = {one: at for at, one in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(r" ?[^\s]+|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(kind: str) -> tokenizers.Tokenizer:
    plain = [chr(code) for code in range(33, 127)]
    pieces = ["<unk>", "<s>", "</s>", *_bytes(), *plain, *_SPACED, "th", "the", "in", "an", "and", "<|user|>"]
    model = models.BPE(
        vocab={one: at for at, one in enumerate(pieces)},
        merges=[*_MERGES, *_SPACED_MERGES],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    if kind == "llama2":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind == "gemma":
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def _unigram() -> tokenizers.Tokenizer:
    plain = [(chr(code), -8.0) for code in range(33, 127)]
    spaced = [("▁", -4.0), ("▁the", -3.0), ("the", -3.5), ("▁and", -3.2), ("in", -4.0)]
    commands = [("<s>", 0.0), ("</s>", 0.0), ("<|im_end|>", 0.0)]
    model = models.Unigram(
        [("<unk>", 0.0), *commands, *((one, -12.0) for one in _bytes()), *plain, *spaced], 0
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace()
    return backend


BACKENDS = {
    "byte-level": _byte_level,
    "byte-level-nfc": lambda: _byte_level(nfc=True),
    "byte-level-prefix-space": lambda: _byte_level(prefix_space=True),
    "byte-level-merged": lambda: _byte_level(merged=True),
    "byte-level-lowercase": _lowercase,
    "byte-level-whole-words": _whole_words,
    "llama2": lambda: _sentencepiece("llama2"),
    "gemma": lambda: _sentencepiece("gemma"),
    "metaspace-first": lambda: _sentencepiece("first"),
    "metaspace-always": lambda: _sentencepiece("always"),
    "unigram": _unigram,
}

TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "of-roles": "{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "inst": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }}"
    " [/INST]{% else %}{{ ' %s ' % m['content'].strip() }}{{ eos_token }}{% endif %}{% endfor %}",
    "macros": "{% macro turn(role, text) %}<|im_start|>{{ role | upper }}\n{{ text }}<|im_end|>\n"
    "{% endmacro %}{% for m in messages %}{% set body %}{{ m.content }}{% endset %}{{ turn(m.role, body) }}"
    "{% endfor %}",
    "beyond-ascii": "\U0001f642\u00e9{% for m in messages %}{% if loop.first %}e\u0301{% endif %}"
    "<\uff5cUser\uff5c>{{ m.content }}{{ '[{word}]' }}\u4e2d</s>\U0001f642{% endfor %}",
    "formats": "{% for m in messages %}{{ '<|im_start|>{}\n{}<|im_end|>'.format(m.role, m.content) }}"
    "{{ ['<s>', m.content | tojson, '</s>'] | join('') }}{{ '<think>%s</think>' | format(m.content[1:]) }}"
    "{{ 'A<tool_call>' | replace('A', m.content) }}{{ ''.join([m.content, '<s>']) }}{% endfor %}",
}

INNOCENT = st.lists(
    st.sampled_from(
        [
            "the",
            "and",
            "in",
            " ",
            "  ",
            "\n",
            "\n\n",
            "\t",
            "a",
            "é",
            "ﬁ",
            "中",
            "🙂",
            ".",
            "13",
            "e\u0301",
            "\u00b2",
            "\u200d",
        ]
    ),
    min_size=1,
    max_size=12,
).map("".join)
HOSTILE = st.lists(
    st.one_of(
        st.sampled_from(SPELLINGS),
        st.sampled_from(SPELLINGS).flatmap(
            lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(
                lambda ends: text[min(ends) : max(ends)]
            )
        ),
        st.sampled_from(
            [
                "the",
                " ",
                "\n",
                "é",
                "中",
                "<",
                ">",
                "|",
                "[",
                "]",
                "/",
                "\uff1cs\uff1e",
                "[inst]",
                "e\u0301",
                "\u00b2",
                "\u200d",
            ]
        ),
    ),
    min_size=1,
    max_size=8,
).map("".join)


def make(kind: str, template: str) -> Tokenizer:
    """Return a tokenizer of a kind with a chat template, and all commands."""
    backend = BACKENDS[kind]()
    if backend.token_to_id("<unk>") is not None:
        backend.add_special_tokens(["<unk>"])
    backend.add_tokens([*COMMANDS, *SPACES])
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        eos_token_ids=(),
        bos_token_id=None,
        chat_template=TEMPLATES.get(template, template),
    )


def conversations(content: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, str]]]:
    """Return conversations of one to four turns."""
    roles = ["user", "assistant"] * 2
    return st.lists(content, min_size=1, max_size=4).map(
        lambda contents: [
            {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
        ]
    )
