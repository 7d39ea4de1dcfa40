"""`--config FILE`: values of flags, from a YAML file.

Its keys are the flags' names, with hyphens or underscores. The command line takes precedence. Of a command
for several models, `models` may have a mapping of such keys for each.
"""

from __future__ import annotations

import inspect
import io
import json
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import typer.models

from quire.cli.console import flag_name, usage_errors
from quire.cli.manual import MOST_USED_PANEL
from quire.errors import ConfigError, nearest_name

if TYPE_CHECKING:
    import yaml

MODEL, MODELS = "model", "models"
MAX_BYTES = 64 << 10  # all flags with long values take half of it
MAX_DEPTH = 32  # nesting of lists and mappings, as in a JSON schema
_MAX_SHOWN_VALUE = 80  # characters
_SCALARS: Mapping[type, tuple[str, tuple[str, ...]]] = {  # their names, and YAML's tags
    bool: ("true or false", ("bool",)),
    int: ("a whole number", ("int",)),
    float: ("a number", ("float", "int")),
}


def config_file_option(
    flags: Sequence[inspect.Parameter], of_model: Collection[str] = ()
) -> inspect.Parameter:
    """Return a command's parameter `config_file`, which sets the defaults of `flags`.

    Args:
        flags: the command's.
        of_model: names of those that `models` may have for each model, which `models_in` returns; none: the
            command runs one model.
    """
    kinds = {_key(flag): typing.get_args(flag.annotation)[0] for flag in flags if _is_flag(flag)}
    names = {_key(flag): flag.name for flag in flags}
    model_kinds = {key: kind for key, kind in kinds.items() if names[key] in of_model}
    if MODEL in model_kinds:
        model_kinds[MODEL] = str  # not repeated

    def read(context: typer.Context, file: Path | None) -> Path | None:
        if file is not None and not context.resilient_parsing:
            with usage_errors():
                values = read_config_file(file, kinds, model_kinds)
            models = values.pop(MODELS, [])
            context.meta[MODELS] = [{names[key]: value for key, value in model.items()} for model in models]
            context.default_map = {names[key]: value for key, value in values.items()}
        return file

    example = "max-num-seqs: 8" if "max-num-seqs" in kinds else "port: 9000"
    info = typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=read,
        help=f"YAML file with values of flags, such as {example}. The command line takes precedence.",
        rich_help_panel=MOST_USED_PANEL,
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    annotation = typing.Annotated[Path | None, info]
    return inspect.Parameter("config_file", kind, default=None, annotation=annotation)


def models_in(context: typer.Context) -> list[dict[str, Any]]:
    """Return what the file of `--config` says of each of `models`, by parameter; empty: it has none."""
    models: list[dict[str, Any]] = context.meta.get(MODELS, [])
    return models


