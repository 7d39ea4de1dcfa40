"""`quire chat` over an engine that repeats the question in upper case."""

from __future__ import annotations

import asyncio
import signal

import pytest
from fake_engine import FakeAsyncLLM, install_fake_async_llm
from typer.testing import CliRunner, Result

from quire.cli.commands.chat import ChatHistory, run_command
from quire.cli.main import app
from quire.errors import ContextLengthError, EngineDeadError
from quire.status import FinishReason


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeAsyncLLM]:
    return install_fake_async_llm(monkeypatch)


def chat(*lines: str, arguments: tuple[str, ...] = ()) -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input="".join(f"{line}\n" for line in lines))


def seen_messages(engine: type[FakeAsyncLLM]) -> list[list[tuple[str, str]]]:
    (llm,) = engine.instances
    assert llm.is_shut_down
    return [[(message["role"], message["content"]) for message in messages] for messages, _ in llm.seen]


def test_each_turn_sees_the_ones_before(engine: type[FakeAsyncLLM]):
    result = chat("hello", "", "and more", "/quit", "never")
    assert result.exit_code == 0
    assert result.stdout == "HELLO\nAND MORE\n"
    assert seen_messages(engine) == [
        [("user", "hello")],
        [("user", "hello"), ("assistant", "HELLO"), ("user", "and more")],
    ]


def test_system_prompt_from_the_command_line_survives_a_reset(engine: type[FakeAsyncLLM]):
    chat("a", "/reset", "b", arguments=("--system", "be brief"))
    system = ("system", "be brief")
    assert seen_messages(engine) == [[system, ("user", "a")], [system, ("user", "b")]]


def test_system_prompt_may_be_set_and_cleared(engine: type[FakeAsyncLLM]):
    chat("a", "/system be kind", "b", "/system", "c")
    assert seen_messages(engine) == [
        [("user", "a")],
        [("system", "be kind"), ("user", "b")],
        [("user", "c")],
    ]


def test_a_refused_turn_is_taken_back(engine: type[FakeAsyncLLM]):
    result = chat("a", "refuse", "b")
    assert result.exit_code == 0
    assert "9 tokens; the limit is 8; /reset starts a new conversation" in result.stderr
    assert seen_messages(engine)[-1] == [("user", "a"), ("assistant", "A"), ("user", "b")]


def test_unknown_commands_and_help(capsys: pytest.CaptureFixture[str]):
    history = ChatHistory("s")
    run_command("/help", history)
    run_command("/rest", history)
    captured = capsys.readouterr()
    assert "/reset" in captured.out
    assert captured.err == "error: unknown command /rest; /help lists the commands\n"
    assert history.messages == [{"role": "system", "content": "s"}]


def test_ctrl_c_stops_the_answer_and_not_the_program(
    engine: type[FakeAsyncLLM], monkeypatch: pytest.MonkeyPatch
):
    answer = FakeAsyncLLM.answer

    async def interrupted(self, text, params):
        async for output in answer(self, text, params):
            yield output
            if text.startswith("LONG"):
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(0)

    monkeypatch.setattr(FakeAsyncLLM, "answer", interrupted)
    result = chat("long story", "next")
    assert result.exit_code == 0
    assert result.stdout == "LONG [stopped]\nNEXT\n"
    assert seen_messages(engine)[-1] == [("user", "long story"), ("assistant", "LONG"), ("user", "next")]


def test_an_answer_that_the_engines_death_cuts_ends_its_line(
    engine: type[FakeAsyncLLM], monkeypatch: pytest.MonkeyPatch
):
    answer = FakeAsyncLLM.answer

    async def die(self, text, params):
        async for output in answer(self, text, params):
            yield output
            raise EngineDeadError("the engine process ended with code 9")

    monkeypatch.setattr(FakeAsyncLLM, "answer", die)
    result = chat("long story", "next")
    assert (result.exit_code, result.stdout) == (1, "LONG\n")
    assert result.stderr == "error: the engine process ended with code 9\n"


def test_a_full_context_drops_the_oldest_turns_and_says_so(
    engine: type[FakeAsyncLLM], monkeypatch: pytest.MonkeyPatch
):
    async def tokens(self, messages):
        if len(messages) > 4:  # with the system prompt
            raise ContextLengthError("the prompt has 9 tokens; the limit is 8")
        return [1] * 3072

    monkeypatch.setattr(FakeAsyncLLM, "tokenize_chat", tokens)
    result = chat("a", "b", "c", "d", arguments=("--system", "s"))
    assert result.stdout == "A\nB\nC\nD\n"
    assert result.stderr == "[the context is full: the oldest turn was left out]\n" * 2
    assert seen_messages(engine)[-1] == [("system", "s"), ("user", "c"), ("assistant", "C"), ("user", "d")]


def test_old_turns_make_room_for_as_long_an_answer_as_is_asked_for(
    engine: type[FakeAsyncLLM], monkeypatch: pytest.MonkeyPatch
):
    async def tokens(self, messages):
        return [1] * 1000 * len(messages)

    monkeypatch.setattr(FakeAsyncLLM, "tokenize_chat", tokens)
    result = chat("a", "b", "c", arguments=("--max-tokens", "3000"))
    assert result.stderr == "[the context is full: the oldest turn was left out]\n" * 2
    assert [len(messages) for messages, _ in engine.instances[0].seen] == [1, 1, 1]


def test_an_answer_that_the_context_cuts_says_so(engine: type[FakeAsyncLLM], monkeypatch: pytest.MonkeyPatch):
    answer = FakeAsyncLLM.answer

    async def cut(self, text, params):
        async for output in answer(self, text, params):
            output.outputs[0].finish_reason = FinishReason.LENGTH
            yield output

    monkeypatch.setattr(FakeAsyncLLM, "answer", cut)
    assert chat("a").stderr == "[the context is full: the answer ends here]\n"
    assert chat("a", arguments=("--max-tokens", "1")).stderr == ""


def test_the_model_is_an_argument(engine: type[FakeAsyncLLM]):
    chat("a", arguments=("some-model", "--max-num-seqs", "2"))
    assert engine.instances[0].config.model == "some-model"
    assert engine.instances[0].config.scheduler.max_num_seqs == 2
