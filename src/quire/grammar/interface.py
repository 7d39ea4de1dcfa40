"""The interfaces of grammars and of grammar backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.errors import InvalidRequestError, QuireError
from quire.step import IntArray
from quire.structured_outputs import StructuredOutputsParams


class Grammar(Protocol):
    """The state of one request in its grammar."""

    @property
    def num_bytes(self) -> int:
        """Estimated size in its initial state."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance over these tokens; False, and nothing changes, if they are not allowed.

        Raises:
            InvalidRequestError: the grammar has exceeded its limits and cannot be followed any further.
        """

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted tokens."""

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens could be accepted, one after the other. Changes nothing.

        Raises:
            InvalidRequestError: as `accept` does.
        """

    def fill_bitmask(self, row: IntArray) -> None:
        """Write which tokens may come next: [ceil(vocabulary / 32)], see `quire.step.GrammarOutput`.

        Raises:
            InvalidRequestError: as `accept` does, or no token may come next.
        """

    def copy(self) -> Grammar:
        """Return an independent grammar in the same state."""


class SlowGrammarError(Exception):
    """A specification cannot be compiled quickly, and others should not wait for it."""


class GrammarBackend(Protocol):
    """Compiles specifications into grammars."""

    vocab_size: int

    def compile(self, spec: StructuredOutputsParams) -> Grammar:
        """Return the grammar in its initial state. Slow; may be called from any thread.

        Raises:
            InvalidRequestError: what is wrong with the specification.
            SlowGrammarError: it takes long; `compile_slowly` compiles it, or refuses it.
        """

    def compile_slowly(self, spec: StructuredOutputsParams) -> Grammar:
        """Like `compile`, for a specification that takes long."""


def failure_of(error: BaseException) -> QuireError:
    """Return the error for the request whose grammar could not be compiled; by default, it is bad."""
    if isinstance(error, QuireError):
        return error
    return InvalidRequestError(failure_message(error), param="structured_outputs")


def failure_when_followed(error: BaseException) -> QuireError:
    """Return the error for the request whose grammar failed later; by default, the backend is at fault."""
    return error if isinstance(error, QuireError) else QuireError(failure_message(error))


def failure_message(error: BaseException) -> str:
    """Return the error for the request whose grammar failed, be it invalid or the backend at fault."""
    if isinstance(error, InvalidRequestError):
        return str(error)
    return f"the grammar of structured_outputs failed: {type(error).__name__}: {error}"
