"""A lower bound on the number of tokens of a text, without tokenizing it.

Each character is covered by a token that contains it, so it counts for at least 1/m tokens, where m is the
length of the longest token that contains it; the sum is a lower bound. Four million letters "a" are refused
at once, where tokenizing them would take seconds and hundreds of megabytes. For a byte-level tokenizer,
characters are the bytes of the text in UTF-8.
"""

from __future__ import annotations

import functools
import json
import math
import unicodedata
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from quire.token_bytes import byte_level_bytes

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer

_Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
MAX_CHARACTERS = 1024
"""Of a text for each of its tokens, where a tokenizer may drop any."""

_PIECE = (
    65_536  # characters that are counted at a time, so that a text that is too long is not read to its end
)
_SEAM = 16  # maximum bytes that normalizing the whole text composes where two pieces meet
_MAX_COMPOSED = 4  # maximum characters that normalization composes into one
_ROUNDING = 1e-6  # tokens
_SPACE = "▁"  # SentencePiece's space

_ADDING_NORMALIZERS = {"Prepend", "ByteLevel", *get_args(_Form)}
_KEEPING_PRETOKENIZERS = {"ByteLevel", "Digits", "Punctuation", "Split", "UnicodeScripts"}
_NOT_IN_UTF8 = [0xC0, 0xC1, *range(0xF5, 0x100)]
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


