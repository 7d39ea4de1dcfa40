"""Command-line flags derived from the fields of configuration classes.

A command takes whole configuration objects; `config_options` gives it one flag per field, with the field's
name, type, choices or range, default and help, in one group per class. The class itself rejects invalid
values; unlike click's types, it suggests the nearest choice.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import os
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import typer

from quire.cli.bench_options import ArrivalConfig, LatencyConfig, TargetConfig, WorkloadConfig
from quire.cli.config_file import MODEL, by_parameter, config_file_option, models_in, named_value
from quire.cli.console import flag_name, in_flags, one_line_errors, parameter_name, usage_errors
from quire.cli.manual import MOST_USED_PANEL
from quire.config import (
    AdaptiveRKVConfig,
    BatchConfig,
    CacheEvictionConfig,
    ChatTemplateConfig,
    ConnectionConfig,
    DynamoConfig,
    EdgeConfig,
    EngineConfig,
    KVCrushConfig,
    KVEventsConfig,
    KVTierConfig,
    KVTransferConfig,
    RayConfig,
    RouterConfig,
    SchedulerConfig,
    ServerConfig,
    SparseAttentionConfig,
    SpeculationConfig,
    SupervisionConfig,
    TenantConfig,
)
from quire.errors import ConfigError, QuireError
from quire.limits import Limits, limits_of
from quire.request_options import RequestOptions
from quire.sampling_params import SamplingParams
from quire.structured_outputs import StructuredOutputsParams

PANELS: dict[type, str] = {
    EngineConfig: "Engine",
    SchedulerConfig: "Scheduling and KV cache",
    CacheEvictionConfig: "Cache eviction",
    KVCrushConfig: "Cache eviction: KVCrush",
    AdaptiveRKVConfig: "Cache eviction: adaptive_rkv",
    SparseAttentionConfig: "Sparse attention of prompts",
    SpeculationConfig: "Speculation",
    SupervisionConfig: "Supervision of the engine",
    ChatTemplateConfig: "Chat template",
    KVTierConfig: "KV tier",
    KVTransferConfig: "KV of other engines",
    KVEventsConfig: "KV events",
    SamplingParams: "Sampling",
    RequestOptions: "Scheduling of the request",
    ServerConfig: "HTTP server",
    TenantConfig: "Tenant in the key file",
    RouterConfig: "Router",
    RayConfig: "Ray Serve",
    DynamoConfig: "NVIDIA Dynamo",
    EdgeConfig: "How clients reach the server",
    BatchConfig: "Files and batches",
    ConnectionConfig: "Connections",
    WorkloadConfig: "Workload",
    ArrivalConfig: "Arrivals",
    TargetConfig: "Server to measure",
    LatencyConfig: "Batch",
}
SHORT_FLAGS = {"model": "-m", "n": "-n"}
MOST_USED = (  # at most ten per command
    "model",
    "host",
    "port",
    "api_key",
    "served_model_name",
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "max_model_len",
    "max_num_seqs",
    "cache_size",
    "quantization",
)
_AS_ARGUMENT = "_argument"  # suffix of positional parameters, beside their flags
_CONTEXT = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)


@dataclasses.dataclass(frozen=True, slots=True)
class FlagType:
    """How the value of a field is written on the command line.

    Args:
        annotation: the type that typer parses.
        convert: converts the parsed value to the field's; raises ValueError.
        metavar: placeholder in the help for a field without choices; None: typer's default.
    """

    annotation: Any
    convert: Callable[[Any], Any] = lambda value: value
    metavar: str | None = None


def _id_sequences(texts: list[str]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(token) for token in text.split(",")) for text in texts)


def _biases(texts: list[str]) -> dict[int, float]:
    pairs = (text.split("=", 1) for text in texts)
    return {int(token): float(bias) for token, bias in pairs}


def _json_object(text: str) -> dict[str, Any]:
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(text)
    return values


def _structured_outputs(text: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(**_json_object(text))


FLAG_TYPES: dict[Any, FlagType] = {
    bool: FlagType(bool),
    int: FlagType(int, metavar="INT"),
    float: FlagType(float, metavar="NUMBER"),
    str: FlagType(str, metavar="TEXT"),
    str | Any: FlagType(str, metavar="TEXT"),  # in Python also an object
    tuple[str, ...]: FlagType(list[str], tuple, "TEXT"),
    tuple[int, ...]: FlagType(list[int], tuple, "INT"),
    tuple[tuple[int, ...], ...]: FlagType(list[str], _id_sequences, "ID,ID,..."),
    Mapping[int, float]: FlagType(list[str], _biases, "ID=BIAS"),
    Mapping[str, float]: FlagType(str, _json_object, '{"NAME":NUMBER,...}'),
    StructuredOutputsParams: FlagType(str, _structured_outputs, '{"KIND":...}'),
}


def config_fields(cls: type) -> Iterator[tuple[type, dataclasses.Field[Any], Limits]]:
    """Yield (owner, field, limits) of every field of `cls`; a nested configuration yields its own fields."""
    limits_by_name = limits_of(cls)
    for field in dataclasses.fields(cls):
        limits = limits_by_name[field.name]
        if is_nested(limits):
            yield from config_fields(limits.kind)
        else:
            yield cls, field, limits


def parameters_of(cls: type) -> list[str]:
    """Return the names that the fields of `cls` have as parameters of a command."""
    return [parameter_name(owner.__name__, field.name) for owner, field, _ in config_fields(cls)]


def is_nested(limits: Limits) -> bool:
    """Whether a field holds a configuration, whose fields become flags."""
    return dataclasses.is_dataclass(limits.kind) and limits.kind not in FLAG_TYPES


def config_options(
    *,
    positional: tuple[str, ...] = (),
    defaults: Mapping[str, Any] | None = None,
    of_model: Collection[str] = (),
    **configs: type,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command flags for the configurations that it takes.

    Args:
        positional: fields that may also be given as positional arguments.
        defaults: this command's defaults where they differ from the fields'.
        of_model: fields in which several models may differ. If there are any, `--model` is repeated for more
            models, and the command's parameter `others` gets a tuple of configurations for each of these.
        configs: classes to build from the flags, by the command's parameters.
    """
    changed = defaults or {}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        derived = [
            _parameter(owner, field, limits, changed)
            for cls in configs.values()
            for owner, field, limits in config_fields(cls)
        ]
        if of_model:
            derived = [_repeated(flag) if flag.name == MODEL else flag for flag in derived]
        arguments = [_argument(flag) for flag in derived if flag.name in positional]
        derived.sort(key=_usage_rank)
        signature = inspect.signature(command, eval_str=True)
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in signature.parameters.values()
            if parameter.name not in (*configs, "others")
        ]

        @functools.wraps(command)
        def run(context: typer.Context, **values: Any) -> None:
            with usage_errors():
                for argument in arguments:
                    _take_argument(context, argument, values)
                first, *others = _values_of_models(context, values) if of_model else [values]
                built: dict[str, Any] = {name: _build(cls, first) for name, cls in configs.items()}
                if of_model:
                    built["others"] = [tuple(_build(cls, own) for cls in configs.values()) for own in others]
            rest = {parameter.name: values[parameter.name] for parameter in own}
            with one_line_errors():
                command(**built, **rest)

        flags = [*derived, *own]
        parameters = [_CONTEXT, *arguments, config_file_option(flags, of_model), *own, *derived]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def configs_of(
    given: Mapping[str, Any], *classes: type, defaults: Mapping[str, Any] | None = None
) -> list[Any]:
    """Return configurations built from values by the names of their flags, as a configuration file has them.

    A name that several classes have sets it in each of them. As for flags, environment variables set what is
    not given.

    Args:
        given: values by name, with hyphens or underscores; text may stand for a number or a truth value.
        classes: the classes to build.
        defaults: the caller's defaults where they differ from the fields'.

    Raises:
        ConfigError: a name is unknown or duplicate, or a value is invalid.
    """
    flags = {
        cls: [_parameter(owner, field, limits, defaults or {}) for owner, field, limits in config_fields(cls)]
        for cls in classes
    }
    given = by_parameter(given, {flag.name for own in flags.values() for flag in own})
    try:
        return [
            _build(cls, {flag.name: _value_of(flag, given) for flag in own}) for cls, own in flags.items()
        ]
    except typer.BadParameter as error:
        raise ConfigError(f"{error.param_hint}: {error.message}") from None


