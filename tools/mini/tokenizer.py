"""The tokenizer of `mini`: a byte-level BPE whose first merges are defined by hand.

Three kinds of text must be split the same way everywhere, because the model copies them:

* digits: one token each (the pre-tokenizer isolates them, with the space in front if there is one);
* single letters ("k x w q"): one token each, " k" included;
* made-up names ("bako", "tiluse"): one token per syllable.  Consonant-vowel merges come first, and no later
  merge may join two bare syllables, so a name never splits otherwise because an English word contains it.

All other merges are learned from the training text in the usual greedy way.

UTF-8 never has the bytes C0, C1 and F5 to FF.  Their ids belong to the marks around tools and calls, and to a
few merges for JSON, which came later than all else and have changed no other id.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
SYLLABLES = [c + v for c in CONSONANTS for v in VOWELS]

END_OF_TEXT, END, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
TOOL_CALL, TOOL_CALL_END, TOOL_RESPONSE, TOOLS = TOOL_MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "<tools>",
)
VOCAB_SIZE = 1536

# A tool is shown as its name and parameters: `set_timer(minutes: number, label?)`.
CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<tools>' -}}
{%- for tool in tools -%}
{%- set schema = tool['function']['parameters'] or {} -%}
{{- tool['function']['name'] ~ '(' -}}
{%- for name, field in (schema['properties'] or {}).items() -%}
{{- name -}}
{%- if name not in (schema['required'] or []) -%}{{- '?' -}}{%- endif -%}
{%- set type = field['type'] if field is mapping else '' -%}
{%- if type is sequence and ('integer' in type or 'number' in type) -%}{{- ': number' -}}{%- endif -%}
{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
{%- endfor -%}
{{- ')\\n' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{{- '<tool_response>' -}}
{%- elif message['role'] in ['system', 'user', 'assistant'] -%}
{{- '<|' ~ message['role'] ~ '|>' -}}
{%- else -%}
{{- raise_exception('mini knows the roles system, user, assistant and tool, not ' ~ message['role']) -}}
{%- endif -%}
{{- message['content'] or '' -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set arguments = call['function']['arguments'] -%}
{%- if message['content'] or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": ' ~ (call['function']['name'] | tojson) ~ ', "arguments": ' -}}
{{- (arguments if arguments is string else arguments | tojson) ~ '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""

_SPLIT = r" ?\p{L}+| ?\p{N}|\n| ?[^\s\p{L}\p{N}]+|\s+"
_SPACE = "Ġ"  # the byte-level alphabet's letter for a space
_NO_UTF8 = "ÀÁõö÷øùúûüýþÿ"  # the byte-level alphabet's letters for C0, C1 and F5 to FF
_JSON_MERGES = [
    *(("{", '"'), ('"', ":"), (_SPACE, '"'), ('"', ","), (f"{_SPACE}{{", '"'), ('"', "}")),
    *(("ar", "gu"), ("argu", "me"), ("argume", "nts")),
]
_TRAINED_WORD = re.compile(r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+")


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins for bytes, in a fixed order."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def hand_made_merges() -> list[tuple[str, str]]:
    """Merges independent of the text: syllables, then a space and a syllable, digit or letter."""
    merges = [(s[0], s[1]) for s in SYLLABLES]
    merges += [(_SPACE, s) for s in SYLLABLES]
    merges += [(_SPACE, d) for d in "0123456789"]
    merges += [(_SPACE, letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return merges


def _apply(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """`word` with every occurrence of `pair` joined, from the left."""
    joined, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            joined.append(word[i] + word[i + 1])
            i += 2
        else:
            joined.append(word[i])
            i += 1
    return tuple(joined)


def learn_merges(texts: Iterable[str], count: int) -> list[tuple[str, str]]:
    """Learn `count` merges, the hand-made ones included, from `texts`.

    The corpus has a few thousand different words, so recounting all pairs for each merge is fast enough.
    """
    counts = Counter(w for text in texts for w in _TRAINED_WORD.findall(text) if w.isascii())
    words = {tuple(w.replace(" ", _SPACE)): n for w, n in sorted(counts.items())}
    bare = set(SYLLABLES)
    starts = bare | {_SPACE + s for s in SYLLABLES}
    merges = hand_made_merges()
    for pair in merges:
        words = _merge_all(words, pair)
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, n in words.items():
            for pair in pairwise(word):
                if not (pair[0] in starts and pair[1] in bare):
                    pairs[pair] += n
        if not pairs:
            break
        best = max(pairs, key=lambda p: (pairs[p], p))
        merges.append(best)
        words = _merge_all(words, best)
    return merges


def _merge_all(words: dict[tuple[str, ...], int], pair: tuple[str, str]) -> dict[tuple[str, ...], int]:
    """Apply one merge to every word that could contain it."""
    merged: Counter[tuple[str, ...]] = Counter()
    for word, n in words.items():
        merged[_apply(word, pair) if pair[0] in word else word] += n
    return merged


def build(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train the tokenizer on `texts`.  Special tokens take the first ids, <|endoftext|> is 0."""
    alphabet = byte_alphabet()
    merges = learn_merges(texts, vocab_size - len(alphabet) - len(SPECIAL_TOKENS))
    pieces = [*SPECIAL_TOKENS, *alphabet]
    known = set(pieces)
    for left, right in merges:
        if left + right not in known:  # two merges may build the same piece
            known.add(left + right)
            pieces.append(left + right)
    replaced = dict(zip(_NO_UTF8, (*TOOL_MARKS, *(a + b for a, b in _JSON_MERGES)), strict=True))
    vocab = {replaced.get(p, p): i for i, p in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges + _JSON_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TOOL_MARKS])
    return tokenizer


