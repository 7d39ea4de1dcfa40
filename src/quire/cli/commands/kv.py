"""The commands `quire kv save` and `quire kv restore`: the KV of one prompt as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire.cli.console import one_line_errors, usage_errors
from quire.cli.manual import ManualCommand, ManualGroup
from quire.cli.offline import ready_llm
from quire.cli.options import config_options
from quire.cli.prompts import read_prompts
from quire.config import EngineConfig
from quire.errors import InvalidRequestError

MANUAL = """
Save the KV of a prompt to a file, and restore it on another machine or another day.

Examples:
  quire kv save answer.kv "What is a KV block, and how does the prefix cache find one?"
  quire kv restore answer.kv --kv-tier-path ./kv
  quire serve --kv-tier disk --kv-tier-path ./kv        serves what begins with the prompt
"""

app = typer.Typer(
    help=MANUAL,
    cls=ManualGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

KVFileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The file.", show_default=False)]


@app.command(cls=ManualCommand)
@config_options(defaults={"kv_tier": "memory"}, engine=EngineConfig)
def save(
    engine: EngineConfig,
    *,
    file: KVFileArgument,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt.", show_default=False)
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--input", "-i", metavar="FILE", help="Read the prompt from this file; - is stdin."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Use the text unchanged, without the model's chat template.")
    ] = False,
) -> None:
    """Compute PROMPT and save its KV to FILE.

    The prompt is an argument, or one line of --input or of a pipe; a line that begins with a brace is a JSON
    object with a "prompt" or with "messages". Whole blocks are saved, so a prompt needs at least the tokens
    of one (--block-size).

    Examples:
      quire kv save answer.kv "What is a KV block, and how does the prefix cache find one?"
      quire kv save talk.kv --input talk.jsonl --model Qwen/Qwen3-0.6B
    """
    with usage_errors():
        prompts = read_prompts([] if prompt is None else [prompt], source)
        if len(prompts) > 1:
            raise InvalidRequestError(f"there are {len(prompts)} prompts; a file holds the KV of one")
    [asked] = prompts
    with one_line_errors(), ready_llm(engine) as llm:
        is_chat = asked.messages is not None or (not raw and llm.get_tokenizer().has_chat_template)
        messages = asked.messages or [{"role": "user", "content": asked.text}]
        num_tokens = llm.save_kv(messages if is_chat else asked.text, file)
    typer.echo(f"saved the KV of {num_tokens} tokens to {file}")


@app.command(cls=ManualCommand)
@config_options(defaults={"kv_tier": "disk"}, engine=EngineConfig)
def restore(engine: EngineConfig, *, file: KVFileArgument) -> None:
    """Restore the KV in FILE to a disk tier, where other engines find it.

    Examples:
      quire kv restore answer.kv --kv-tier-path ./kv
      quire serve --kv-tier disk --kv-tier-path ./kv
    """
    with one_line_errors(), ready_llm(engine) as llm:
        num_tokens = len(llm.restore_kv(file))
    typer.echo(f"restored the KV of {num_tokens} tokens from {file}")
