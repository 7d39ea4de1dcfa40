"""A scheduler's queries to its context: recorded while it runs, replayed later.

A scheduler's plans depend on the calls it gets and on the answers to its own questions: the time, what a
connector can load, whether tokens follow a grammar. With both on record it can be run again and must do the
same. The same wrappers ask the questions in both runs; only what is behind them differs: a `ContextRecorder`
or a `ContextPlayer`.
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
from quire.kv.connectors.interface import KVConnector
from quire.recording.forwarding import forwarded
from quire.scheduling.context import SchedulerContext

if TYPE_CHECKING:
    from quire.request import Request
    from quire.step import IntArray, SchedulerOutput
    from quire.structured_outputs import StructuredOutputsParams

T = TypeVar("T")


class Answer(msgspec.Struct, array_like=True, omit_defaults=True):
    """What was asked, about which request if any, and the answer as plain data, a refusal or a failure."""

    question: str
    subject: str
    value: Any = None
    refusal: str | None = None
    failure: str | None = None


class ContextAnswers(ABC):
    """Answers a scheduler's questions in place of its surroundings."""

    @abstractmethod
    def ask(self, question: str, subject: str, function: Callable[..., T], *arguments: Any) -> T:
        """Return what `function(*arguments)` answers, or what it has answered when it was recorded.

        Raises:
            InvalidRequestError: that is its answer.
            Exception: the function fails, or has failed when it was recorded.
        """


class ContextRecorder(ContextAnswers):
    """Records the answers given during a recorded call; plans depend on no others."""

    def __init__(self) -> None:
        self._answers: list[Answer] | None = None

    def begin(self) -> None:
        """Record answers from now on."""
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
        except Exception as error:
            self._note(Answer(question, subject, failure=f"{type(error).__name__}: {error}"))
            raise
        self._note(Answer(question, subject, value))
        return value

    def _note(self, answer: Answer) -> None:
        if self._answers is not None:
            self._answers.append(answer)


class DivergedError(Exception):
    """A scheduler has asked another question than when it was recorded."""


class RecordedFailureError(Exception):
    """What was asked had failed when it was recorded; the message begins with the type of that error."""


class ContextPlayer(ContextAnswers):
    """Gives recorded answers, in order."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []
        self._position = 0
        self._diverged: DivergedError | None = None

    def insert(self, answers: list[Answer]) -> None:
        """Answer from `answers` from now on."""
        self._answers, self._position, self._diverged = answers, 0, None

    def check_at_end(self) -> None:
        """Raise `DivergedError` if another question was asked, or a recorded answer was not asked for."""
        if self._diverged is not None:  # the scheduler goes on when its surroundings fail
            raise self._diverged
        if self._position < len(self._answers):
            recorded = self._answers[self._position]
            raise DivergedError(f"asked for nothing more; the recording has {_named(recorded)}")

    @override
    def ask(self, question: str, subject: str, function: Callable[..., T], *arguments: Any) -> T:
        """`function` is not called.

        Raises:
            DivergedError: this question was not asked here.
        """
        answer = self._next_answer(question, subject)
        if answer.refusal is not None:
            raise InvalidRequestError(answer.refusal)
        if answer.failure is not None:
            raise RecordedFailureError(answer.failure)
        value: T = answer.value
        return value

    def _next_answer(self, question: str, subject: str) -> Answer:
        asked = _named(Answer(question, subject))
        if self._position >= len(self._answers):
            raise self._diverge(f"asked for {asked}; the recording has nothing more")
        answer = self._answers[self._position]
        if (question, subject) != (answer.question, answer.subject):
            raise self._diverge(f"asked for {asked}; the recording has {_named(answer)}")
        self._position += 1
        return answer

    def _diverge(self, message: str) -> DivergedError:
        self._diverged = self._diverged or DivergedError(message)
        return self._diverged


class Silence:
    """Replaces surroundings that a replay does not have: every call returns another `Silence`."""

    def __getattr__(self, name: str) -> Callable[..., Silence]:
        return lambda *arguments: Silence()


def recorded_context(
    context: SchedulerContext, answers: ContextAnswers, executor: Executor
) -> SchedulerContext:
    """Return `context` with `answers` in front of each of its parts that a plan can depend on.

    Args:
        context: the surroundings.
        answers: records their answers, or replays them.
        executor: hands compiled grammars over at known points.
    """
    clock, draft_length = context.clock, context.draft_length

    def recorded_commit(group: str, commit: Callable[[int], int] | None) -> Callable[[int], int] | None:
        return commit and (lambda count: answers.ask("commit_blocks", group, commit, count))

    return dataclasses.replace(
        context,
        clock=lambda: answers.ask("clock", "", clock),
        grammars=None if context.grammars is None else RecordedGrammarBackend(answers, context.grammars),
        executor=executor,
        connector=None if context.connector is None else RecordedConnector(answers, context.connector),
        draft_length=lambda num_running: answers.ask("draft_length", "", draft_length, num_running),
        commit_blocks=recorded_commit("", context.commit_blocks),
        windows=tuple(
            dataclasses.replace(each, commit=recorded_commit(str(each.window), each.commit))
            for each in context.windows
        ),
    )


class RecordedGrammarBackend(GrammarBackend):
    """A grammar backend whose grammars' answers are recorded."""

    def __init__(self, answers: ContextAnswers, backend: GrammarBackend) -> None:
        self.vocab_size = backend.vocab_size
        self._answers = answers
        self._backend = backend

    @override
    def compile(self, spec: StructuredOutputsParams) -> Grammar:
        return RecordedGrammar(self._answers, self._backend.compile(spec))

    @override
    def compile_slowly(self, spec: StructuredOutputsParams) -> Grammar:
        return RecordedGrammar(self._answers, self._backend.compile_slowly(spec))


