"""Grammars by llguidance: JSON schemas, regular expressions, choices, Lark and GBNF."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.errors import InvalidRequestError
from quire.grammar.gbnf import is_gbnf, lark_of
from quire.grammar.llguidance_tokens import GrammarTokens
from quire.grammar.reasoning import Spelling
from quire.schemas.json_schemas import enforceable_schema
from quire.schemas.wide_numbers import SPACING, has_wide_numbers, json_rules
from quire.step import IntArray
from quire.structured_outputs import STRUCTURE_KINDS, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_LEXER_STATES = 50_000  # of one grammar, 1 to 2 kB each
_MAX_SHOWN_ERROR = 600  # characters
# llguidance's words, which mean nothing to a client, or name an option that is not offered here.
_OTHER_WORDS = [
    (
        r"oneOf constraints are not supported\. Enable 'coerce_one_of' option .*",
        "the alternatives of a oneOf may overlap, which cannot be enforced; use anyOf, or make them exclude "
        "each other",
    ),
    (r"Unimplemented keys: \[(.*)\]", r"what cannot be enforced: \1; leave it out"),
    (
        r"the grammar cannot be followed any further: NoExtensionBias.*",
        "no text is valid, or a part of it consists of itself without end",
    ),
]


class LLGuidanceBackend:
    """Compiles grammars for one model's tokens.

    llguidance is imported and the tokenizer read at the first compilation: most engines never need them.

    Args:
        read_tokenizer: called once, at the first compilation, for the text of the model's `tokenizer.json`.
        vocab_size: width of the model's logits; ids from the tokenizer's own size on are never allowed.
        read_eos_token_ids: called once, too, for the ids that end a sequence.
        closes_objects: whether objects have no properties but those that their JSON schema names, unless it
            says something else.
    """

    def __init__(
        self,
        read_tokenizer: Callable[[], str],
        vocab_size: int,
        read_eos_token_ids: Callable[[], Sequence[int]],
        *,
        closes_objects: bool = True,
    ) -> None:
        self.vocab_size = vocab_size
        self.closes_objects = closes_objects
        self._read_tokenizer = read_tokenizer
        self._read_eos_token_ids = read_eos_token_ids
        self._reading = threading.Lock()

    def compile(self, spec: StructuredOutputsParams, *, num_bytes: int = 0) -> LLGuidanceGrammar:
        """Return the grammar at its start; its first bitmask, the slowest one, has been computed.

        Args:
            spec: is compiled.
            num_bytes: estimated size of the grammar, as far as it is known.

        Raises:
            InvalidRequestError: what is wrong with the specification; or the model's tokenizer is not one
                that llguidance can work with.
        """
        from llguidance import LLMatcher

        with self._reading:
            tokens, tokenizer, eos_token_ids = self._tokens
        num_tokens = len(tokens.texts)
        try:
            for choice in spec.choice or ():
                if not tokens.can_spell(choice):
                    raise ValueError(f"the model has no tokens for {choice!r:.200}")
            matcher = LLMatcher(tokenizer, self._definition(spec), log_level=0, limits=_limits())
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            if any(token >= num_tokens for token in matcher.compute_ff_tokens()):
                raise ValueError("the model has no tokens for the required beginning of the output")
            grammar = LLGuidanceGrammar(
                matcher, eos_token_ids, num_tokens, tokenizer.vocab_size, num_bytes=num_bytes
            )
            grammar.fill_bitmask(np.empty(-(-self.vocab_size // 32), dtype=np.int32))
        except ValueError as error:
            raise _refusal(spec, str(error)) from error
        return grammar

    def tokens(self) -> tuple[str, Sequence[int]]:
        """Return the text of the model's `tokenizer.json` and the ids that end a sequence, having read both.

        Raises:
            InvalidRequestError: as `compile` does about the tokenizer.
        """
        with self._reading:
            _, _, eos_token_ids = self._tokens
            return self._read_tokenizer(), sorted(eos_token_ids)

    def _definition(self, spec: StructuredOutputsParams) -> str:
        """Return a specification in llguidance's own form."""
        from llguidance import LLMatcher

        if spec.json is not None:
            assert isinstance(spec.json, str)
            schema = enforceable_schema(json.loads(spec.json), closes_objects=self.closes_objects)
            if has_wide_numbers(schema):
                return LLMatcher.grammar_from_lark("\n".join(["start: json", *json_rules(schema, "json")]))
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=SPACING)
        if spec.regex is not None:
            return LLMatcher.grammar_from_regex(spec.regex)
        if spec.choice is not None:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, spec.choice)))
        assert spec.grammar is not None
        grammar = lark_of(spec.grammar) if is_gbnf(spec.grammar) else spec.grammar
        return LLMatcher.grammar_from_lark(grammar)

    @functools.cached_property
    def spelling(self) -> Spelling:
        """The bytes of the model's tokens.

        Raises:
            InvalidRequestError: as `compile` does about the tokenizer.
        """
        with self._reading:
            tokens, _, eos_token_ids = self._tokens
        return Spelling(tokens.texts.__getitem__, len(tokens.texts), eos_token_ids)

    @functools.cached_property
    def _tokens(self) -> tuple[GrammarTokens, LLTokenizer, frozenset[int]]:
        """The model's tokens, for Quire and for llguidance, and the ids that end a sequence."""
        import tokenizers

        eos_token_ids = [token for token in self._read_eos_token_ids() if token < self.vocab_size]
        if not eos_token_ids:
            raise InvalidRequestError(
                "structured_outputs needs a model with an end-of-sequence token; this one has none",
                param="structured_outputs",
            )
        try:
            backend = tokenizers.Tokenizer.from_str(self._read_tokenizer())
            tokens = GrammarTokens(backend, eos_token_ids, self.vocab_size)
            tokenizer = tokens.tokenizer(eos_token_ids)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the libraries raise bare Exception; their panics are not even that
            raise InvalidRequestError(
                f"structured_outputs cannot be used with this model's tokenizer: {error!s:.500}",
                param="structured_outputs",
            ) from error
        return tokens, tokenizer, frozenset(eos_token_ids)


