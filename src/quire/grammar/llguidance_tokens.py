"""A model's tokens as llguidance needs them, so that its masks and what it accepts agree for any tokenizer.

llguidance would read a tokenizer.json itself, of two kinds only, and take a text that is certain for just
the tokens that the tokenizer makes of it: also where these are marks with another meaning, or differ from the
text because the tokenizer normalizes it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.token_bytes import Speller, TokenBytes

if TYPE_CHECKING:
    import tokenizers
    from llguidance import LLTokenizer

_MARK_BYTE = b"\xff"  # before what is no text, by llguidance's convention
_CAREFULLY = 512  # characters of a text that are spelled as the tokenizer does
_NAMED_MARK = re.compile(r"<[^<>\[\]\s]{1,100}>")  # what a Lark grammar can name
_NEVER_IN_UTF8 = re.compile(rb"[\xc0\xc1\xf5-\xff]")
_MAX_TOKEN_BYTES = 1024  # bytes; llguidance fails on longer ones


class GrammarTokens:
    """The bytes of a model's tokens, and how texts are spelled: what llguidance calls a tokenizer wrapper.

    Special tokens, those that end a sequence, and added ones such as `<tool_call>` are marks: no part of any
    text, they come only where a grammar names them. What spells a mark is spelled with other tokens.
    Bytes that no token has alone get one of an id beyond the model's, which is never allowed: every text has
    a spelling then, and llguidance need not skip what has none.

    Args:
        backend: the model's tokenizer.
        eos_token_ids: end a sequence.
        vocab_size: width of the model's logits, more than the largest of `eos_token_ids`.

    Raises:
        ValueError: the text of a token depends on others, so that no mask can tell what comes out.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        table = TokenBytes(backend)
        ids = backend.get_vocab(with_added_tokens=True).values()
        num_tokens = min(max([*ids, *eos_token_ids]) + 1, vocab_size)
        if table.depend_on_neighbours(num_tokens):
            raise ValueError("the text of its tokens depends on the tokens around them")
        self.texts = [table.of(token_id) for token_id in range(num_tokens)]
        self.eos_token_id = eos_token_ids[0]
        added = backend.get_added_tokens_decoder()
        marks = {one for one, token in added.items() if token.special or _is_mark(token.content)}
        marks.update(eos_token_ids)
        self.tokens = [
            _mark(token_id, text) if token_id in marks else b"" if _is_never_text(text) else text
            for token_id, text in enumerate(self.texts)
        ]
        alone = {token for token in self.tokens if len(token) == 1}
        self.tokens += [
            byte
            for byte in map(bytes, zip(range(256)))
            if byte not in alone and not _NEVER_IN_UTF8.match(byte)
        ]
        self._speller = Speller(backend, lambda text: not _is_mark(text))
        self._by_bytes: LLTokenizer | None = None

    def tokenizer(self, eos_token_ids: Sequence[int]) -> LLTokenizer:
        """Return llguidance's tokenizer with these tokens, any of `eos_token_ids` ending a sequence."""
        from llguidance import LLTokenizer

        self._by_bytes = LLTokenizer(self, eos_token=list(eos_token_ids))  # type: ignore[arg-type]
        return self._by_bytes

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text, whose bytes are the text's: the tokenizer's own, or the longest.

        llguidance asks at each token for all of the text that is certain, and needs the first of them.
        """
        assert self._by_bytes is not None
        near, far = text[:_CAREFULLY], text[_CAREFULLY:]
        ids = self._speller.spell(near)
        if ids is None or self._bytes_of(ids) != near.encode():
            ids = self._by_bytes.greedy_tokenize(near)
        return ids + self._by_bytes.greedy_tokenize(far) if far else ids

    def can_spell(self, text: str) -> bool:
        """Whether the model's tokens can write a text. Time is linear in its length."""
        assert self._by_bytes is not None
        if max(self._by_bytes.greedy_tokenize(text), default=0) < len(self.texts):
            return True
        data, ends = text.encode(), {0}
        for start in range(len(data)):
            if start in ends:
                ends.update(
                    start + len(token)
                    for size in self._sizes
                    if (token := data[start : start + size]) in self._of_model
                )
        return len(data) in ends

    def _bytes_of(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of the model's tokens among these."""
        return b"".join(self.tokens[token_id] for token_id in ids if token_id < len(self.texts))

    @functools.cached_property
    def _of_model(self) -> frozenset[bytes]:
        return frozenset(self.tokens[: len(self.texts)]) - {b""}

    @functools.cached_property
    def _sizes(self) -> list[int]:
        """The lengths that tokens have, in bytes."""
        return sorted(set(map(len, self._of_model)))


def _is_mark(added: str) -> bool:
    """Whether an added token is a mark although it is not special."""
    return added.startswith("<") and added.endswith(">")


def _mark(token_id: int, text: bytes) -> bytes:
    """Return how llguidance writes a mark: under its name if a grammar can name it."""
    name = text.decode(errors="replace").strip()
    return _MARK_BYTE + (name if _NAMED_MARK.fullmatch(name) else f"<[{token_id}]>").encode()


def _is_never_text(token: bytes) -> bool:
    """Whether no mask allows a token, since it is part of no text or llguidance has no room for it."""
    return len(token) > _MAX_TOKEN_BYTES or _NEVER_IN_UTF8.search(token) is not None
