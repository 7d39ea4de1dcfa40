"""Grammars by llguidance for tokens that are single bytes, so that every spelling of a text can be tried."""

from __future__ import annotations

import functools
import json
from typing import Any

from quire.grammar.llguidance_backend import LLGuidanceBackend, LLGuidanceGrammar
from quire.structured_outputs import StructuredOutputsParams
from tokenizers_for_tests import byte_level

_TOKENIZER = byte_level()
_EOS = _TOKENIZER.backend.token_to_id("</s>")
_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_CHARS = {byte: chr(byte) for byte in _SHOWN} | {
    byte: chr(256 + number) for number, byte in enumerate(byte for byte in range(256) if byte not in _SHOWN)
}
_IDS = [_TOKENIZER.backend.token_to_id(_CHARS[byte]) for byte in range(256)]


@functools.cache
def _backend(closes_objects: bool) -> LLGuidanceBackend:
    return LLGuidanceBackend(
        _TOKENIZER.backend.to_str, _TOKENIZER.vocab_size, lambda: [_EOS], closes_objects=closes_objects
    )


def compiled(*, closes_objects: bool = False, **fields: Any) -> LLGuidanceGrammar:
    """Compile a specification; a JSON schema means what it does elsewhere, unless `closes_objects`."""
    return _backend(closes_objects).compile(StructuredOutputsParams(**fields))


def accepts(grammar: LLGuidanceGrammar, text: str) -> bool:
    """Whether a text is complete by a grammar, which stays at its start."""
    ids = [_IDS[byte] for byte in text.encode()]
    is_accepted = grammar.accept(ids)
    may_end = is_accepted and grammar.num_valid([_EOS]) == 1
    if is_accepted:
        grammar.rollback(len(ids))
    return may_end


def schema_accepts(schema: Any, text: str, **options: Any) -> bool:
    """Whether a JSON schema's grammar has a text."""
    return accepts(compiled(json=json.dumps(schema), **options), text)
