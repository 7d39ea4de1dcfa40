"""What a scheduler is told when it asks its surroundings, on tape: noted while it runs, played back later.

A scheduler's plans depend on the calls it gets and on the answers to its own questions: the time, what a
connector can load, whether tokens follow a grammar. With both on record it can be run again and must do the
same. The same wrappers ask the questions in both runs; only the tape behind them differs.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from typing_extensions import override

from quire.errors import InvalidRequestError
from quire.grammar.interface import Grammar, GrammarBackend
from quire.kv.connector import KVConnector
from quire.scheduling.context import SchedulerContext

if TYPE_CHECKING:
    import torch

    from quire.kv.tensors import KVCacheTensors
    from quire.request import Request
    from quire.step import IntArray, SchedulerOutput
    from quire.structured_outputs import StructuredOutputsParams

T = TypeVar("T")


class Answer(msgspec.Struct, array_like=True, omit_defaults=True):
    """What was asked, about which request if any, and the answer as plain data or what was refused."""

    question: str
    subject: str
    value: Any = None
    refusal: str | None = None


class Tape(ABC):
    """Stands between a scheduler and its surroundings."""

    @abstractmethod
    def ask(self, question: str, subject: str, function: Callable[..., T], *arguments: Any) -> T:
        """Return what `function(*arguments)` answers, or what it has answered when it was recorded.

        Raises:
            InvalidRequestError: that is its answer.
        """


class RecordingTape(Tape):
    """Notes the answers that are given while a call is recorded; others have no part in the plans."""

    def __init__(self) -> None:
        self._answers: list[Answer] | None = None

    def begin(self) -> None:
        """Note answers from now on."""
        self._answers = []

    def end(self) -> list[Answer]:
        """Return the answers since `begin`."""
        answers, self._answers = self._answers or [], None
        return answers

    @override
    def ask(self, question: str, subject: str, function: Callable[..., T], *arguments: Any) -> T:
        try:
            value = function(*arguments)
        except InvalidRequestError as error:
            self._note(Answer(question, subject, refusal=str(error)))
            raise
        self._note(Answer(question, subject, value))
        return value

    def _note(self, answer: Answer) -> None:
        if self._answers is not None:
            self._answers.append(answer)


class DivergedError(Exception):
    """A scheduler has asked something else than when it was recorded."""


class ReplayTape(Tape):
    """Gives recorded answers, in their order."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []
        self._position = 0

    def insert(self, answers: list[Answer]) -> None:
        """Answer from `answers` from now on."""
        self._answers, self._position = answers, 0

    def check_at_end(self) -> None:
        """Raise `DivergedError` if a recorded answer has not been asked for."""
        if self._position < len(self._answers):
            recorded = self._answers[self._position]
            raise DivergedError(f"asked for nothing more; when recorded, for {_named(recorded)}")

    @override
    def ask(self, question: str, subject: str, function: Callable[..., T], *arguments: Any) -> T:
        """`function` is not called.

        Raises:
            DivergedError: this question was not asked here.
        """
        asked = _named(Answer(question, subject))
        if self._position >= len(self._answers):
            raise DivergedError(f"asked for {asked}; when recorded, for nothing more")
        answer = self._answers[self._position]
        if (question, subject) != (answer.question, answer.subject):
            raise DivergedError(f"asked for {asked}; when recorded, for {_named(answer)}")
        self._position += 1
        if answer.refusal is not None:
            raise InvalidRequestError(answer.refusal)
        value: T = answer.value
        return value


class Silence:
    """Stands for surroundings that a replay does not have: whatever is called returns another silence."""

    def __getattr__(self, name: str) -> Callable[..., Silence]:
        return lambda *arguments: Silence()


def taped(context: SchedulerContext, tape: Tape, executor: Executor) -> SchedulerContext:
    """Return `context` with `tape` in front of each of its parts that a plan can depend on.

    Args:
        context: the surroundings.
        tape: notes their answers, or gives them.
        executor: hands compiled grammars over at known points.
    """
    clock, draft_length, commit = context.clock, context.draft_length, context.commit_blocks
    return dataclasses.replace(
        context,
        clock=lambda: tape.ask("clock", "", clock),
        grammars=None if context.grammars is None else TapedGrammars(tape, context.grammars),
        executor=executor,
        connector=None if context.connector is None else TapedConnector(tape, context.connector),
        draft_length=lambda num_running: tape.ask("draft_length", "", draft_length, num_running),
        commit_blocks=None if commit is None else lambda count: tape.ask("commit_blocks", "", commit, count),
    )


