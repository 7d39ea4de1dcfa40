"""The bytes of tokens inside a sequence, and the tokens of a text there."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """What each token of a tokenizer adds to the text of a sequence, special tokens included.

    A token that is part of a character has the bytes of that part, as byte-level vocabularies and byte tokens
    (`<0xE2>`) have them. Any other is decoded behind another token, since some decoders treat the first one
    of a sequence differently. Ids without a token have no bytes.

    Args:
        backend: the tokenizer.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        kinds = set(_decoder_kinds(backend))
        self.is_byte_level = kinds == {"ByteLevel"}
        self.has_byte_tokens = "ByteFallback" in kinds
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        known = self._known.get(token_id)
        if known is None:
            name = self._backend.id_to_token(token_id)
            if name is None:
                known = b""
            elif self.is_byte_level:
                known = byte_level_bytes(name)
            else:
                anchor, anchor_text = self.anchor
                text = self._backend.decode([*anchor, token_id], skip_special_tokens=False)
                known = _spelled(name, text[len(anchor_text) :])
            self._known[token_id] = known
        return known

    def byte_token(self, token_id: int) -> bytes | None:
        """Return the byte of a byte token such as `<0xE2>`, or None for any other token."""
        if not self.has_byte_tokens:
            return None
        match = _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "")
        return bytes.fromhex(match[1]) if match else None

    @functools.cached_property
    def anchor(self) -> tuple[list[int], str]:
        """A token to decode before others, and its text; none if the vocabulary has no letter."""
        added = self._backend.get_added_tokens_decoder()
        for letter in ("a", "e", "A", "1"):
            try:
                ids = self._backend.encode(letter, add_special_tokens=False).ids[-1:]
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # what a vocabulary does not have; panics of the library are no Exceptions
                continue
            text: str = self._backend.decode(ids, skip_special_tokens=False)
            if text.strip() == letter and ids[0] not in added:
                return ids, text
        return [], ""

    def depend_on_neighbours(self, num_tokens: int) -> bool:
        """Whether a sequence of the first `num_tokens` tokens has another text than their bytes, joined.

        Decoders that join words, or leave out what comes twice, are such.
        """
        if self.is_byte_level:
            return False
        anchor, anchor_text = self.anchor
        whole = [one for one in range(num_tokens) if _is_whole(self.of(one))]
        ids = [token_id for token_id in whole for _ in range(2)]
        text = b"".join(map(self.of, ids)).decode()
        decoded = self._backend.decode([*anchor, *ids, *anchor], skip_special_tokens=False)
        after = self._backend.decode([*anchor, *anchor], skip_special_tokens=False)[len(anchor_text) :]
        return bool(decoded != anchor_text + text + after)