def signature(tool: dict) -> str:
    """A tool as the template shows it."""
    function = tool["function"]
    schema = function.get("parameters") or {}
    required = schema.get("required", ())
    shown = []
    for name, field in schema.get("properties", {}).items():
        is_number = field["type"] in ("integer", "number")
        shown.append(name + "?" * (name not in required) + ": number" * is_number)
    return f"{function['name']}({', '.join(shown)})\n"


def call_text(function: dict) -> str:
    """A call as the template shows it, which is what the model writes."""
    call = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"{TOOL_CALL}\n{call}\n{TOOL_CALL_END}"


class ChatEncoder:
    """Turns messages into token ids, piece by piece, exactly as `CHAT_TEMPLATE` does for the whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
        self.end, self.pad = ids[END], ids[END_OF_TEXT]
        self._roles = {"system": ids[SYSTEM], "user": ids[USER], "assistant": ids[ASSISTANT]}
        self._roles["tool"] = tokenizer.token_to_id(TOOL_RESPONSE)
        self._tools = tokenizer.token_to_id(TOOLS)
        self._cache: dict[str, list[int]] = {}

    def text(self, text: str) -> list[int]:
        """Token ids of plain text; short texts are cached, since most of them recur."""
        ids = self._cache.get(text)
        if ids is None:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(text) < 100 and len(self._cache) < 50_000:
                self._cache[text] = ids
        return ids

    def message(self, role: str, content: str) -> list[int]:
        """Token ids of one message with its markers."""
        return [self._roles[role], *self.text(content), self.end]

    def tools(self, tools: Sequence[dict]) -> list[int]:
        """Token ids of the tools that a conversation begins with; none if there are none."""
        if not tools:
            return []
        return [self._tools, *self.text("".join(map(signature, tools))), self.end]

    def generation_prompt(self) -> list[int]:
        """Token ids that start the model's turn."""
        return [self._roles["assistant"]]


def load(path: Path) -> ChatEncoder:
    """The encoder for a saved tokenizer.json."""
    return ChatEncoder(Tokenizer.from_file(str(path)))
