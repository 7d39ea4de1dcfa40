"""The `quire` command: its subcommands and its manual page."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any

import typer
from typing_extensions import override

from quire import __version__
from quire.cli.manual import ManualCommand, ManualGroup

MANUAL = """
Quire serves large language models: paged KV cache, continuous batching, one command.

MODEL is the built-in model "mini" (the default) or, for embeddings, "mini-embed"; a local directory with a
checkpoint in Hugging Face's format; a GGUF file; or a name on the Hugging Face hub.

Examples:
  quire generate "What is a KV block?"    one answer, streamed
  quire chat                              a chat in the terminal
  quire serve                             an OpenAI-compatible server on 127.0.0.1:8000
  quire serve mini-embed                  the same for embeddings
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

COMMANDS = {
    "serve": ("quire.cli.commands.serve", "serve"),
    "route": ("quire.cli.commands.serve", "route"),
    "generate": ("quire.cli.commands.generate", "generate"),
    "chat": ("quire.cli.commands.chat", "chat"),
    "list": ("quire.cli.commands.local_models", "list_models"),
    "pull": ("quire.cli.commands.local_models", "pull"),
    "plan": ("quire.cli.commands.plan", "plan"),
    "eval": ("quire.cli.commands.evaluate", "evaluate"),
    "replay": ("quire.cli.commands.replay", "replay"),
    "bench": ("quire.cli.bench.commands", "app"),
    "kv": ("quire.cli.commands.kv", "app"),
}
"""The module of each command, and its name there: a function, or an application with commands of its own."""


class _Commands(ManualGroup):
    """Imports a command only when it is run."""

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    @override
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        wanted = [cmd_name] if cmd_name in COMMANDS else COMMANDS  # all, to suggest a similar name
        for name in wanted:
            if name not in self.commands:
                self.commands[name] = _imported(name)
        return super().get_command(ctx, cmd_name)


def _imported(name: str) -> Any:
    """Import a command, and convert it for click."""
    module, attribute = COMMANDS[name]
    command = getattr(importlib.import_module(module), attribute)
    parent = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    if isinstance(command, typer.Typer):
        parent.add_typer(command, name=name)
    else:
        parent.command(name, cls=ManualCommand)(command)
    return typer.main.get_group(parent).commands[name]


app = typer.Typer(
    name="quire",
    help=MANUAL,
    add_completion=True,
    cls=_Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quire {__version__}")
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
