"""A model's tokens as llguidance needs them, so that its masks and what it accepts agree for any tokenizer.

llguidance would read a tokenizer.json itself, of two kinds only, and take a text that is certain for just
the tokens that the tokenizer makes of it: also where these are marks that stand for something else, or have
another text because the tokenizer changes what it reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.token_bytes import Speller, TokenBytes

if TYPE_CHECKING:
    import tokenizers
    from llguidance import LLTokenizer

_MARK_BYTE = b"\xff"  # before what is no text, by llguidance's convention
_CAREFULLY = 512  # characters of a text that are spelled as the tokenizer does
_NAMED_MARK = re.compile(r"<[^<>\[\]\s]+>")  # what a Lark grammar can name
_NEVER_IN_UTF8 = bytes([0xC0, 0xC1, *range(0xF5, 0x100)])
_NEVER = re.compile(b"[" + re.escape(_NEVER_IN_UTF8) + b"]")


class GrammarTokens:
    """The bytes of a model's tokens, and how texts are spelled: what llguidance calls a tokenizer wrapper.

    Special tokens, those that end a sequence, and added ones such as `<tool_call>` are marks: no part of any
    text, they come only where a grammar names them. What spells a mark is spelled with other tokens.
    Bytes that no token has alone get one of an id beyond the model's, which is never allowed: every text has
    a spelling then, and llguidance need not skip what has none.

    Args:
        backend: the model's tokenizer.
        eos_token_ids: end a sequence.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: Sequence[int]) -> None:
        table = TokenBytes(backend)
        if table.depend_on_neighbours():
            raise ValueError("the text of its tokens depends on the tokens around them")
        self.texts = table.all + [b""] * (max(eos_token_ids) + 1 - len(table.all))
        self.eos_token_id = eos_token_ids[0]
        added = backend.get_added_tokens_decoder()
        marks = {one for one, token in added.items() if token.special or _is_mark(token.content)}
        marks.update(eos_token_ids)
        self.tokens = [
            _mark(token_id, text) if token_id in marks else b"" if _NEVER.search(text) else text
            for token_id, text in enumerate(self.texts)
        ]
        alone = {token for token in self.tokens if len(token) == 1}
        self.tokens += [
            bytes([byte]) for byte in range(256) if byte not in _NEVER_IN_UTF8 and bytes([byte]) not in alone
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
        if ids is None or b"".join(map(self.tokens.__getitem__, ids)) != near.encode():
            ids = self._by_bytes.greedy_tokenize(near)
        return ids + self._by_bytes.greedy_tokenize(far) if far else ids

    def can_spell(self, text: str) -> bool:
        """Whether the model's tokens can write a text. Time is linear in its length."""
        assert self._by_bytes is not None
        if max(self._by_bytes.greedy_tokenize(text), default=0) < len(self.texts):
            return True
        data, ends = text.encode(), {0}
        of_model = set(self.tokens[: len(self.texts)])
        lengths = {len(token) for token in of_model}
        for start in range(len(data)):
            if start in ends:
                ends.update(start + size for size in lengths if data[start : start + size] in of_model)
        return len(data) in ends


def _is_mark(added: str) -> bool:
    """Whether an added token is a mark although it is not special."""
    return added.startswith("<") and added.endswith(">")


def _mark(token_id: int, text: bytes) -> bytes:
    """Return how llguidance writes a mark: under its name if a grammar can name it."""
    name = text.decode(errors="replace")
    return _MARK_BYTE + (name if _NAMED_MARK.fullmatch(name) else f"<[{token_id}]>").encode()
