"""Finding a model's directory by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from quire.config import BUILT_IN_MODELS
from quire.errors import ConfigError, ModelNotFoundError
from quire.models.checkpoints.gguf.location import SUFFIX as GGUF_SUFFIX

_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_DESCRIPTION_FILES = ["*.json", "*.jinja"]
_SECOND_COPIES = ["consolidated*", "original/*"]  # the same weights in the publisher's format
_LIKENESS = 0.75  # minimum difflib ratio of a typo
_BUILT_IN_DIRECTORY = Path(__file__).resolve().parents[2]  # that the models are in


def resolve_model(name: str, *, weights: bool = True, revision: str = "") -> Path:
    """Return the directory or GGUF file of the model `name`, downloading it from the hub if necessary.

    Args:
        name: "mini" or "mini-embed" for a built-in model, the path of a directory or of a GGUF file, a name
            on the Hugging Face hub such as "Qwen/Qwen3-0.6B", or the last part of that, in upper or lower
            case, for a model that has been downloaded.
        weights: whether to download the weights, not only the description.
        revision: branch, tag or commit of a model on the hub; empty: its main branch.

    Raises:
        ModelNotFoundError: says what was tried.
        ConfigError: there is a revision, but the model is on this machine.
    """
    path = _local_path(name)
    if path is None:
        return _download(_full_name(name), _WANTED_FILES if weights else _DESCRIPTION_FILES, revision)
    if revision:
        raise ConfigError(
            f"EngineConfig.revision is {revision!r:.100}, but {name!r} is on this machine, and only models "
            "on the Hugging Face hub have revisions; leave it out"
        )
    return path


def _local_path(name: str) -> Path | None:
    """Return the model's directory or GGUF file; None if it is neither built in nor a path."""
    if name in BUILT_IN_MODELS:
        return _built_in(name)
    path = Path(name).expanduser()
    if path.is_dir() or (path.exists() and path.suffix == GGUF_SUFFIX):
        return path
    if path.exists():
        raise ModelNotFoundError(f"{name!r} is a file; give a directory or a GGUF file")
    return None


def _built_in(name: str) -> Path:
    path = _BUILT_IN_DIRECTORY / name
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(
            f"the built-in model is not in {path}; this installation of Quire is incomplete"
        )
    return path


def _full_name(name: str) -> str:
    """Complete the name of a downloaded model from its last part; return other names unchanged.

    Raises:
        ModelNotFoundError: it is the last part of several.
    """
    downloaded = list(_cached_names())
    meant = [one for one in downloaded if one.rpartition("/")[2].casefold() == name.casefold()]
    if name in downloaded or not meant:
        return name
    if len(meant) > 1:
        raise ModelNotFoundError(
            f"{name!r} is short for {' and '.join(meant)}; give one of these names in full"
        )
    return meant[0]


def _download(name: str, wanted: list[str], revision: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    tried = (
        f"no model {name!r}{_hint(name)}: it is not {' or '.join(map(repr, BUILT_IN_MODELS))} (built in), "
        "there is no directory of that name"
    )
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=wanted,
                ignore_patterns=_SECOND_COPIES,
            )
        )
    except HFValidationError as error:
        raise ModelNotFoundError(f"{tried}, and it is not a valid hub name") from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        wish = f"its revision {revision!r:.100}" if revision else "it"
        raise ModelNotFoundError(
            f"{tried}, and the Hugging Face hub did not give {wish}: {type(error).__name__}: "
            f"{reason[0] if reason else 'no reason given'}"
        ) from error


def _hint(name: str) -> str:
    """Return the local model whose name resembles an unknown name; "" if none does."""
    path = Path(name).expanduser()
    beside = (str(one) for one in _entries(path.parent) if one.is_dir() or one.suffix == GGUF_SUFFIX)
    downloaded = {name for full_name in _cached_names() for name in (full_name, full_name.rpartition("/")[2])}
    known = sorted({*beside, *BUILT_IN_MODELS, *downloaded})
    close = difflib.get_close_matches(str(path), known, n=1, cutoff=_LIKENESS)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _cached_names() -> Iterator[str]:
    """Yield the names of models in the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    for one in _entries(Path(HF_HUB_CACHE)):
        kind, _, name = one.name.partition("--")
        if kind == "models" and name:
            yield name.replace("--", "/")


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
