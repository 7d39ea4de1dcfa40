"""`--config FILE`: values of flags from YAML."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from quire.cli.config_file import MAX_BYTES, read_config_file
from quire.cli.main import app
from quire.cli.options import config_options
from quire.config import EngineConfig, SchedulerConfig, ServerConfig
from quire.errors import ConfigError
from quire.sampling_params import SamplingParams

EXAMPLE = """\
# a server
model: ./my-model
port: 9000
max-num-seqs: 8
kv_cache_dtype: int8
recovery: off
no_such: 1
"""
KINDS = {
    "bad-words": list[str],
    "host": str,
    "ignore-eos": bool,
    "max-num-seqs": int,
    "port": int,
    "stop": list[str],
    "stop-token-ids": list[int],
    "structured-outputs": str | None,
    "temperature": float,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "quire.yaml"


received: dict[str, Any] = {}
small = typer.Typer()


@small.command()
@config_options(positional=("model",), engine=EngineConfig, server=ServerConfig, sampling=SamplingParams)
def command(
    engine: EngineConfig,
    server: ServerConfig,
    sampling: SamplingParams,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    received.update(engine=engine, server=server, sampling=sampling, as_json=as_json)


def run(*arguments: object) -> tuple[dict[str, Any], Result]:
    """Run a command that has all kinds of flags; return what it was given."""
    received.clear()
    return received, CliRunner().invoke(small, [str(argument) for argument in arguments])


def test_values_of_all_kinds(file: Path):
    file.write_text("""
        model: a-model
        port: 9000
        max-num-seqs: 8
        enable_prefix_caching: false
        recovery: off
        revision: 1.10
        temperature: 1
        stop: [a, "b: c", off]
        stop_token_ids: 7
        logit_bias: ["7=-2.5"]
        served_model_name: mini
        override_generation_config: {top_k: 5}
        structured_outputs: {"regex": "[0-9]+"}
        json: true
    """)
    _, result = run("--config", file)
    assert result.exit_code == 0, result.output
    engine, server, sampling = received["engine"], received["server"], received["sampling"]
    assert engine.scheduler == SchedulerConfig(max_num_seqs=8, enable_prefix_caching=False)
    assert (engine.model, engine.supervision.recovery, engine.revision) == ("a-model", "off", "1.10")
    assert (server.port, server.served_model_name) == (9000, ("mini",))
    assert server.override_generation_config == {"top_k": 5}
    assert (sampling.temperature, sampling.stop, sampling.stop_token_ids) == (1.0, ("a", "b: c", "off"), (7,))
    assert (sampling.logit_bias, sampling.structured_outputs.regex) == ({7: -2.5}, "[0-9]+")
    assert received["as_json"] is True


def test_the_command_line_wins(file: Path):
    file.write_text("model: a-model\nport: 9000\nstop: [a]\nenable-prefix-caching: false\n")
    _, result = run("b-model", "--port", 1, "--stop", "b", "--enable-prefix-caching", "--config", file)
    assert result.exit_code == 0, result.output
    assert (received["engine"].model, received["server"].port) == ("b-model", 1)
    assert received["sampling"].stop == ("b",)
    assert received["engine"].scheduler.enable_prefix_caching


@pytest.mark.parametrize("text", ["", "# nothing\n", "\ufeffport: 8000\n"], ids=["empty", "comment", "mark"])
def test_a_file_may_say_little(text: str, file: Path):
    file.write_text(text)
    assert run("--config", file)[0]["server"] == ServerConfig()


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (
            "port: 8000\nmax-num-seq: 8",
            "line 2: no flag has the name 'max-num-seq'; did you mean 'max-num-seqs'?",
        ),
        ("port: many", "line 1: port is 'many'; it must be a whole number"),
        ("port: true", "port is 'true'; it must be a whole number"),
        ("port: 1.5", "port is '1.5'; it must be a whole number"),
        ("port: [1]", "port is a list or a mapping; it must be a whole number"),
        ("port:", "port is empty; it must be a whole number"),
        ("host:", "host is empty; it must be text"),
        ("host: [a]", "host is a list or a mapping; it must be text"),
        ("temperature: warm", "temperature is 'warm'; it must be a number"),
        ("ignore_eos: 1", "ignore-eos is '1'; it must be true or false"),
        ("stop_token_ids: [1, x]", "stop-token-ids is 'x'; it must be a whole number"),
        ("port: 1\nport: 2", "line 2: port is there twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 1", "max-num-seqs is there twice"),
        ("- port", "it has no mapping of flags to values"),
        ("stop: &a [x]\nbad_words: *a", "alias"),
        ("port: !!python/object/apply:os.getpid []", "port is a list or a mapping"),
        ("structured_outputs: {a: !!python/name:os.system }", "cannot be read as YAML"),
        ("stop: {a: 1", "cannot be read as YAML"),
        ("stop: " + "[" * 50_000, "more than 32 deep"),
        ("port: " + "1" * 5000, "cannot be read as YAML"),
        ("host: " + "x" * MAX_BYTES, "more than 65536 bytes"),
        ("config: other.yaml", "no flag has the name 'config'"),
    ],
    ids=lambda text: json.dumps(text[:30]),
)
def test_what_is_wrong_is_refused(text: str, refusal: str, file: Path):
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config_file(file, KINDS)
    assert refusal in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path):
    for path in (tmp_path, tmp_path / "none.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"there is no file {path}, which --config names"):
            read_config_file(path, KINDS)
    (tmp_path / "latin").write_bytes(b"host: \xe4")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        read_config_file(tmp_path / "latin", KINDS)


@pytest.mark.parametrize("command", ["serve", "route", "generate", "chat", "plan", "eval"])
def test_each_command_takes_the_key_that_its_help_names(command: str, file: Path):
    page = " ".join(CliRunner().invoke(app, [command, "--help"]).stdout.split())
    example = re.search(
        r"YAML file with values of flags, such as ([a-z-]+: \d+)\. The command line takes precedence\.", page
    )
    assert example
    file.write_text(f"{example[1]}\nno-such: 1\n")
    result = CliRunner().invoke(app, [command, "--config", str(file)])
    assert "line 2: no flag has the name 'no-such'" in result.stderr


def test_the_commands_take_it(file: Path):
    file.write_text(EXAMPLE)
    result = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "line 7: no flag has the name 'no-such'" in line
    file.write_text("port: -5")
    result = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert (result.exit_code, result.stderr) == (2, "error: --port is -5; it must be from 0 to 65535\n")


several = typer.Typer()


@several.command()
@config_options(
    positional=("model",),
    of_model=("model", "num_threads", "served_model_name"),
    engine=EngineConfig,
    server=ServerConfig,
)
def command_for_several(
    engine: EngineConfig, server: ServerConfig, others: list[tuple[EngineConfig, ServerConfig]]
) -> None:
    received.update(models=[(engine, server), *others])


def models_of(*arguments: str) -> list[tuple[Any, ...]]:
    """Return what a command for several models gets of each."""
    result = CliRunner().invoke(several, list(arguments))
    assert result.exit_code == 0, result.stderr
    return [
        (engine.model, engine.num_threads, server.served_model_name, server.port)
        for engine, server in received["models"]
    ]


def test_the_flag_of_the_model_is_repeated():
    assert models_of() == [("mini", 0, (), 8000)]
    assert models_of("a") == models_of("--model", "a") == models_of("a", "-m", "a") == [("a", 0, (), 8000)]
    both = [("a", 2, (), 1), ("b", 2, (), 1)]
    shared = ("--num-threads", "2", "--port", "1")
    assert models_of("a", "--model", "b", *shared) == models_of("-m", "a", "-m", "b", *shared) == both


def test_models_in_a_file_have_values_of_their_own(file: Path):
    file.write_text(
        "num-threads: 2\nport: 1\nmodels:\n"
        "- {model: a, served_model_name: [x, y]}\n- model: b\n  num-threads: 3\n  served-model-name: z\n"
    )
    flags = ("--config", str(file))
    assert models_of(*flags) == [("a", 2, ("x", "y"), 1), ("b", 3, ("z",), 1)]
    assert models_of(*flags, "--num-threads", "4", "--port", "5") == [
        ("a", 4, ("x", "y"), 5),
        ("b", 4, ("z",), 5),
    ]
    file.write_text("model: [a, b]")
    assert models_of(*flags) == [("a", 0, (), 8000), ("b", 0, (), 8000)]
    assert models_of(*flags, "-m", "c") == [("c", 0, (), 8000)]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("models: []", (), "line 1: models must be a list with a mapping for each model"),
        ("models: {model: a}", (), "line 1: models must be a list with a mapping for each model"),
        ("models: [a]", (), "line 1: models must be a list with a mapping for each model"),
        ("models:\n- model: a\n- port: 3", (), "line 3: no flag has the name 'port'"),
        ("models:\n- num-threads: 3", (), "line 2: the entry of models names no model"),
        (
            "models:\n- {model: a, num-threads: x}",
            (),
            "line 2: num-threads is 'x'; it must be a whole number",
        ),
        ("models:\n- {model: a, model: b}", (), "line 2: model is there twice"),
        ("models: [{model: a}]\nmodel: b", (), "has both model and models"),
        ("models: [{model: a}]", ("b",), "the command line names 'b', but the file of --config has models"),
        (
            "models: [{model: a}]",
            ("-m", "b"),
            "the command line names 'b', but the file of --config has models",
        ),
    ],
)
def test_models_in_a_file_that_are_wrong(file: Path, text: str, arguments: tuple[str, ...], message: str):
    file.write_text(text)
    result = CliRunner().invoke(several, ["--config", str(file), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_one_model_has_no_list_of_them(file: Path):
    file.write_text("models: [{model: a}]")
    assert "no flag has the name 'models'" in CliRunner().invoke(small, ["--config", str(file)]).stderr