class TokenBound:
    """Bounds for the texts of one tokenizer.

    There are none if such a tokenizer can make characters disappear, by normalizing them away or by dropping
    text between words: a text is too long then if it has more than `MAX_CHARACTERS` for each token. Unknown
    characters do not count, since a run of them may be one token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend

    def min_num_tokens(self, text: str, enough: int) -> int:
        """Return a lower bound on the tokens of `text`; counting stops above `enough`."""
        total = 0.0
        if not self._keeps_characters and len(text) > enough * MAX_CHARACTERS:
            total = enough + 1
        elif self._keeps_characters:
            for start in range(0, len(text), _PIECE):
                total += self._count(text[start : start + _PIECE])
                if total > enough + 1:
                    break
        return math.ceil(total - _ROUNDING)

    def part_with(self, text: str, num_tokens: int, *, from_end: bool) -> str:
        """Return the end or beginning of a text, long enough for more than `num_tokens` tokens.

        It is cut to `MAX_CHARACTERS` for each token where no bound is known.
        """
        total, length = 0.0, 0
        while self._keeps_characters and total <= num_tokens and length < len(text):
            start = len(text) - length
            piece = text[max(0, start - _PIECE) : start] if from_end else text[length : length + _PIECE]
            total += self._count(piece)
            length += len(piece)
        if not self._keeps_characters:
            length = (num_tokens + 1) * MAX_CHARACTERS
        elif total <= num_tokens:
            return text
        return text[-length:] if from_end else text[:length]

    def max_characters(self, num_tokens: int) -> int | None:
        """Return the maximum number of characters of this many tokens; None: unbounded."""
        if not self._keeps_characters or not self._shares.all():
            return None
        longest = round(1 / float(self._shares.min()))
        return num_tokens * longest * (_MAX_COMPOSED if self._forms else 1)

    def _count(self, piece: str) -> float:
        seam = 0
        if self._forms and not piece.isascii():
            seam = _SEAM
            for form in self._forms:
                piece = unicodedata.normalize(form, piece)
        if self._is_byte_level:
            units = np.frombuffer(piece.encode("utf-8", "surrogatepass"), np.uint8)
        else:
            units = np.frombuffer(piece.encode("utf-32-le", "surrogatepass"), np.uint32)
        return max(0.0, float(self._shares[units].sum()) - seam)

    @functools.cached_property
    def _steps(self) -> list[Mapping[str, Any]]:
        """Normalization of a text before it is tokenized."""
        backend = self._backend
        return [
            *_steps_of(backend.normalizer, "normalizers"),
            *_steps_of(backend.pre_tokenizer, "pretokenizers"),
        ]

    @functools.cached_property
    def _forms(self) -> list[_Form]:
        """The Unicode normal forms applied to a text, in order."""
        return [step["type"] for step in self._steps if step["type"] in get_args(_Form)]

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        return any(step["type"] == "ByteLevel" for step in self._steps)

    @functools.cached_property
    def _keeps_characters(self) -> bool:
        model = self._backend.model
        kind = type(model).__name__
        is_plain_bpe = kind == "BPE" and not model.continuing_subword_prefix and not model.end_of_word_suffix
        return (is_plain_bpe or kind == "Unigram") and all(
            step["type"] in _ADDING_NORMALIZERS
            or (step["type"] in _KEEPING_PRETOKENIZERS and step.get("behavior") != "Removed")
            or _writes_spaces(step)
            for step in self._steps
        )

    @functools.cached_property
    def _shares(self) -> npt.NDArray[np.float64]:
        """By character or byte: its minimum share of a token; 0 if it may disappear."""
        longest, is_single = self._longest_tokens()
        if not self._is_byte_level:
            if any(_writes_spaces(step) for step in self._steps):
                space = ord(_SPACE)
                longest[ord(" ")] = max(longest[ord(" ")], longest[space])
                is_single[ord(" ")] = is_single[space]
            if self._knows_all_bytes():
                is_single[:] = True
        shares = np.where(is_single, 1 / np.maximum(longest, 1), 0.0)
        if self._is_byte_level:
            shares[_NOT_IN_UTF8] = 1.0  # a tokenizer may lack them
        added = self._backend.get_added_tokens_decoder().values()
        if any(
            token.lstrip or token.rstrip for token in added
        ):  # such a token absorbs all adjacent whitespace
            shares[[unit for unit in range(len(shares)) if self._may_be_whitespace(unit)]] = 0.0
        return shares

    def _longest_tokens(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return, by character or byte, the length of the longest token with it and whether it is a token."""
        kind = np.dtype(np.uint8 if self._is_byte_level else np.uint32)
        size = 256 if self._is_byte_level else 0x110000
        added = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        tokens = [
            self._encoded(token, is_text=token in added)
            for token in self._backend.get_vocab(with_added_tokens=True)
        ]
        tokens.sort(key=len)
        lengths = np.array([len(token) // kind.itemsize for token in tokens])
        units = np.frombuffer(b"".join(tokens), kind)
        lengths_of_units = np.repeat(lengths, lengths)
        longest = np.zeros(size, np.int64)
        longest[units] = lengths_of_units  # the last one wins
        is_single = np.zeros(size, np.bool_)
        is_single[units[lengths_of_units == 1]] = True
        return longest, is_single

    def _encoded(self, token: str, *, is_text: bool) -> bytes:
        if not self._is_byte_level:
            return token.encode("utf-32-le")
        return token.encode() if is_text else byte_level_bytes(token)

    def _knows_all_bytes(self) -> bool:
        """Whether each character that is not a token becomes byte tokens."""
        is_on = bool(getattr(self._backend.model, "byte_fallback", False))
        return is_on and all(self._backend.token_to_id(token) is not None for token in _BYTE_TOKENS)

    def _may_be_whitespace(self, unit: int) -> bool:
        return (self._is_byte_level and unit >= 0x80) or chr(unit).isspace()


def _steps_of(component: Any, name_of_list: str) -> Iterator[Mapping[str, Any]]:
    """Yield the description of a tokenizer's component, or of each part of a sequence."""
    if component is None:
        return
    steps = [json.loads(component.__getstate__())]
    while steps:
        step = steps.pop(0)
        if step["type"] == "Sequence":
            steps[:0] = step[name_of_list]
        else:
            yield step


def _writes_spaces(step: Mapping[str, Any]) -> bool:
    """Whether a step only writes spaces as SentencePiece does."""
    if step["type"] == "Metaspace":
        return bool(step["replacement"] == _SPACE)
    return step["type"] == "Replace" and (step["pattern"], step["content"]) == ({"String": " "}, _SPACE)