def read_config_file(
    file: Path, kinds: Mapping[str, Any], model_kinds: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the values in a YAML file by their keys, spelled with hyphens.

    Args:
        file: one mapping, in UTF-8, without aliases.
        kinds: type annotation of the command's parameter by key: a scalar, a list of scalars, or either or
            None. Text may also be a mapping, which becomes JSON.
        model_kinds: the same for each mapping in the list `models`; empty: there is no such key.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or duplicate, or a value has a wrong type.
    """
    import yaml

    try:
        values = _values(_entries(_read(file)), kinds, file, model_kinds)
    except ConfigError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as YAML: {error!s:.300}") from None
    return values


def _values(
    entries: Iterable[tuple[yaml.Node, yaml.Node]],
    kinds: Mapping[str, Any],
    file: Path,
    model_kinds: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in entries:
        place = f"{file}, line {key_node.start_mark.line + 1}"
        key = str(key_node.value).replace("_", "-")
        is_models = bool(model_kinds) and key == MODELS
        if key not in kinds and not is_models:
            raise ConfigError(f"{place}: no flag has the name {key!r:.80}; {nearest_name(key, kinds)}")
        if key in values:
            raise ConfigError(f"{place}: {key} is there twice; leave one of them out")
        if is_models:
            values[key] = _models(value_node, model_kinds or {}, file, place)
        else:
            values[key] = _value(value_node, kinds[key], f"{place}: {key}")
    if MODELS in values and MODEL in values:
        raise ConfigError(f"{file} has both {MODEL} and {MODELS}; name each model in the list")
    return values


def _models(node: yaml.Node, kinds: Mapping[str, Any], file: Path, place: str) -> list[dict[str, Any]]:
    """Return the values for each model, which are named."""
    import yaml

    is_list = isinstance(node, yaml.SequenceNode) and node.value
    if not is_list or not all(isinstance(each, yaml.MappingNode) for each in node.value):
        raise ConfigError(
            f"{place}: {MODELS} must be a list with a mapping for each model, as in 'model: mini'"
        )
    models = []
    for each in node.value:
        models.append(_values(each.value, kinds, file))
        if MODEL not in models[-1]:
            place = f"{file}, line {each.start_mark.line + 1}"
            raise ConfigError(f"{place}: the entry of {MODELS} names no model, as in 'model: mini'")
    return models


def by_parameter(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return values by name with underscores in all names.

    Args:
        given: values by names with hyphens or underscores.
        known: all names, with underscores.

    Raises:
        ConfigError: a name is unknown or duplicate.
    """
    values: dict[str, Any] = {}
    for name, value in given.items():
        key = name.replace("-", "_")
        if key not in known:
            raise ConfigError(f"no option has the name {name!r:.80}; {nearest_name(key, known)}")
        if key in values:
            raise ConfigError(f"{key} is there twice; leave one of them out")
        values[key] = value
    return values


def named_value(name: str, value: Any, kind: Any) -> Any:
    """Return a value as `read_config_file` returns those of a file.

    Args:
        name: its name.
        value: as YAML has it; text may stand for it.
        kind: type annotation of the command's parameter.

    Raises:
        ConfigError: the value has a wrong type.
    """
    import yaml

    try:
        return _value(_node(value), kind, name)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be read: {error!s:.300}") from None


def _node(value: Any) -> yaml.Node:
    """Return the node of a value; text is resolved as a YAML scalar, so that "4" is a number."""
    import yaml

    if isinstance(value, str):
        tag = yaml.SafeLoader("").resolve(yaml.ScalarNode, value, (True, False))
        return yaml.ScalarNode("text" if tag.endswith(":null") else tag, value)
    return yaml.SafeDumper(io.StringIO()).represent_data(value)


def _is_flag(parameter: inspect.Parameter) -> bool:
    return not isinstance(typing.get_args(parameter.annotation)[1], typer.models.ArgumentInfo)


def _key(flag: inspect.Parameter) -> str:
    """Return a flag's name in a file, which may differ from the parameter's name."""
    info = typing.get_args(flag.annotation)[1]
    declared = [info.default, *(info.param_decls or ())]  # typer has the first as a default until later
    long = [one for one in declared if isinstance(one, str) and one.startswith("--")]
    return (long[0] if long else flag_name(flag.name)).removeprefix("--")


def _read(file: Path) -> str:
    try:
        if not file.is_file():
            raise ConfigError(f"there is no file {file}, which --config names")
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{file} has more than {MAX_BYTES} bytes, which is too large for a configuration")
    return content.decode("utf-8-sig")


def _entries(text: str) -> list[tuple[yaml.Node, yaml.Node]]:
    """Return the keys and values of the mapping in a YAML text."""
    import yaml

    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):  # stopped early: time grows with the depth
        if isinstance(event, yaml.AliasEvent):  # nested aliases can stand for any number of values
            raise ValueError("it has an alias (*), which is not supported; write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"it has lists in lists or mappings more than {MAX_DEPTH} deep")
    root = yaml.compose(text, yaml.SafeLoader)
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("it has no mapping of flags to values, such as 'port: 9000'")
    return list(root.value)


def _value(node: yaml.Node, kind: Any, place: str) -> Any:
    """Return the value of a node for a parameter of type `kind`."""
    import yaml

    if isinstance(kind, types.UnionType):
        [kind] = [one for one in typing.get_args(kind) if one is not types.NoneType]
    if typing.get_origin(kind) is list:
        [item_kind] = typing.get_args(kind)
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        return [_value(item, item_kind, place) for item in items]
    if kind in _SCALARS:
        name, tags = _SCALARS[kind]
        if node.tag.rpartition(":")[2] not in tags:
            raise ConfigError(f"{place} is {_shown(node)}; it must be {name}")
        return kind(_constructed(node))
    if isinstance(node, yaml.MappingNode):
        return json.dumps(_constructed(node))
    if not isinstance(node, yaml.ScalarNode) or node.tag.endswith(":null"):
        raise ConfigError(f"{place} is {_shown(node)}; it must be text")
    return node.value  # verbatim: "off" and 1.10 are texts here


def _constructed(node: yaml.Node) -> Any:
    import yaml

    return yaml.SafeLoader("").construct_object(node, deep=True)


def _shown(node: yaml.Node) -> str:
    if isinstance(node.value, str):
        return f"{node.value!r:.{_MAX_SHOWN_VALUE}}" if node.value else "empty"
    return "a list or a mapping"