def _value_of(flag: inspect.Parameter, given: Mapping[str, Any]) -> Any:
    kind, info = typing.get_args(flag.annotation)
    if flag.name in given:
        return named_value(flag.name, given[flag.name], kind)
    return os.environ.get(info.envvar, flag.default) if info.envvar else flag.default


def _parameter(
    owner: type,
    field: dataclasses.Field[Any],
    limits: Limits,
    changed: Mapping[str, Any],
) -> inspect.Parameter:
    default = changed.get(field.name, _default_of(field))
    flag = _flag_type(limits)
    described: dict[str, Any] = {
        "help": _help(field, limits),
        "metavar": _metavar(limits) or flag.metavar,
        "show_default": _shown(default),
        "rich_help_panel": MOST_USED_PANEL if field.name in MOST_USED else PANELS[owner],
    }
    info: Any
    if field.name in SHORT_FLAGS:
        info = typer.Option(flag_name(field.name), SHORT_FLAGS[field.name], **described)
    else:
        info = typer.Option(envvar=field.metadata.get("environment_variable") or None, **described)
    annotation = flag.annotation | None if limits.is_optional else flag.annotation
    return inspect.Parameter(
        parameter_name(owner.__name__, field.name),
        inspect.Parameter.KEYWORD_ONLY,
        default=list(default) if isinstance(default, tuple | dict) else default,
        annotation=typing.Annotated[annotation, info],
    )