class LLGuidanceGrammar:
    """The state of one request in its grammar.

    The end of the sequence is kept here, not by llguidance: it is accepted where the grammar may end, again
    and again, and nothing else is accepted after it.

    Args:
        matcher: at the grammar's start.
        eos_token_ids: end a sequence.
        num_tokens: number of tokens of the tokenizer; further ones of the model are never allowed.
        mask_size: tokens in the matcher's masks; those beyond `num_tokens` are not the model's.
        num_bytes: estimated size at the grammar's start.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        eos_token_ids: frozenset[int],
        num_tokens: int,
        mask_size: int,
        *,
        num_bytes: int = 0,
    ) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._num_tokens = num_tokens
        self._mask_size = mask_size
        self._num_bytes = num_bytes
        self._num_ends = 0  # end-of-sequence tokens accepted

    @property
    def num_bytes(self) -> int:
        """Estimated size at the grammar's start."""
        return self._num_bytes

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance over these tokens; False, and nothing changes, if they are not allowed."""
        num_accepted = self._advance(token_ids)
        if num_accepted == len(token_ids):
            return True
        self.rollback(num_accepted)
        return False

    def rollback(self, num_tokens: int) -> None:
        """Go back over the last `num_tokens` accepted tokens."""
        ends = min(num_tokens, self._num_ends)
        self._num_ends -= ends
        if num_tokens > ends:
            self._matcher.rollback(num_tokens - ends)

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens could be accepted, one after the other. Changes nothing."""
        num_accepted = self._advance(token_ids)
        self.rollback(num_accepted)
        return num_accepted

    def fill_bitmask(self, row: IntArray) -> None:
        """Write which tokens may come next: [ceil(vocabulary / 32)], contiguous."""
        row[:] = 0
        if self._num_ends:
            for token in self._eos_token_ids:
                row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
            return
        words = np.empty(-(-self._mask_size // 32), dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._require_no_error()
        full, rest = divmod(self._num_tokens, 32)
        width = min(len(row), full + bool(rest))
        row[:width] = words[:width]
        if rest and width > full:
            row.view(np.uint32)[full] &= np.uint32((1 << rest) - 1)
        if not row.any():
            raise InvalidRequestError(
                "no token of the model's vocabulary can follow", param="structured_outputs"
            )
        ends = [token for token in self._eos_token_ids if row.item(token // 32) >> token % 32 & 1]
        if ends and not self._matcher.is_accepting():
            self._leave_out(ends, row)

    def copy(self) -> LLGuidanceGrammar:
        """Return an independent grammar in the same state."""
        matcher = self._matcher.deep_copy()
        other = LLGuidanceGrammar(
            matcher, self._eos_token_ids, self._num_tokens, self._mask_size, num_bytes=self._num_bytes
        )
        other._num_ends = self._num_ends
        return other

    def _advance(self, token_ids: Sequence[int]) -> int:
        """Accept tokens up to the first that is not allowed; return how many."""
        for count, token in enumerate(token_ids):
            if token in self._eos_token_ids and (self._num_ends or self._matcher.is_accepting()):
                self._num_ends += 1
            elif not self._consume(token):
                return count
        return len(token_ids)

    def _leave_out(self, ends: list[int], row: IntArray) -> None:
        """Disallow tokens that end the output: llguidance allows them wherever the grammar has their text."""
        for token in ends:
            row.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
        if not row.any():
            raise InvalidRequestError(
                "the grammar allows only a token that ends the output before it is complete; leave such "
                "tokens out of the grammar",
                param="structured_outputs",
            )

    def _consume(self, token: int) -> bool:
        if self._num_ends or token >= self._num_tokens:  # as drafts may be; the matcher would fail for good
            return False
        if self._matcher.try_consume_tokens([token]):
            return True
        self._require_no_error()
        return False

    def _require_no_error(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequestError(
                f"the grammar cannot be followed any further: {_shortened(self._matcher.get_error())}; "
                "make it smaller",
                param="structured_outputs",
            )


@functools.cache
def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def _refusal(spec: StructuredOutputsParams, reason: str) -> InvalidRequestError:
    """Return the error about a specification that cannot be compiled."""
    kind = next(name for name in STRUCTURE_KINDS if getattr(spec, name) is not None)
    hint = ""
    if spec.grammar is not None:
        read, other = ("GBNF (root ::= ...)", "Lark (start: ...)")
        if not is_gbnf(spec.grammar):
            read, other = other, read
        hint = f", read as {read}; {other} is understood too"
    return InvalidRequestError(
        f"structured_outputs.{kind} cannot be used{hint}: {_shortened(reason)}", param="structured_outputs"
    )


def _shortened(text: str) -> str:
    text = text.removesuffix("\n<non-verbose/>").rstrip()
    for pattern, words in _OTHER_WORDS:
        text = re.sub(pattern, words, text)
    return text if len(text) <= _MAX_SHOWN_ERROR else text[:_MAX_SHOWN_ERROR] + "…"
