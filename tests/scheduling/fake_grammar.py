"""Grammars for tests: what may come next depends on the place alone, and compilation ends on command."""

from __future__ import annotations

from concurrent.futures import Executor, Future

import numpy as np
from fake_runner import VOCAB

from quire.errors import InvalidRequestError

END = VOCAB - 1
KINDS = ("good", "bad", "dies", "crashes")


def allowed_at(key: int, length: int, place: int) -> set[int]:
    """About a third of the vocabulary before `length` tokens, and from then on only the end."""
    if place >= length:
        return {END}
    return {token for token in range(END) if (token * 7 + place + key) % 3 == 0}


def parse(spec) -> tuple[str, int, int]:
    """Return (kind, key, length) of a specification `kind-key-length`."""
    kind, key, length = spec.regex.split("-")
    return kind, int(key), int(length)


class FakeGrammar:
    def __init__(self, kind: str, key: int, length: int, place: int = 0) -> None:
        self._kind = kind
        self._key = key
        self._length = length
        self._place = place

    def accept(self, token_ids) -> bool:
        if self.num_valid(token_ids) < len(token_ids):
            return False
        self._place += len(token_ids)
        return True

    num_bytes = 100

    def rollback(self, num_tokens: int) -> None:
        self._place -= num_tokens
        assert self._place >= 0

    def num_valid(self, token_ids) -> int:
        for number, token in enumerate(token_ids):
            place = self._place + number
            self._die_if_due(place)
            if token not in allowed_at(self._key, self._length, place):
                return number
        return len(token_ids)

    def fill_bitmask(self, row) -> None:
        self._die_if_due(self._place)
        bits = np.zeros(len(row) * 32, dtype=np.uint8)
        bits[list(allowed_at(self._key, self._length, self._place))] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def copy(self) -> FakeGrammar:
        return FakeGrammar(self._kind, self._key, self._length, self._place)

    def _die_if_due(self, place: int) -> None:
        """Grammars of the kind `dies` cannot be followed beyond half of their length."""
        if self._kind == "dies" and place >= self._length // 2:
            raise InvalidRequestError("the grammar takes more than its limits")


class FakeGrammarBackend:
    vocab_size = VOCAB

    def compile(self, spec) -> FakeGrammar:
        kind, key, length = parse(spec)
        if kind == "bad":
            raise InvalidRequestError("the grammar is not one")
        if kind == "crashes":
            raise RuntimeError("the compiler fell over")
        return FakeGrammar(kind, key, length)


class CompilerOnCommand(Executor):
    """Runs nothing until it is told to, in the caller's thread; what it is never told never ends."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Future, tuple]] = []

    def submit(self, function, /, *arguments, **options):
        future: Future = Future()
        self._jobs.append((future, (function, arguments)))
        return future

    def finish(self, count: int) -> int:
        """Let the `count` oldest jobs that are still wanted end, well or badly; return how many did."""
        self._jobs = [job for job in self._jobs if not job[0].cancelled()]
        due, self._jobs = self._jobs[:count], self._jobs[count:]
        for future, (function, arguments) in due:
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)
        return len(due)
