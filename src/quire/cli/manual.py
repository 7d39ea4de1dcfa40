"""Help in the form of a manual page: description, examples, then all flags by group, in full.

Docstrings are plain text: paragraphs, which are wrapped, and indented examples, which are not.

Why this is not left to typer: its rich panels cut Quire's long flags off at 80 columns
("--max-num-batched-t…", which cannot be copied) and leave so little room for the description that
`quire serve --help` has 384 lines instead of 196; its plain help is one list of all flags, without groups.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

MOST_USED_PANEL = "Most used"
MAX_WIDTH = 100
FLAG_INDENT = 2
HELP_COLUMN = 28  # column where descriptions begin; a longer flag gets a line of its own


class ManualCommand(TyperCommand):
    """A command whose --help is a manual page."""

    def get_help(self, ctx: Any) -> str:
        """Return the page."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], MOST_USED_PANEL: [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if param.param_type_name == "argument":
                groups["Arguments"].append((param.metavar or param.name or "", record[1]))
            else:
                groups.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(record)
        return _page(self.get_usage(ctx), self.help, [group for group in groups.items() if group[1]])


class ManualGroup(TyperGroup):
    """A command with subcommands; without arguments, it shows its help: the first page of the manual."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Show the page if there are no arguments, which is not an error."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        """Return the page."""
        names = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        commands = [
            (name, (command.help or "").partition("\n\n")[0].replace("\n", " "))
            for name, command in names.items()
            if command is not None
        ]
        records = [param.get_help_record(ctx) for param in self.get_params(ctx)]
        options = [record for record in records if record is not None]
        return _page(self.get_usage(ctx), self.help, [("Commands", commands), ("Options", options)])


def _page(usage: str, text: str | None, groups: list[tuple[str, list[tuple[str, str]]]]) -> str:
    width = min(MAX_WIDTH, shutil.get_terminal_size().columns)
    parts = [usage, _prose(text or "", width)]
    for title, records in groups:
        entries = "\n".join(_entry(names, text, width) for names, text in records)
        parts.append(f"{typer.style(title, bold=True)}\n{entries}")
    return "\n\n".join(parts)


def _prose(text: str, width: int) -> str:
    """Wrap the paragraphs of a docstring, except those with an indented line."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        paragraph if "\n " in paragraph else textwrap.fill(paragraph, width, break_on_hyphens=False)
        for paragraph in paragraphs
    )


def _entry(names: str, text: str, width: int) -> str:
    *above, flags = _flag_lines(names, width)
    lines = textwrap.wrap(" ".join(text.split()), max(20, width - HELP_COLUMN), break_on_hyphens=False)
    if len(flags) + 2 > HELP_COLUMN:
        first, rest = flags, lines
    else:
        first, rest = flags.ljust(HELP_COLUMN) + (lines[0] if lines else ""), lines[1:]
    return "\n".join([*above, first.rstrip(), *(" " * HELP_COLUMN + line for line in rest)])


def _flag_lines(names: str, width: int) -> list[str]:
    """Return a flag and its value, or the choices for it, indented and wrapped between choices."""
    kept_space = "\0"
    lines = textwrap.wrap(
        names.replace(" ", kept_space).replace("|", "| "),
        width,
        initial_indent=" " * FLAG_INDENT,
        subsequent_indent=" " * (FLAG_INDENT + 4),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("| ", "|").replace(kept_space, " ") for line in lines]