def _usage_rank(flag: inspect.Parameter) -> int:
    return MOST_USED.index(flag.name) if flag.name in MOST_USED else len(MOST_USED)


def _argument(flag: inspect.Parameter) -> inspect.Parameter:
    """Return the positional argument that may be given instead of a flag for text."""
    info = typer.Argument(
        metavar=flag.name.upper(), help=f"The same as {flag_name(flag.name)}.", show_default=False
    )
    return flag.replace(
        name=flag.name + _AS_ARGUMENT, default=None, annotation=typing.Annotated[str | None, info]
    )


def _repeated(flag: inspect.Parameter) -> inspect.Parameter:
    """Return a flag for text as one that may be given several times."""
    _, info = typing.get_args(flag.annotation)
    info.help += " Repeat it for more models, each with an engine of its own."
    return flag.replace(default=[flag.default], annotation=typing.Annotated[list[str], info])


def _values_of_models(context: typer.Context, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the values of the parameters for each model; the command line comes before the file's `models`.

    Raises:
        ConfigError: both name models.
    """
    given: list[str] = values[MODEL]
    own = models_in(context)
    if not own:
        return [{**values, MODEL: name} for name in given]
    if _is_given(context, MODEL) or context.params.get(MODEL + _AS_ARGUMENT) is not None:
        raise ConfigError(
            f"the command line names {given[0]!r}, but the file of --config has models; give one"
        )
    return [
        {**values, **{name: value for name, value in each.items() if not _is_given(context, name)}}
        for each in own
    ]


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line or the environment has a parameter."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _take_argument(context: typer.Context, argument: inspect.Parameter, values: dict[str, Any]) -> None:
    """Use the value of a positional argument, if given, in place of the flag's default.

    Where the flag may be repeated, the argument comes before it.

    Raises:
        ConfigError: the command line also has the flag, with another value.
    """
    name = argument.name.removesuffix(_AS_ARGUMENT)
    given = values.pop(argument.name)
    if given is None:
        return
    is_in_flags = _is_given(context, name)
    if isinstance(values[name], list):
        others = values[name] if is_in_flags else []
        values[name] = [given, *(other for other in others if other != given)]
        return
    if is_in_flags and values[name] != given:
        raise ConfigError(
            f"{flag_name(name)} is {values[name]!r}, but the command line also has {given!r}; give one of "
            "them"
        )
    values[name] = given


def _flag_type(limits: Limits) -> FlagType:
    """Return the flag type of a field; enumerations are given by their values."""
    kind = str if isinstance(limits.kind, enum.EnumType) else limits.kind
    return FLAG_TYPES[kind]


def _help(field: dataclasses.Field[Any], limits: Limits) -> str:
    """Return the help of a field, followed by its range."""
    text = in_flags(field.metadata["help"])
    return f"{text} {limits.range[0].upper()}{limits.range[1:]}." if limits.range else text


def _metavar(limits: Limits) -> str | None:
    """Return the choices as a placeholder, such as [auto|native|reference]; None if there are none."""
    names = [str(choice) for choice in limits.choices if choice != ""]
    if limits.takes_dotted_names:
        names.append("DOTTED.NAME")
    return f"[{'|'.join(names)}]" if len(names) > 1 else "".join(names) or None


def _shown(default: Any) -> bool | str:
    """Return the default for the help text; False if there is none."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return default not in (None, "")


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _build(cls: type, values: Mapping[str, Any]) -> Any:
    fields = {}
    for name, limits in limits_of(cls).items():
        if is_nested(limits):
            fields[name] = _build_nested(limits, values)
        else:
            parameter = parameter_name(cls.__name__, name)
            fields[name] = _converted(parameter, limits, values[parameter])
    return cls(**fields)


def _build_nested(limits: Limits, values: Mapping[str, Any]) -> Any:
    """Return a nested configuration; None if it is optional and all of its flags have their defaults."""
    built = _build(limits.kind, values)
    return None if limits.is_optional and built == limits.kind() else built


def _converted(name: str, limits: Limits, value: Any) -> Any:
    flag = _flag_type(limits)
    if value is None:
        return value
    try:
        return flag.convert(value)
    except QuireError:
        raise
    except (ValueError, RecursionError):
        given = repr(value) if isinstance(value, str) else ", ".join(map(repr, value))
        raise typer.BadParameter(
            f"{given} is not of the form {flag.metavar}", param_hint=flag_name(name)
        ) from None
