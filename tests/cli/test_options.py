"""Every configuration field is a flag with help, and values arrive as the classes want them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import config_docs
from quire.cli.console import flag_name, in_flags, parameter_name
from quire.cli.main import app
from quire.cli.options import FLAG_TYPES, config_fields, config_options, configs_of
from quire.config import (
    AdaptiveRKVConfig,
    CacheEvictionConfig,
    ChatTemplateConfig,
    EngineConfig,
    KVCrushConfig,
    KVEventsConfig,
    KVTierConfig,
    KVTransferConfig,
    RouterConfig,
    SchedulerConfig,
    ServerConfig,
    SparseAttentionConfig,
    SpeculationConfig,
    SupervisionConfig,
)
from quire.errors import ConfigError
from quire.sampling_params import SamplingParams
from quire.structured_outputs import StructuredOutputsParams

COMMANDS = {
    "serve": (EngineConfig, ServerConfig),
    "generate": (EngineConfig, SamplingParams),
    "chat": (EngineConfig, SamplingParams),
    "plan": (EngineConfig,),
    "eval": (EngineConfig,),
}
# Each has a section of its own.
NESTED = (
    "edge",
    "connections",
    "batches",
    "scheduler",
    "speculation",
    "supervision",
    "chat_templating",
    "kv_tiering",
    "kv_transfer",
    "kv_events",
    "cache_eviction_config",
    "sparse_attention_config",
)
POSITIONAL_MODEL = {"serve", "chat", "plan", "eval"}


def params_of(command: str) -> dict[str, Any]:
    found = typer.main.get_command(app).get_command(None, command)
    return {param.name: param for param in found.params}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_field_is_a_flag_with_help(command: str):
    params = params_of(command)
    for cls in COMMANDS[command]:
        for owner, field, _ in config_fields(cls):
            param = params[parameter_name(owner.__name__, field.name)]
            assert param.help.startswith(in_flags(field.metadata["help"]))
            assert flag_name(param.name) in param.opts
    assert ("model_argument" in params) == (command in POSITIONAL_MODEL)


def test_fields_of_nested_configurations_are_included():
    owners = {owner for owner, _, _ in config_fields(EngineConfig)}
    of_eviction = {CacheEvictionConfig, KVCrushConfig, AdaptiveRKVConfig}
    of_engine = {
        EngineConfig, SchedulerConfig, SpeculationConfig, SupervisionConfig, ChatTemplateConfig,
        KVTierConfig, KVTransferConfig, KVEventsConfig,
    }  # fmt: skip
    assert owners == {SparseAttentionConfig, *of_engine, *of_eviction}


def test_no_two_fields_of_a_command_share_a_name():
    for classes in COMMANDS.values():
        fields = [(owner, field) for cls in classes for owner, field, _ in config_fields(cls)]
        names = [parameter_name(owner.__name__, field.name) for owner, field in fields]
        assert len(names) == len(set(names))


def built(arguments: list[str], cls: type, **options: Any) -> Any:
    """Run a command that takes a `cls` and return what it was given."""
    received = []
    small = typer.Typer()

    @small.command()
    @config_options(value=cls, **options)
    def command(value: Any) -> None:
        received.append(value)

    result = CliRunner().invoke(small, arguments)
    assert result.exit_code == 0, result.output
    return received[0]


@pytest.mark.parametrize("cls", [EngineConfig, SchedulerConfig, ServerConfig, SamplingParams])
def test_without_flags_every_field_has_its_default(cls: type):
    assert built([], cls) == cls()


def test_every_kind_of_value_arrives():
    sampling = built(
        [
            *("--temperature", "0.5", "--top-k", "3", "--stop", "a", "--stop", "b c", "--ignore-eos"),
            *("--logit-bias", "7=-1.5", "--logit-bias", "8=2", "--bad-words-token-ids", "1,2,3"),
            *("--stop-token-ids", "4", "--seed", "-5", "--no-skip-special-tokens", "-n", "2"),
        ],
        SamplingParams,
    )
    assert sampling == SamplingParams(
        temperature=0.5,
        top_k=3,
        stop=("a", "b c"),
        ignore_eos=True,
        logit_bias={7: -1.5, 8: 2.0},
        bad_words_token_ids=((1, 2, 3),),
        stop_token_ids=(4,),
        seed=-5,
        skip_special_tokens=False,
        n=2,
    )


def test_structured_output_is_written_as_json():
    sampling = built(["--structured-outputs", '{"json": {"type": "object"}}'], SamplingParams)
    assert sampling.structured_outputs == StructuredOutputsParams(json='{"type": "object"}')


def test_nested_configuration_is_built():
    engine = built(["--max-num-seqs", "3", "--dtype", "float32", "--policy", "priority"], EngineConfig)
    assert engine == EngineConfig(
        dtype="float32", scheduler=SchedulerConfig(max_num_seqs=3, policy="priority")
    )


def test_flags_of_cache_eviction_have_a_prefix():
    arguments = ["--use-cache-eviction", "--eviction-max-cache-size", "320", "--kvcrush-budget", "3"]
    arguments += ["--eviction-aggregation-mode", "adaptive_rkv", "--adaptive-rkv-window-size", "5"]
    eviction = CacheEvictionConfig(
        max_cache_size=320,
        aggregation_mode="adaptive_rkv",
        kvcrush_config=KVCrushConfig(budget=3),
        adaptive_rkv_config=AdaptiveRKVConfig(window_size=5),
    )
    scheduler = SchedulerConfig(use_cache_eviction=True, cache_eviction_config=eviction)
    assert built(arguments, EngineConfig) == EngineConfig(scheduler=scheduler)
    assert in_flags("CacheEvictionConfig.start_size is 0") == "--eviction-start-size is 0"
    assert in_flags("SparseAttentionConfig.mode is 0") == "--sparse-mode is 0"


def test_a_command_may_change_a_default_and_take_an_argument():
    assert built([], SamplingParams, defaults={"temperature": 0.0}).temperature == 0.0
    for arguments in (["a-model"], ["--model", "a-model"], ["a-model", "-m", "a-model"]):
        assert built(arguments, EngineConfig, positional=("model",)).model == "a-model"
    assert built([], EngineConfig, positional=("model",)) == EngineConfig()


def test_two_models_are_refused():
    result = CliRunner().invoke(app, ["plan", "a-model", "--model", "b-model"])
    assert result.exit_code == 2
    assert result.stderr == (
        "error: --model is 'b-model', but the command line also has 'a-model'; give one of them\n"
    )


def test_every_field_type_has_a_way_to_be_written():
    for cls in (EngineConfig, ServerConfig, SamplingParams):
        for _, field, limits in config_fields(cls):
            assert limits.kind in FLAG_TYPES, field.name
    assert Mapping[int, float] in FLAG_TYPES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-seqs", "0"], "error: --max-num-seqs is 0; it must be at least 1"),
        (["--dtype", "float3"], "error: --dtype is 'float3'; did you mean 'float32'?"),
        (["--memory-fraction", "2"], "error: --memory-fraction is 2.0; it must be above 0 and below 1"),
        (["--temperature", "900"], "error: --temperature is 900.0; it must be from 0 to 100"),
        (["--top-p", "0"], "error: --top-p is 0.0; it must be above 0 and at most 1"),
        (["--min-tokens", "9", "--max-tokens", "3"], "error: --min-tokens is 9, above --max-tokens 3"),
    ],
)
def test_a_refused_value_is_one_line_that_names_the_flag(arguments: list[str], message: str):
    result = CliRunner().invoke(app, ["generate", "hi", *arguments])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [message]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--max-num-seq", "3"], ["No such option", "--max-num-seqs"]),
        (["--max-num-seqs", "many"], ["--max-num-seqs", "valid integer"]),
        (["--logit-bias", "7"], ["--logit-bias", "ID=BIAS"]),
        (["--bad-words-token-ids", "1,x"], ["--bad-words-token-ids", "ID,ID,..."]),
        (["--structured-outputs", "[0-9]+"], ["--structured-outputs", "'[0-9]+'", '{"KIND":...}']),
        (["--structured-outputs", '{"regexp": "a"}'], ["no field 'regexp'", "'regex'"]),
        (["--structured-outputs", "{}"], ["--structured-outputs has no field", "exactly one of json"]),
    ],
)
def test_what_cannot_be_parsed_is_a_usage_error(arguments: list[str], parts: list[str]):
    result = CliRunner().invoke(app, ["generate", "hi", *arguments])
    assert result.exit_code == 2
    assert all(part in result.stderr for part in parts), result.stderr


def test_configurations_are_built_from_values_by_name() -> None:
    engine, server = configs_of(
        {
            "model": "some/model",
            "max-num-seqs": "8",
            "cache_size": 4,
            "enable_prefix_caching": "false",
            "weight_cache": "",
            "tool-call-format": "hermes",
            "served_model_name": ["a", "b"],
            "override_generation_config": {"temperature": 0.5},
        },
        EngineConfig,
        ServerConfig,
        defaults={"standby_engine": True},
    )
    assert engine == EngineConfig(
        model="some/model",
        weight_cache="",
        scheduler=SchedulerConfig(max_num_seqs=8, cache_size=4.0, enable_prefix_caching=False),
        supervision=SupervisionConfig(standby_engine=True),
    )
    assert server == ServerConfig(
        tool_call_format="hermes",
        served_model_name=("a", "b"),
        override_generation_config={"temperature": 0.5},
    )


def test_a_name_of_several_configurations_sets_it_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    server, router = configs_of({"max_body_bytes": "9"}, ServerConfig, RouterConfig)
    assert (server.max_body_bytes, router.max_body_bytes) == (9, 9)
    assert (server.port, router.port) == (8000, 8080)
    assert (server.api_key, router.api_key) == ("secret", "secret")
    [server] = configs_of({"api_key": "other"}, ServerConfig)
    assert server.api_key == "other"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seq": 3}, "no option has the name 'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"max-num-seqs": 3, "max_num_seqs": 3}, "max_num_seqs is there twice"),
        ({"max_num_seqs": "many"}, "max_num_seqs is 'many'; it must be a whole number"),
        ({"max_num_seqs": 3.5}, "max_num_seqs is '3.5'; it must be a whole number"),
        ({"max_num_seqs": True}, "max_num_seqs is 'true'; it must be a whole number"),
        ({"max_num_seqs": {"a": [1]}}, "max_num_seqs is a list or a mapping; it must be a whole number"),
        ({"model": None}, "model is 'null'; it must be text"),
        ({"model": object()}, "model cannot be read"),
        ({"max_num_seqs": 0}, "SchedulerConfig.max_num_seqs is 0; it must be at least 1"),
        ({"override_generation_config": "x"}, "--override-generation-config: 'x' is not of the form"),
    ],
)
def test_wrong_values_by_name_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        configs_of(given, EngineConfig, ServerConfig)
    assert message in str(refusal.value)


def test_messages_speak_of_flags():
    assert in_flags("EngineConfig.max_model_len is 9; raise SchedulerConfig.cache_size") == (
        "--max-model-len is 9; raise --cache-size"
    )
    assert in_flags("the limit is max_model_len 9, of /my/max_tokens") == (
        "the limit is --max-model-len 9, of /my/max_tokens"
    )
    assert in_flags("KVTierConfig.kv_tier is '' in kv_tiering") == ("--kv-tier is '' in kv_tiering")
    assert in_flags("top_k is -1; it must be from 0", "top_k") == "--top-k is -1; it must be from 0"
    of_a_file = "keys.toml, line 3: TenantConfig has no field 'x'; known names: kv_transfer, max_pin_time"
    assert in_flags(of_a_file) == of_a_file
    typo = "keys.toml, line 3: TenantConfig has no field 'kv_transfe'; did you mean 'kv_transfer'?"
    assert in_flags(typo) == typo


def test_the_configuration_page_is_current():
    assert config_docs.page() == config_docs.PAGE.read_text(encoding="utf-8"), (
        "run: python tools/config_docs.py"
    )


def test_the_configuration_page_has_every_field():
    page = config_docs.page()
    for cls in (EngineConfig, SchedulerConfig, SamplingParams, ServerConfig):
        for field in dataclasses.fields(cls):
            assert f"| `{field.name}` |" in page or field.name in NESTED
