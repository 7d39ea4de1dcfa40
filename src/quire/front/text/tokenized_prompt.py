"""Prompts that a router has tokenized to find their cached blocks, and sends to engines with their text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from quire.errors import InvalidRequestError

HEADER = "X-Quire-Prompt"
"""Request header: how many bytes behind the body are a `TokenizedPrompt`."""

MAX_TOKENS = 1 << 17
"""Maximum number of tokens of such a prompt."""

MAX_BYTES = 4 * MAX_TOKENS + 4096
"""Maximum size of an encoded prompt."""

_ENDING = 256  # characters; longer than what says whether an answer begins with reasoning
_PACKED = np.dtype("<i4")


class TokenizedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that has been rendered and tokenized elsewhere.

    Args:
        digest: `Tokenizer.digest` of the tokenizer that has done it.
        packed_ids: its tokens, in 4 bytes each, the least significant first.
        ending: the end of its text, without white space behind it.
    """

    digest: str
    packed_ids: bytes
    ending: str

    @classmethod
    def of(cls, digest: str, token_ids: Sequence[int], text: str) -> TokenizedPrompt:
        """Return the prompt with these tokens and this text."""
        return cls(digest, np.array(token_ids, _PACKED).tobytes(), text.rstrip()[-_ENDING:])

    @classmethod
    def decoded(cls, data: bytes) -> TokenizedPrompt:
        """Return the prompt that `encoded` has made bytes of.

        Raises:
            InvalidRequestError: the bytes are none.
        """
        try:
            prompt = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(
                f"what {HEADER} announces is not a prompt: {error}", param=HEADER
            ) from None
        if len(prompt.packed_ids) % _PACKED.itemsize:
            raise InvalidRequestError(f"what {HEADER} announces has a part of a token", param=HEADER)
        return prompt

    def encoded(self) -> bytes:
        """Return the prompt as bytes."""
        return msgspec.msgpack.encode(self)

    @property
    def num_tokens(self) -> int:
        """Number of its tokens."""
        return len(self.packed_ids) // _PACKED.itemsize

    def token_ids(self) -> list[int]:
        """Return its tokens, which may be none of the vocabulary."""
        ids: list[int] = np.frombuffer(self.packed_ids, _PACKED).tolist()
        return ids
