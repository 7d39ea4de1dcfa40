"""`quire list` and `quire pull`: the models on this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.console import one_line_errors
from quire.config import BUILT_IN_MODELS


@dataclasses.dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that needs no download: its name, its size in bytes, and its directory."""

    name: str
    num_bytes: int
    path: Path


def list_models(
    *, as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")] = False
) -> None:
    """List the models on this machine: the built-in ones, and those in the Hugging Face hub's cache.

    Examples:
      quire list
      quire list --json
    """
    models = _local_models()
    if as_json:
        for model in models:
            fields = {"name": model.name, "bytes": model.num_bytes, "path": str(model.path)}
            typer.echo(json.dumps(fields))
        return
    from rich.filesize import decimal

    width = max(len(model.name) for model in models)
    for model in models:
        typer.echo(f"{model.name:{width}}  {decimal(model.num_bytes):>8}  {model.path}")


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name on the Hugging Face hub.")],
    *,
    revision: Annotated[
        str, typer.Option(metavar="TEXT", help="Branch, tag or commit. Empty: the main branch.")
    ] = "",
) -> None:
    """Download MODEL, so that it starts without waiting for the network, and print its directory.

    Examples:
      quire pull Qwen/Qwen3-0.6B
      quire pull Qwen/Qwen3-0.6B --revision 0123abc
    """
    from quire.models.checkpoints.hub import resolve_model

    with one_line_errors():
        typer.echo(resolve_model(model, revision=revision))


def _local_models() -> list[LocalModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    from quire.models.checkpoints.hub import resolve_model

    models = []
    for name in BUILT_IN_MODELS:
        path = resolve_model(name)
        size = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
        models.append(LocalModel(name, size, path))
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return models
    cached = [one for one in repositories if one.repo_type == "model" and one.revisions]
    for one in sorted(cached, key=lambda one: one.repo_id):
        latest = max(one.revisions, key=lambda revision: revision.last_modified)
        models.append(LocalModel(one.repo_id, one.size_on_disk, latest.snapshot_path))
    return models
