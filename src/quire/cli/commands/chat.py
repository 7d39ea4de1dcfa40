"""`quire chat`: chat with a model in the terminal."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.console import in_flags, print_error
from quire.cli.options import config_options
from quire.cli.progress import LoadingBar
from quire.config import EngineConfig
from quire.errors import ContextLengthError, InvalidRequestError, QuireError
from quire.front.process.launch import started_ahead
from quire.request_output import RequestMetrics
from quire.sampling_params import SamplingParams
from quire.status import FinishReason

if TYPE_CHECKING:
    from quire.front.async_llm import AsyncLLM

COMMANDS = """\
  /reset         start a new conversation
  /system TEXT   start a new conversation with this system prompt; without TEXT, with none
  /help          list the commands
  /quit          quit, like Ctrl-D

Enter sends a turn, Alt-Enter or Ctrl-J begins a line in it, and pasted lines stay together. The arrows bring
earlier turns back. Ctrl-C stops an answer; at the prompt, twice quits."""
ROOM_FOR_ANSWER = 512  # tokens, but at most a quarter of the context; the oldest turns make room for it


@config_options(
    positional=("model",), defaults={"temperature": 0.0}, engine=EngineConfig, sampling=SamplingParams
)
def chat(
    engine: EngineConfig,
    sampling: SamplingParams,
    system: Annotated[
        str, typer.Option("--system", "-s", metavar="TEXT", help="System prompt.", show_default=False)
    ] = "",
) -> None:
    """Chat with MODEL in the terminal.

    Answers stream. Each turn is sent with all earlier ones; thanks to the prefix cache, these are not
    computed again. When the context is full, the oldest turns are left out, with a note. Ctrl-C stops an
    answer and keeps its text so far; at the prompt, twice quits. /help lists the commands.

    Examples:
      quire chat
      quire chat Qwen/Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7
    """
    with started_ahead(), asyncio.Runner() as runner:
        from quire.front.async_llm import AsyncLLM

        llm = runner.run(_started(AsyncLLM, engine))
        try:
            _read_and_answer(runner, llm, ChatHistory(system), sampling)
        finally:
            runner.run(llm.shutdown())


async def _started(engine_class: type[AsyncLLM], config: EngineConfig) -> AsyncLLM:
    llm = engine_class(config)
    try:
        with LoadingBar(config.model) as on_progress:
            await llm.wait_until_ready(on_progress)
        await asyncio.to_thread(llm.tokenizer.check_chat_template)
    except BaseException:
        await llm.shutdown()
        raise
    return llm


class ChatHistory:
    """The messages so far, in the form for the chat template."""

    def __init__(self, system: str = "") -> None:
        self.messages: list[dict[str, Any]] = []
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Remove all turns; `system` replaces the system prompt, None keeps it."""
        if system is None:
            self.messages = [message for message in self.messages[:1] if message["role"] == "system"]
        else:
            self.messages = [{"role": "system", "content": system}] if system else []

    def add(self, role: str, content: str) -> None:
        """Add a message."""
        self.messages.append({"role": role, "content": content})

    def remove_oldest_turn(self) -> bool:
        """Remove the oldest question and its answer, unless it is the last; return whether it was removed."""
        questions = [index for index, one in enumerate(self.messages) if one["role"] == "user"]
        if len(questions) < 2:
            return False
        del self.messages[questions[0] : questions[1]]
        return True

    def remove_last(self) -> None:
        """Remove the last message."""
        self.messages.pop()


def _read_and_answer(
    runner: asyncio.Runner, llm: AsyncLLM, history: ChatHistory, sampling: SamplingParams
) -> None:
    """Read turns and answer them until the end of the input or /quit."""
    read = _piped_turn
    if is_interactive := sys.stdin.isatty() and sys.stdout.isatty():
        from quire.cli.commands.chat_terminal import TerminalTurns, history_file

        read = TerminalTurns(runner, history_file()).read
        typer.echo(f"{llm.info.model} is ready; Alt-Enter begins a line, /help lists the commands.", err=True)
    while (turn := read()) is not None:
        turn = turn.strip()
        if turn == "/quit":
            return
        if turn.startswith("/"):
            run_command(turn, history)
        elif turn:
            _answer(runner, llm, history, sampling, turn, shows_speed=is_interactive)


