"""`quire chat`: a conversation in the terminal."""

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
  /reset         forget the conversation
  /system TEXT   set the system prompt and forget the conversation; without TEXT: none
  /help          show this list
  /quit          leave, as Ctrl-D does"""


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
    """Talk with MODEL in the terminal.

    Answers stream, and each turn sees the ones before; the prefix cache keeps them from being computed
    again. Ctrl-C stops an answer and keeps what was said; at the prompt it leaves. /help lists the
    commands.

    Examples:
      quire chat
      quire chat Qwen/Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7
    """
    from quire.front.async_llm import AsyncLLM

    with asyncio.Runner() as runner:
        llm = runner.run(_started(AsyncLLM, engine))
        try:
            _talk(runner, llm, Conversation(system), sampling)
        finally:
            runner.run(llm.shutdown())


async def _started(engine_class: type[AsyncLLM], config: EngineConfig) -> AsyncLLM:
    llm = engine_class(config)
    try:
        with LoadingBar(config.model) as on_progress:
            await llm.wait_until_ready(on_progress)
    except BaseException:
        await llm.shutdown()
        raise
    return llm


class Conversation:
    """The messages so far, as the chat template takes them."""

    def __init__(self, system: str = "") -> None:
        self.messages: list[dict[str, Any]] = []
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Forget all turns; `system` replaces the system prompt, None keeps it."""
        if system is None:
            self.messages = [message for message in self.messages[:1] if message["role"] == "system"]
        else:
            self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, role: str, content: str) -> None:
        """Add a message."""
        self.messages.append({"role": role, "content": content})

    def take_back(self) -> None:
        """Remove the last message."""
        self.messages.pop()


def _talk(
    runner: asyncio.Runner, llm: AsyncLLM, conversation: Conversation, sampling: SamplingParams
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
            obey(line, conversation)
        elif line:
            _answer(runner, llm, conversation, sampling, line)


def obey(line: str, conversation: Conversation) -> None:
    """Carry out a line that begins with a slash."""
    command, _, argument = line.partition(" ")
    if command == "/reset":
        conversation.reset()
    elif command == "/system":
        conversation.reset(argument.strip())
    elif command == "/help":
        typer.echo(COMMANDS)
    else:
        print_error(f"there is no command {command}; /help lists those there are")


def _answer(
    runner: asyncio.Runner, llm: AsyncLLM, conversation: Conversation, sampling: SamplingParams, question: str
) -> None:
    conversation.say("user", question)
    try:
        answer = runner.run(stream_answer(llm, conversation, sampling))
    except InvalidRequestError as error:
        conversation.take_back()
        print_error(f"{in_flags(str(error))}; /reset starts a new conversation")
    else:
        conversation.say("assistant", answer)


async def stream_answer(llm: AsyncLLM, conversation: Conversation, sampling: SamplingParams) -> str:
    """Write the answer to stdout as it grows and return it; a cancellation (Ctrl-C) ends it early."""
    text, error = "", None
    outputs = llm.chat(conversation.messages, sampling)
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
