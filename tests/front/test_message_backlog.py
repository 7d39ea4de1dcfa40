"""Messages in pieces: the same outputs in the same order, and never many at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.messages import LoadProgress, StepOutputs
from quire.front.process import message_backlog
from quire.front.process.message_backlog import MAX_OUTPUTS, POSITIONS_AT_ONCE, MessageBacklog, Turn
from quire.scheduling.outputs import EngineCoreOutput, SchedulerStats
from quire.status import FinishReason

MESSAGES = st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 20), st.booleans())))


@given(MESSAGES, st.integers(1, 7))
def test_pieces_are_the_messages(shapes, most):
    """None stands for a message without outputs, a pair for (outputs, whether it has statistics)."""
    backlog, expected = MessageBacklog(), []
    for number, shape in enumerate(shapes):
        if shape is None:
            backlog.extend([LoadProgress(number, 0)])
            expected.append(("progress", number))
            continue
        count, has_stats = shape
        outputs = [EngineCoreOutput(f"{number}/{index}", []) for index in range(count)]
        stats = SchedulerStats(num_running=number) if has_stats else None
        backlog.extend([StepOutputs(outputs, stats)])
        expected += [("output", one.request_id) for one in outputs]
        if has_stats:
            expected.append(("stats", number))
    seen = []
    while backlog:
        piece = backlog.take(most)
        if isinstance(piece, LoadProgress):
            seen.append(("progress", piece.done))
            continue
        assert len(piece.outputs) <= most
        seen += [("output", one.request_id) for one in piece.outputs]
        if piece.stats is not None:
            seen.append(("stats", piece.stats.num_running))
    assert seen == expected


@given(st.lists(st.one_of(st.none(), st.integers(0, 700))), st.integers(1, 7))
def test_long_parts_of_prompts_are_taken_in_pieces(lengths, most):
    """None stands for an output without log-probabilities of a prompt, a number for so many."""

    def outputs() -> list[EngineCoreOutput]:
        return [
            EngineCoreOutput(
                str(number),
                [7],
                FinishReason.LENGTH,
                num_cached_tokens=5,
                first_scheduled_time=1.5,
                prompt_logprobs=None if length is None else list(range(length)),
            )
            for number, length in enumerate(lengths)
        ]

    backlog, seen = MessageBacklog(), {}
    backlog.extend([StepOutputs(outputs(), SchedulerStats())])
    while backlog:
        piece = backlog.take(most)
        assert sum(len(one.prompt_logprobs or ()) for one in piece.outputs) <= POSITIONS_AT_ONCE
        for one in piece.outputs:
            assert (one.num_cached_tokens, one.first_scheduled_time) == (5, 1.5)
            before = seen.get(one.request_id)
            assert before is None or before.finish_reason is None, "what ends a request comes last"
            seen[one.request_id] = one
            if before is not None:
                assert not before.new_token_ids
                one.prompt_logprobs[:0] = before.prompt_logprobs
    assert piece.stats is not None
    assert list(seen.values()) == outputs()


def test_a_turn_ends_by_number_or_by_time(monkeypatch):
    now = [5.0]
    monkeypatch.setattr(message_backlog.time, "monotonic", lambda: now[0])
    turn = Turn()
    turn.note(StepOutputs([EngineCoreOutput("a", [])] * (MAX_OUTPUTS - 1)))
    assert not turn.is_over
    turn.note(LoadProgress(1, 2))
    assert turn.is_over
    turn = Turn()
    now[0] += message_backlog.MAX_SECONDS
    assert turn.is_over
