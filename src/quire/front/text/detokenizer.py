"""Incremental detokenization: whole characters only, at constant cost per token.

Byte-level vocabularies (GPT-2's and its descendants) are decoded as a byte stream. For others, the
tokenizer's decoder decodes each token together with the one before it, because such decoders treat the first
token of a sequence differently; their byte tokens (`<0xE2>`) are decoded as a byte stream, too.
The result equals decoding all ids at once, with one exception: where byte tokens do not form UTF-8, only the
faulty bytes become U+FFFD here, while the `tokenizers` library replaces the whole run of byte tokens.

The library's `DecodeStream` is not used: its time is quadratic in the length of a run of tokens that form no
character (160 us per token after 200 of them; here 2), and it drops incomplete text at the end.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer

_MAX_HELD_TOKENS = 8
"""Maximum number of tokens per character for decoders of unknown kind."""

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TokenDecoder(Protocol):
    """Decodes a sequence of tokens one by one."""

    def push(self, token_id: int) -> str:
        """Add a token and return the new text; "" while a character is incomplete."""

    def flush(self) -> str:
        """Return the remaining text; incomplete characters become U+FFFD."""


class DecoderFactory:
    """Creates token decoders for one tokenizer, with shared state."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.token_bytes = tokenizer.token_bytes

    def make(
        self,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        shown: frozenset[int] = frozenset(),
        is_verbatim: bool = False,
    ) -> TokenDecoder:
        """Return a decoder for the tokens after `prompt_token_ids`, which may be empty.

        Special tokens in `shown` are part of the text even with `skip_special_tokens`. With `is_verbatim`,
        the text keeps a leading space even if there is no text before it.
        """
        skipped = self._tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        if shown:
            skipped -= shown
        if self.token_bytes.is_byte_level:
            return ByteLevelDecoder(self, skipped)
        context = [token_id for token_id in prompt_token_ids[-1:] if not self.is_special(token_id)]
        if is_verbatim and not context:
            context, _ = self.token_bytes.anchor
        return ContextDecoder(self, skipped, context)

    @property
    def may_split_characters(self) -> bool:
        """Whether a character may be split over tokens that are not byte tokens."""
        return not self.token_bytes.has_byte_tokens

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which is not part of the text."""
        return token_id in self._tokenizer.special_token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a whole sequence of tokens, including special ones."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)


class ByteLevelDecoder:
    """Decodes tokens as pieces of a UTF-8 byte stream."""

    def __init__(self, factory: DecoderFactory, skipped: frozenset[int]) -> None:
        self._factory = factory
        self._skipped = skipped
        self._utf8 = _new_utf8_decoder(errors="replace")

    def push(self, token_id: int) -> str:
        """See `TokenDecoder.push`."""
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._factory.token_bytes.of(token_id))

    def flush(self) -> str:
        """See `TokenDecoder.flush`."""
        return self._utf8.decode(b"", final=True)


class ContextDecoder:
    """Decodes each token with the tokenizer's decoder, in the context of the tokens before it."""

    def __init__(self, factory: DecoderFactory, skipped: frozenset[int], context: list[int]) -> None:
        self._factory = factory
        self._skipped = skipped
        self._context = context
        self._held: list[int] = []
        self._utf8 = _new_utf8_decoder(errors="replace")

    def push(self, token_id: int) -> str:
        """See `TokenDecoder.push`."""
        if token_id in self._skipped:
            return ""
        byte = self._factory.token_bytes.byte_token(token_id)
        if byte is not None:
            return self._push_byte(token_id, byte)
        unfinished = self._end_bytes()
        self._held.append(token_id)
        text = self._text_of_held()
        if self._factory.may_split_characters and _is_unfinished(text, len(self._held)):
            return unfinished
        self._advance_context(text)
        return unfinished + text

    def flush(self) -> str:
        """See `TokenDecoder.flush`."""
        return self._end_bytes() + self._text_of_held()

    def _push_byte(self, token_id: int, byte: bytes) -> str:
        self._held.append(token_id)
        text = self._utf8.decode(byte)
        if not text:
            return ""
        if not self._context and "\ufffd" not in text:
            text = self._text_of_held()  # a decoder may strip the space that begins a sequence
        self._advance_context(text)
        return text

    def _end_bytes(self) -> str:
        """Return U+FFFD for bytes that form no character, as no more byte tokens follow."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        if text:
            self._advance_context(text)
        return text

    def _text_of_held(self) -> str:
        if not self._held:
            return ""
        before = self._factory.decode(self._context)
        return self._factory.decode(self._context + self._held)[len(before) :]

    def _advance_context(self, text: str) -> None:
        """Make the held tokens, whose text is `text`, the context of the next token."""
        self._context = self._held if text and self._held else self._context + self._held
        self._held = []


def _is_unfinished(text: str, num_tokens: int) -> bool:
    return text.endswith("\ufffd") and num_tokens < _MAX_HELD_TOKENS
