"""The help pages: complete, readable at any width, and quick to get."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from quire.cli.console import flag_name, parameter_name
from quire.cli.main import app
from quire.cli.options import config_fields
from quire.config import EngineConfig, ServerConfig
from quire.sampling_params import SamplingParams
from subprocesses import python_output, run

COMMANDS = ("serve", "generate", "chat", "plan", "eval")


def help_of(*arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("arguments", [[], ["bench"], ["kv"]])
def test_a_command_without_its_subcommand_shows_the_page(arguments):
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert result.stdout == help_of(*arguments)


def test_the_first_page_lists_every_command_with_examples():
    page = help_of()
    assert all(f"\n  {command} " in page for command in COMMANDS)
    assert 'quire generate "What is a KV block?"' in page


@pytest.mark.parametrize("command", COMMANDS)
def test_each_page_has_a_purpose_examples_and_groups(command: str):
    page = help_of(command)
    assert page.startswith("Usage: ")
    assert f"Examples:\n  quire {command}" in page
    for title in ("Options", "Engine", "Scheduling and KV cache"):
        assert f"\n{title}\n" in page


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_flag_is_cut_off(columns: int):
    pages = help_of("serve", columns=columns) + help_of("generate", columns=columns)
    for cls in (EngineConfig, ServerConfig, SamplingParams):
        for owner, field, _ in config_fields(cls):
            flag = flag_name(parameter_name(owner.__name__, field.name))
            assert f"{flag} " in pages or field.name == "model"


def test_text_keeps_to_the_width():
    for command in COMMANDS:
        lines = help_of(command).splitlines()
        assert all(len(line) <= 80 for line in lines if not line.startswith("  quire"))


def test_no_flag_is_broken_over_two_lines():
    for columns in range(40, 101):
        assert not any(line.endswith("-") for line in help_of("serve", columns=columns).splitlines())


def test_shells_can_complete_flags():
    environment = {
        "_QUIRE_COMPLETE": "complete_bash", "COMP_WORDS": "quire serve --max-num-s", "COMP_CWORD": "2"
    }  # fmt: skip
    result = CliRunner().invoke(app, [], prog_name="quire", env=environment)
    assert result.stdout.split() == ["--max-num-seqs"]


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_the_ten_flags_that_are_used_most_come_first(command: str):
    _, _, page = help_of(command).partition("\nMost used\n")
    most_used, _, rest = page.partition("\n\n")
    flags = [line.split() for line in most_used.splitlines() if line.startswith("  -")]
    assert len(flags) == 10
    assert flags[0][0] == "--config"
    assert "--model" in flags[1]
    assert rest.startswith("Options\n")


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("quire 0.")


def test_the_command_line_imports_nothing_slow():
    code = (
        "import sys, quire.cli.main;"
        "print([name for name in ('torch', 'numpy', 'rich', 'starlette', 'zmq', 'tokenizers', 'pydantic')"
        " if name in sys.modules])"
    )
    assert python_output(code) == "[]\n"


def test_a_command_imports_no_other_one_and_no_scheduler():
    code = (
        "import sys; from quire.cli.main import app\n"
        "sys.argv = ['quire', 'serve', '--help']\n"
        "try: app()\n"
        "finally:\n"
        "    import quire.front.async_llm\n"
        "    rooms = 'quire.cli.', 'quire.scheduling.'\n"
        "    loaded = [name for name in sys.modules if name.startswith(rooms)]\n"
        "    print(*sorted(loaded), sep='\\n')"
    )
    loaded = set(python_output(code).splitlines())
    assert "quire.cli.commands.serve" in loaded
    assert not loaded & {
        "quire.cli.commands.chat",
        "quire.cli.commands.evaluate",
        "quire.cli.commands.generate",
        "quire.cli.commands.kv",
    }
    assert "quire.scheduling.scheduler" not in loaded


def test_errors_have_no_traceback_in_a_real_process():
    command = [sys.executable, "-m", "quire.cli.main", "plan", "/no/such/model"]
    result = run(command, preload=True)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


def test_choices_and_ranges_are_shown():
    page = " ".join(help_of("serve").split())
    for text in (
        "--dtype [auto|bfloat16|float16|float32] ",
        "--quantization-group-size [32|64|128] ",
        "--policy [fcfs|priority|fair|longest-prefix|DOTTED.NAME] ",
        "Maximum number of sequences per step. At least 1. [default: 256]",
        "From 0 to 65535. [default: 8000]",
    ):
        assert text in page
