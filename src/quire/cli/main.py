"""The `quire` command: its subcommands and its manual page."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import quire
from quire.cli import chat, evaluate, generate, kv, local_models, plan, replay, route, serve
from quire.cli.bench import commands as bench
from quire.cli.manual import ManualCommand, ManualGroup

MANUAL = """
Quire serves large language models: paged KV cache, continuous batching, one command.

MODEL is the built-in model "mini" (the default), a local directory with a checkpoint in Hugging Face's
format, a GGUF file, or a name on the Hugging Face hub.

Examples:
  quire generate "What is a KV block?"    one answer, streamed
  quire chat                              a chat in the terminal
  quire serve                             an OpenAI-compatible server on 127.0.0.1:8000
  quire route --engine URL --engine URL   several engines as one server
  quire list                              the models on this machine
  quire pull Qwen/Qwen3-0.6B              download a model ahead
  quire plan Qwen/Qwen3-0.6B              what fits into this machine's memory
  quire eval                              how well the built-in model answers
  quire bench throughput                  how fast this machine runs it
  quire replay run.quire                  what the scheduler did, step by step
  quire kv save prompt.kv "..."           the KV of a prompt, to be restored elsewhere

"quire COMMAND --help" explains a command and all of its options.
"""

app = typer.Typer(
    name="quire",
    help=MANUAL,
    add_completion=True,
    cls=ManualGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command in (
    ("serve", serve.serve),
    ("route", route.route),
    ("generate", generate.generate),
    ("chat", chat.chat),
    ("list", local_models.list_models),
    ("pull", local_models.pull),
    ("plan", plan.plan),
    ("eval", evaluate.evaluate),
    ("replay", replay.replay),
):
    app.command(_name, cls=ManualCommand)(_command)
app.add_typer(bench.app, name="bench")
app.add_typer(kv.app, name="kv")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quire {quire.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def run() -> None:
    """Run the command line; the entry point of the `quire` script."""
    # As with `python -m`: dotted names can refer to modules in the current directory.
    sys.path.append(os.getcwd())
    app(prog_name="quire")


if __name__ == "__main__":
    run()
