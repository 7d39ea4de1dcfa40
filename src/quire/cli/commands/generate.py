"""`quire generate`: answer prompts, streaming to the terminal or writing JSON lines."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from quire.cli.commands.answers import AnswerWriter, JsonAnswerWriter, TextAnswerWriter
from quire.cli.console import EXIT_FAILURE, in_flags, print_error, stderr_is_terminal, usage_errors
from quire.cli.options import config_options
from quire.cli.progress import LoadingBar
from quire.cli.prompts import STDIN, InputPrompt, read_prompts
from quire.config import EngineConfig
from quire.errors import EngineDeadError, InvalidRequestError, QueueFullError, QuireError
from quire.front.process.launch import started_ahead
from quire.request_output import RequestOutput
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.front.async_llm import AsyncLLM

MAX_WAIT = 1.0  # seconds before retrying a prompt that the full queue refused
SUBMITTED_PER_RUNNING = 2  # requests in the engine per running one, to keep it busy


@config_options(defaults={"temperature": 0.0}, engine=EngineConfig, sampling=SamplingParams)
def generate(
    engine: EngineConfig,
    sampling: SamplingParams,
    *,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="One or more prompts.", show_default=False),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help="Read prompts from this file, one per line; - is stdin.",
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write JSON lines to this file; - is stdout."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the text unchanged, without the model's chat template.")
    ] = False,
) -> None:
    """Answer each PROMPT, streaming to the terminal.

    Prompts come from the arguments, from --input, or from a pipe: one per line, and a line that begins
    with a brace is a JSON object with a "prompt" or with "messages". They run concurrently; the answers are
    printed in the order of the prompts. The default temperature is 0: the same prompt gives the same answer.

    Examples:
      quire generate "What is a KV block?"
      quire generate "Once upon a time" --raw --temperature 0.8 --seed 7 --max-tokens 200
      quire generate --input prompts.jsonl --output answers.jsonl
      echo "12 + 34" | quire generate --output -
    """
    with usage_errors():
        asked = read_prompts(prompts or [], source)
    with _answers(target, asked, sampling) as answers, started_ahead():
        errors = asyncio.run(_answer_all(engine, asked, _sender(sampling, raw=raw), answers))
    for error in errors:
        print_error(error)
    if errors:
        raise typer.Exit(EXIT_FAILURE)


Sender = Callable[["AsyncLLM", InputPrompt], AsyncIterator[RequestOutput]]
OnAnswered = Callable[[int, int], None]


def _sender(sampling: SamplingParams, *, raw: bool) -> Sender:
    """Return a function that sends a prompt to the engine, through the chat template if any, unless `raw`."""

    def send(llm: AsyncLLM, prompt: InputPrompt) -> AsyncIterator[RequestOutput]:
        if prompt.messages is not None:
            return llm.chat(prompt.messages, sampling)
        if raw or not llm.tokenizer.has_chat_template:
            return llm.generate(prompt.text, sampling)
        return llm.chat([{"role": "user", "content": prompt.text}], sampling)

    return send


@contextlib.contextmanager
def _answers(
    target: Path | None, prompts: list[InputPrompt], sampling: SamplingParams
) -> Iterator[AnswerWriter]:
    if target is None:
        with contextlib.closing(TextAnswerWriter(sys.stdout, prompts, completions=sampling.n)) as answers:
            yield answers
    elif target == STDIN:
        yield JsonAnswerWriter(sys.stdout, prompts)
    else:
        with usage_errors():
            file = _open_for_writing(target)
        with file:
            yield JsonAnswerWriter(file, prompts)


def _open_for_writing(target: Path) -> TextIO:
    try:
        return target.open("w", encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot write --output {target}: {error.strerror}") from None


async def _answer_all(
    engine: EngineConfig, prompts: list[InputPrompt], send: Sender, answers: AnswerWriter
) -> list[str]:
    """Start an engine, answer all prompts, and shut it down; return the errors of failed prompts."""
    from quire.front.async_llm import AsyncLLM
    from quire.front.progress import batch_progress

    llm = AsyncLLM(engine)
    try:
        with LoadingBar(engine.model) as on_progress:
            await llm.wait_until_ready(on_progress)
        with batch_progress(len(prompts), shown=_progress_fits(prompts, answers)) as on_answered:
            errors = await _answer_each(llm, prompts, send, answers, on_answered)
    finally:
        await llm.shutdown()
    place = "prompt {}: {}" if len(prompts) > 1 else "{1}"
    return [place.format(number, error) for number, error in enumerate(errors, start=1) if error]


async def _answer_each(
    llm: AsyncLLM, prompts: list[InputPrompt], send: Sender, answers: AnswerWriter, on_answered: OnAnswered
) -> list[str | None]:
    """Answer all prompts concurrently; return each one's error.

    `on_answered` is called with the number of prompts answered and of tokens generated so far.
    """
    gate = asyncio.Semaphore(SUBMITTED_PER_RUNNING * llm.config.scheduler.max_num_seqs)
    done = tokens = 0

    async def answer(index: int) -> str | None:
        nonlocal done, tokens
        async with gate:
            while True:
                try:
                    num_tokens, error = await _answer_one(send(llm, prompts[index]), index, answers)
                    break
                except QueueFullError as full:  # with earlier prompts
                    await asyncio.sleep(min(full.retry_after, MAX_WAIT))
        done += 1
        tokens += num_tokens
        on_answered(done, tokens)
        return error

    return await asyncio.gather(*map(answer, range(len(prompts))))


async def _answer_one(
    outputs: AsyncIterator[RequestOutput], index: int, answers: AnswerWriter
) -> tuple[int, str | None]:
    """Pass on the outputs of one prompt; return its number of tokens, and its error if it failed."""
    num_tokens = 0
    error: str | None = None
    try:
        async for output in outputs:
            answers.update(index, output)
            num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
            error = next((completion.error for completion in output.outputs if completion.error), error)
    except (EngineDeadError, QueueFullError):
        raise
    except QuireError as failure:
        error = in_flags(str(failure))
        answers.fail(index, error)
    return num_tokens, error


def _progress_fits(prompts: list[InputPrompt], answers: AnswerWriter) -> bool:
    """Whether to show a progress bar: for several prompts, if no answers stream to the terminal."""
    streams_to_terminal = isinstance(answers, TextAnswerWriter) and sys.stdout.isatty()
    return len(prompts) > 1 and stderr_is_terminal() and not streams_to_terminal