class RecordedGrammar(Grammar):
    """A grammar whose answers are recorded; of a bitmask only that there is one: plans need no more."""

    def __init__(self, answers: ContextAnswers, grammar: Grammar) -> None:
        self._answers = answers
        self._grammar = grammar

    @property
    @override
    def num_bytes(self) -> int:
        return self._answers.ask("grammar.num_bytes", "", lambda: self._grammar.num_bytes)

    @override
    def accept(self, token_ids: Sequence[int]) -> bool:
        return self._answers.ask("grammar.accept", "", self._grammar.accept, token_ids)

    @override
    def rollback(self, num_tokens: int) -> None:
        self._grammar.rollback(num_tokens)

    @override
    def num_valid(self, token_ids: Sequence[int]) -> int:
        return self._answers.ask("grammar.num_valid", "", self._grammar.num_valid, token_ids)

    @override
    def fill_bitmask(self, row: IntArray) -> None:
        self._answers.ask("grammar.fill_bitmask", "", self._grammar.fill_bitmask, row)

    @override
    def copy(self) -> Grammar:
        return RecordedGrammar(self._answers, self._grammar.copy())


class RecordedConnector(KVConnector):
    """A connector whose scheduler side is recorded; of the metadata only that there is one."""

    def __init__(self, answers: ContextAnswers, connector: KVConnector) -> None:
        self.by_group = connector.by_group
        self._answers = answers
        self._connector = connector

    @override
    def request_arrived(self, request: Request) -> None:
        arrive = self._connector.request_arrived
        self._answers.ask("connector.arrived", request.request_id, arrive, request)

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        find = self._connector.get_num_new_matched_tokens
        found, is_async = self._answers.ask(
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

        self._answers.ask("connector.load", request.request_id, load)

    @override
    def load_state(self, request: Request, checkpoint: int, num_local_tokens: int) -> None:
        load = self._connector.load_state
        name = request.request_id
        self._answers.ask("connector.load_state", name, load, request, checkpoint, num_local_tokens)

    @override
    def lends_prompt(self, request: Request) -> bool:
        lends = self._connector.lends_prompt
        return self._answers.ask("connector.lends_prompt", request.request_id, lends, request)

    @override
    def cancel_load(self, request_id: str) -> None:
        self._answers.ask("connector.cancel", request_id, self._connector.cancel_load, request_id)

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object | None:
        built: list[object | None] = [None]

        def build() -> None:
            built[0] = self._connector.build_connector_meta(scheduler_output)

        self._answers.ask("connector.metadata", "", build)
        return built[0]

    @override
    def lend_state(self, request: Request, checkpoint: int) -> None:
        lend = self._connector.lend_state
        self._answers.ask("connector.lend_state", request.request_id, lend, request, checkpoint)

    @override
    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, Mapping[str, Any] | None]:
        finish = self._connector.request_finished
        delays_free, params = self._answers.ask(
            "connector.finished", request.request_id, finish, request, block_ids
        )
        return delays_free, params

    @override
    def leases_renewed(self) -> frozenset[str]:
        connector = self._connector
        renewed = self._answers.ask("connector.renewed", "", lambda: sorted(connector.leases_renewed()))
        return frozenset(renewed)

    @override
    def lease_ended(self, request_id: str) -> None:
        self._answers.ask("connector.lease_ended", request_id, self._connector.lease_ended, request_id)

    @override
    def reset(self) -> bool:
        return self._answers.ask("connector.reset", "", self._connector.reset)

    stats = forwarded("_connector", KVConnector.stats)
    close = forwarded("_connector", KVConnector.close)
    register_states = forwarded("_connector", KVConnector.register_states)
    register_kv_caches = forwarded("_connector", KVConnector.register_kv_caches)
    start_load_kv = forwarded("_connector", KVConnector.start_load_kv)
    wait_for_layer_load = forwarded("_connector", KVConnector.wait_for_layer_load)
    save_kv_layer = forwarded("_connector", KVConnector.save_kv_layer)
    wait_for_save = forwarded("_connector", KVConnector.wait_for_save)
    get_finished = forwarded("_connector", KVConnector.get_finished)
    get_block_ids_with_load_errors = forwarded("_connector", KVConnector.get_block_ids_with_load_errors)


def replayed_grammar(player: ContextPlayer) -> Grammar:
    """Return a grammar whose answers are all replayed."""
    silence: Any = Silence()
    return RecordedGrammar(player, silence)


def _named(answer: Answer) -> str:
    return f"{answer.question} of {answer.subject}" if answer.subject else answer.question
