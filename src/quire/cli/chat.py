"""`quire chat`: chat with a model in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.console import in_flags, print_error
from quire.cli.options import config_options
from quire.cli.progress import LoadingBar
from quire.config import EngineConfig
from quire.errors import InvalidRequestError, QuireError
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.front.async_llm import AsyncLLM

COMMANDS = """\
  /reset         start a new conversation
  /system TEXT   start a new conversation with this system prompt; without TEXT, with none
  /help          list the commands
  /quit          quit, like Ctrl-D"""


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
    computed again. Ctrl-C stops an answer and keeps its text so far; at the prompt, it quits. /help lists
    the commands.

    Examples:
      quire chat
      quire chat Qwen/Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7
    """
    from quire.front.async_llm import AsyncLLM

    with asyncio.Runner() as runner:
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
    """The messages so far, as the chat template takes them."""

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

    def remove_last(self) -> None:
        """Remove the last message."""
        self.messages.pop()


def _read_and_answer(
    runner: asyncio.Runner, llm: AsyncLLM, history: ChatHistory, sampling: SamplingParams
) -> None:
    """Read lines and answer them until the end of the input, Ctrl-C at the prompt, or /quit."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):  # not in every build of Python
            import readline  # noqa: F401  gives input() line editing and a history
        typer.echo(f"{llm.info.model} is ready; /help lists the commands.", err=True)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            if interactive:
                typer.echo()
            return
        if line == "/quit":
            return
        if line.startswith("/"):
            run_command(line, history)
        elif line:
            _answer(runner, llm, history, sampling, line)


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
    runner: asyncio.Runner, llm: AsyncLLM, history: ChatHistory, sampling: SamplingParams, question: str
) -> None:
    history.add("user", question)
    try:
        answer = runner.run(stream_answer(llm, history, sampling))
    except InvalidRequestError as error:
        history.remove_last()
        print_error(f"{in_flags(str(error))}; /reset starts a new conversation")
    else:
        history.add("assistant", answer)


async def stream_answer(llm: AsyncLLM, history: ChatHistory, sampling: SamplingParams) -> str:
    """Stream the answer to stdout and return it; cancellation (Ctrl-C) ends it early."""
    text, error = "", None
    outputs = llm.chat(history.messages, sampling)
    try:
        async for output in outputs:
            completion = output.outputs[0]
            sys.stdout.write(completion.text[len(text) :])
            sys.stdout.flush()
            text, error = completion.text, completion.error
    except asyncio.CancelledError:
        sys.stdout.write(" [stopped]")
    except QuireError:
        if text:
            sys.stdout.write("\n")
        raise
    finally:
        await outputs.aclose()
    sys.stdout.write("\n")
    if error:
        print_error(error)
    return text