class TapedGrammars(GrammarBackend):
    """A grammar backend whose grammars' answers are on tape."""

    def __init__(self, tape: Tape, backend: GrammarBackend) -> None:
        self.vocab_size = backend.vocab_size
        self._tape = tape
        self._backend = backend

    @override
    def compile(self, spec: StructuredOutputsParams) -> Grammar:
        return TapedGrammar(self._tape, self._backend.compile(spec))


class TapedGrammar(Grammar):
    """A grammar whose answers are on tape; of bitmasks only whether there are any: no plan needs more."""

    def __init__(self, tape: Tape, grammar: Grammar) -> None:
        self._tape = tape
        self._grammar = grammar

    @override
    def accept(self, token_ids: Sequence[int]) -> bool:
        return self._tape.ask("grammar.accept", "", self._grammar.accept, token_ids)

    @override
    def rollback(self, num_tokens: int) -> None:
        self._grammar.rollback(num_tokens)

    @override
    def num_valid(self, token_ids: Sequence[int]) -> int:
        return self._tape.ask("grammar.num_valid", "", self._grammar.num_valid, token_ids)

    @override
    def fill_bitmask(self, row: IntArray) -> None:
        self._tape.ask("grammar.fill_bitmask", "", self._grammar.fill_bitmask, row)

    @override
    def copy(self) -> Grammar:
        return TapedGrammar(self._tape, self._grammar.copy())


class TapedConnector(KVConnector):
    """A connector whose scheduler side is on tape, besides the metadata, which no plan depends on."""

    def __init__(self, tape: Tape, connector: KVConnector) -> None:
        self._tape = tape
        self._connector = connector

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        find = self._connector.get_num_new_matched_tokens
        found, is_async = self._tape.ask(
            "connector.find", request.request_id, find, request, num_computed_tokens
        )
        return found, is_async

    @override
    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        connector = self._connector

        def load() -> int:
            connector.update_state_after_alloc(request, block_ids, num_external_tokens)
            return num_external_tokens

        self._tape.ask("connector.load", request.request_id, load)

    @override
    def cancel_load(self, request_id: str) -> None:
        self._tape.ask("connector.cancel", request_id, self._connector.cancel_load, request_id)

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object | None:
        return self._connector.build_connector_meta(scheduler_output)

    @override
    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, Mapping[str, Any] | None]:
        finish = self._connector.request_finished
        delays_free, params = self._tape.ask(
            "connector.finished", request.request_id, finish, request, block_ids
        )
        return delays_free, params

    @override
    def leases_renewed(self) -> frozenset[str]:
        connector = self._connector
        renewed = self._tape.ask("connector.renewed", "", lambda: sorted(connector.leases_renewed()))
        return frozenset(renewed)

    @override
    def reset(self) -> bool:
        return self._tape.ask("connector.reset", "", self._connector.reset)

    @override
    def register_kv_caches(self, kv_caches: KVCacheTensors) -> None:
        self._connector.register_kv_caches(kv_caches)

    @override
    def start_load_kv(self, metadata: object | None) -> None:
        self._connector.start_load_kv(metadata)

    @override
    def wait_for_layer_load(self, layer: int) -> None:
        self._connector.wait_for_layer_load(layer)

    @override
    def save_kv_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._connector.save_kv_layer(layer, keys, values)

    @override
    def wait_for_save(self) -> None:
        self._connector.wait_for_save()

    @override
    def get_finished(self, finished_ids: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
        return self._connector.get_finished(finished_ids)

    @override
    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        return self._connector.get_block_ids_with_load_errors()


def silent_grammar(tape: ReplayTape) -> Grammar:
    """Return a grammar that answers from the tape alone."""
    nobody: Any = Silence()
    return TapedGrammar(tape, nobody)


def _named(answer: Answer) -> str:
    return f"{answer.question} of {answer.subject}" if answer.subject else answer.question