class Speller:
    """Spells texts as a tokenizer does inside a text: nothing is put before them, and no mark is special.

    Args:
        backend: the tokenizer.
        is_plain: whether an added token, which is not special, may be part of a spelling; by its text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, is_plain: Callable[[str], bool]) -> None:
        added = backend.get_added_tokens_decoder()
        self._parts = _Parts(
            backend,
            _without_prefix(_state(backend.normalizer), "normalizers"),
            _without_prefix(_state(backend.pre_tokenizer), "pretokenizers"),
            {one: token for one, token in added.items() if not token.special and is_plain(token.content)},
        )

    def spell(self, text: str) -> list[int] | None:
        """Return tokens for a text, which may have another text if the tokenizer changes it; None: none."""
        try:
            return self._parts.ids(self._parts.inner.encode(text, add_special_tokens=False))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # what a vocabulary does not have; panics of the library are no Exceptions
            return None


class TokenPlaces:
    """Where in a text its tokens are.

    Args:
        backend: the tokenizer.
        token_bytes: of the same tokenizer.
    """

    def __init__(self, backend: tokenizers.Tokenizer, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        # Postprocessors may leave out spaces, and more of them than there are.
        self._parts = _Parts(
            backend,
            _state(backend.normalizer),
            _state(backend.pre_tokenizer),
            backend.get_added_tokens_decoder(),
        )

    def starts(self, text: str, token_ids: Sequence[int]) -> list[int] | None:
        """Return at which character of a text each token begins; None if it has other tokens.

        `token_ids` may have more tokens before and after those of the text; these take no room in it.
        """
        [encoding] = self._parts.inner.encode_batch([text], add_special_tokens=False)  # other threads run
        ids = self._parts.ids(encoding)
        num_around = len(token_ids) - len(ids)
        # Where several places fit, as with a text of no tokens: models put one token before a text, or none.
        for before in sorted(range(num_around + 1), key=lambda before: before != 1):
            if list(token_ids[before : before + len(ids)]) == ids:
                placed = zip(ids, encoding.offsets, strict=True)
                starts = [self._start(text, token_id, span) for token_id, span in placed]
                return [0] * before + starts + [len(text)] * (num_around - before)
        return None

    def _start(self, text: str, token_id: int, span: tuple[int, int]) -> int:
        """Return where a token begins: after spaces that it covers without having them in its text."""
        start, end = span
        without_spaces = text[start:end].lstrip()
        own = self._token_bytes.of(token_id).decode(errors="replace")
        return end - len(without_spaces) if own and without_spaces.startswith(own) else start


class _Parts:
    """A tokenizer that shares another's vocabulary, and adds no tokens to those of a text.

    Args:
        backend: whose vocabulary it is.
        normalizer: as tokenizer.json describes it.
        pre_tokenizer: as tokenizer.json describes it.
        added: the added tokens that are found in texts, by id.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        normalizer: dict[str, Any] | None,
        pre_tokenizer: dict[str, Any] | None,
        added: Mapping[int, tokenizers.AddedToken],
    ) -> None:
        import tokenizers

        model = {"type": "BPE", "vocab": {}, "merges": []}
        described = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model}
        self.inner = inner = tokenizers.Tokenizer.from_str(json.dumps(described))
        inner.model = backend.model
        inner.add_tokens(list(added.values()))
        self._ids = {inner.token_to_id(token.content): one for one, token in added.items()}

    def ids(self, encoding: tokenizers.Encoding) -> list[int]:
        """Return the other tokenizer's ids of what `inner` has encoded."""
        return [self._ids.get(one, one) for one in encoding.ids]


def _state(component: Any) -> dict[str, Any] | None:
    """Return the description of a tokenizer's component, as tokenizer.json has it."""
    return None if component is None else json.loads(component.__getstate__())


def _without_prefix(state: dict[str, Any] | None, name_of_list: str) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer like this one that puts nothing before a text."""
    if state is None or state["type"] == "Prepend":
        return None
    if state["type"] == "Sequence":
        parts = (_without_prefix(one, name_of_list) for one in state[name_of_list])
        return {**state, name_of_list: [one for one in parts if one is not None]}
    without = {"prepend_scheme": "never", "add_prefix_space": False}
    return {**state, **{key: value for key, value in without.items() if key in state}}


def _spelled(name: str, text: str) -> bytes:
    """Return the bytes of a token by its name and its text, in which a part of a character is U+FFFD."""
    if "\N{REPLACEMENT CHARACTER}" in text:
        byte = _BYTE_TOKEN.fullmatch(name)
        for found in (bytes.fromhex(byte[1]) if byte else b"", byte_level_bytes(name)):
            if found.decode(errors="replace") == text:
                return found
    return text.encode()


def _is_whole(token: bytes) -> bool:
    """Whether a token has characters, and no part of another."""
    try:
        return bool(token.decode())
    except UnicodeDecodeError:
        return False


def _decoder_kinds(backend: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield the kinds of the tokenizer's decoder, of each part if it is a sequence."""
    state = _state(backend.decoder)
    if state is not None:
        yield from _kinds_in(state)


def _kinds_in(state: dict[str, Any]) -> Iterator[str]:
    if state["type"] == "Sequence":
        for part in state["decoders"]:
            yield from _kinds_in(part)
    else:
        yield state["type"]


def _byte_level_alphabet() -> dict[int, int]:
    """Return GPT-2's mapping of characters to bytes: printable ones are themselves, others from U+0100 on.

    Of the first 256 characters, those for no byte are mapped to U+FFFD.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return dict.fromkeys(others, 0xFFFD) | {0x100 + index: byte for index, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; a token with other characters is plain text."""
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