def _piped_turn() -> str | None:
    """Return the next line of standard input; None at its end."""
    try:
        return sys.stdin.readline() or None
    except KeyboardInterrupt:
        return None


def run_command(line: str, history: ChatHistory) -> None:
    """Run the command in a line that begins with a slash."""
    command, _, argument = line.partition(" ")
    if command == "/reset":
        history.reset()
    elif command == "/system":
        history.reset(argument.strip())
    elif command == "/help":
        typer.echo(COMMANDS)
    else:
        print_error(f"unknown command {command}; /help lists the commands")


def _answer(
    runner: asyncio.Runner,
    llm: AsyncLLM,
    history: ChatHistory,
    sampling: SamplingParams,
    question: str,
    *,
    shows_speed: bool,
) -> None:
    history.add("user", question)
    try:
        num_dropped = runner.run(drop_what_does_not_fit(llm, history, sampling))
        answer = runner.run(stream_answer(llm, history, sampling))
    except InvalidRequestError as error:
        history.remove_last()
        print_error(f"{in_flags(str(error))}; /reset starts a new conversation")
        return
    except KeyboardInterrupt:  # before the answer began
        history.remove_last()
        return
    history.add("assistant", answer.text)
    if num_dropped:
        turns = "turn was" if num_dropped == 1 else f"{num_dropped} turns were"
        typer.echo(f"[the context is full: the oldest {turns} left out]", err=True)
    if answer.is_cut:
        typer.echo("[the context is full: the answer ends here]", err=True)
    if shows_speed and answer.speed:
        typer.secho(answer.speed, dim=True, err=True)


async def drop_what_does_not_fit(llm: AsyncLLM, history: ChatHistory, sampling: SamplingParams) -> int:
    """Remove the oldest turns until there is room for an answer; return their number.

    The last turn stays; if it is too long by itself, the engine reports that.
    """
    limit = llm.info.max_model_len
    room = sampling.max_tokens or min(ROOM_FOR_ANSWER, limit // 4)
    for num_dropped in itertools.count():
        try:
            if len(await llm.tokenize_chat(history.messages)) + room <= limit:
                return num_dropped
        except ContextLengthError:
            pass
        if not history.remove_oldest_turn():
            return num_dropped
    raise AssertionError("the loop ends with the turns")


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """An answer: its text, whether it reached the end of the context, and its speed in words."""

    text: str
    is_cut: bool = False
    speed: str = ""  # empty: unknown


async def stream_answer(llm: AsyncLLM, history: ChatHistory, sampling: SamplingParams) -> Answer:
    """Stream the answer to stdout and return it; cancellation (Ctrl-C) ends it early."""
    text, last = "", None
    outputs = llm.chat(history.messages, sampling)
    try:
        async for output in outputs:
            last = output
            sys.stdout.write(output.outputs[0].text[len(text) :])
            sys.stdout.flush()
            text = output.outputs[0].text
    except asyncio.CancelledError:
        sys.stdout.write(" [stopped]")
    except QuireError:
        if text:
            sys.stdout.write("\n")
        raise
    finally:
        await outputs.aclose()
    sys.stdout.write("\n")
    if last is None:
        return Answer(text)
    completion = last.outputs[0]
    if completion.error:
        print_error(completion.error)
    is_cut = completion.finish_reason == FinishReason.LENGTH and sampling.max_tokens is None
    return Answer(text, is_cut, "" if last.metrics is None else _speed(last.metrics))


def _speed(metrics: RequestMetrics) -> str:
    """Describe the speed of an answer: time to first token, then tokens per second."""
    first = f"{metrics.num_output_tokens} tokens, the first after {metrics.time_to_first_token:.2f} s"
    seconds = metrics.total_time - metrics.time_to_first_token
    if metrics.num_output_tokens < 2 or seconds <= 0:
        return f"[{first}]"
    return f"[{first}, {(metrics.num_output_tokens - 1) / seconds:.1f} tokens/s]"
