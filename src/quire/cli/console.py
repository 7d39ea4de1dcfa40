"""Terminal output that all commands share: one-line errors, and whether to show progress."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator

import typer

from quire.config import (
    AdaptiveRKVConfig,
    BatchConfig,
    CacheEvictionConfig,
    ChatTemplateConfig,
    ConnectionConfig,
    EdgeConfig,
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
from quire.errors import ConfigError, InvalidRequestError, QuireError
from quire.sampling_params import SamplingParams

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

_NAMED_BARE = (
    EngineConfig, SchedulerConfig, SpeculationConfig, SupervisionConfig, ChatTemplateConfig, KVTierConfig,
    KVTransferConfig, KVEventsConfig, SamplingParams, ServerConfig, RouterConfig, EdgeConfig,
    ConnectionConfig, BatchConfig,
)  # fmt: skip
_UNMISTAKABLE = "|".join(
    field.name
    for cls in _NAMED_BARE
    for field in dataclasses.fields(cls)
    if "_" in field.name and "help" in field.metadata  # a part of a configuration has no flag
)
_FIELD = re.compile(rf"\b([A-Z]\w*(?:Config|Params))\.(\w+)|(?<![\w./-])({_UNMISTAKABLE})\b(?!\.\w)")
_KNOWN_NAMES = re.compile(r"; (?:known names: |did you mean ')")  # names in a file are not flags
_PREFIXES = {  # of flags for fields whose names are ambiguous alone
    CacheEvictionConfig.__name__: "eviction_",
    KVCrushConfig.__name__: "kvcrush_",
    AdaptiveRKVConfig.__name__: "adaptive_rkv_",
    SparseAttentionConfig.__name__: "sparse_",
}


def parameter_name(owner: str, field_name: str) -> str:
    """Return the name on the command line, as a parameter, of a field of the class named `owner`."""
    return _PREFIXES.get(owner, "") + field_name


def flag_name(parameter: str) -> str:
    """Return the flag of a parameter: max_num_seqs -> --max-num-seqs."""
    return "--" + parameter.replace("_", "-")


def in_flags(message: str, param: str | None = None) -> str:
    """Return an error message with the names of fields written as flags.

    Args:
        message: refers to fields as `SchedulerConfig.max_num_seqs`, or by a bare name that is not English.
        param: a field that the message may begin with by its bare name, even if that is an English word.
    """
    if param and message.split(" ", 1)[0] == param:
        message = flag_name(param) + message.removeprefix(param)

    def flag(match: re.Match[str]) -> str:
        return flag_name(match[3] or parameter_name(match[1], match[2]))

    known = _KNOWN_NAMES.search(message)
    end = known.start() if known else len(message)
    return _FIELD.sub(flag, message[:end]) + message[end:]


def print_error(message: str) -> None:
    """Write `error: message` to stderr as one line."""
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {' '.join(message.split())}", err=True)


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Exit with status 2 if the given values are invalid."""
    try:
        yield
    except (ConfigError, InvalidRequestError) as error:
        print_error(in_flags(str(error), getattr(error, "param", None)))
        raise typer.Exit(EXIT_USAGE) from None


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an error as one line and exit: with status 2 for a configuration error, 1 for any other."""
    try:
        yield
    except QuireError as error:
        print_error(in_flags(str(error)))
        raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE) from None
    except BrokenPipeError:
        raise  # typer exits silently, as usual for a closed pipe
    except OSError as error:
        print_error(str(error))
        raise typer.Exit(EXIT_FAILURE) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def stderr_is_terminal() -> bool:
    """Whether stderr is a terminal, so that progress does not end up in a log or a pipe."""
    return sys.stderr.isatty()
