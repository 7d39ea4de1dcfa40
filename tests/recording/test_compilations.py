"""Results of threads that come when they are delivered, and come again in a replay."""

from __future__ import annotations

import threading

import pytest

from held import num_held
from quire.errors import InvalidRequestError
from quire.recording.compilations import CompilationPlayer, CompilationRecorder, Compiled
from quire.recording.recorded_context import Answer, ContextPlayer

PATIENCE = 60.0


@pytest.fixture
def compilations():
    compilations = CompilationRecorder()
    yield compilations
    compilations.shutdown()


def deliver_all(compilations: CompilationRecorder, count: int) -> list[Compiled]:
    """Deliver until `count` outcomes have come."""
    outcomes: list[Compiled] = []
    while len(outcomes) < count:
        outcomes += compilations.deliver()
    return outcomes


def test_a_result_waits_for_its_delivery(compilations):
    ran = threading.Event()
    future = compilations.submit(ran.set)
    assert ran.wait(PATIENCE)
    assert not future.done()
    told = []
    future.add_done_callback(lambda _: told.append(threading.current_thread()))
    assert deliver_all(compilations, 1) == [Compiled(0)]
    assert told == [threading.current_thread()]


def test_errors_are_delivered_by_name(compilations):
    def fail():
        raise InvalidRequestError("no such grammar")

    future = compilations.submit(fail)
    assert deliver_all(compilations, 1) == [Compiled(0, "InvalidRequestError", "no such grammar")]
    with pytest.raises(InvalidRequestError, match="no such grammar"):
        future.result()


def test_what_is_cancelled_is_not_delivered(compilations):
    may_end = threading.Event()
    future = compilations.submit(may_end.wait, PATIENCE)
    assert future.cancel()
    may_end.set()
    other = compilations.submit(int)
    assert deliver_all(compilations, 1) == [Compiled(1)]
    assert other.result() == 0


def test_nothing_is_kept_of_what_was_delivered_or_cancelled(compilations):
    def round_trip():
        compilations.submit(int).cancel()
        compilations.submit(int)
        deliver_all(compilations, 1)

    for _ in range(3):  # until all threads have been started
        round_trip()
    held = num_held(compilations)
    for _ in range(100):
        round_trip()
    assert num_held(compilations) <= held + 50


def test_a_replay_delivers_the_same_without_compiling():
    player = ContextPlayer()
    compilations = CompilationPlayer(player)
    futures = [compilations.submit(pytest.fail, "compiled in a replay") for _ in range(4)]
    futures[3].cancel()
    outcomes = [Compiled(1, "InvalidRequestError", "bad"), Compiled(0), Compiled(2, "OSError", "lost")]
    compilations.deliver([*outcomes, Compiled(3), Compiled(9)])
    assert all(future.done() for future in futures)
    with pytest.raises(InvalidRequestError, match="bad"):
        futures[1].result()
    error = futures[2].exception()
    assert (type(error).__name__, str(error)) == ("OSError", "lost")
    player.insert([Answer("grammar.accept", "", True), Answer("grammar.accept", "", refusal="too deep")])
    grammar = futures[0].result().copy()
    assert grammar.accept([1]) is True
    with pytest.raises(InvalidRequestError, match="too deep"):
        grammar.accept([2])
