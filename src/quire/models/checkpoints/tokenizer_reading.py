"""Reading a tokenizer from a model directory or a GGUF file. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from quire.errors import ModelError
from quire.models.checkpoints.gguf.file import GGUFFile
from quire.models.checkpoints.gguf.location import find_gguf
from quire.models.checkpoints.gguf.tokenizer import read_gguf_tokenizer
from quire.models.checkpoints.json_files import read_json
from quire.models.tokenizer import Tokenizer

TOKENIZER_FILE = "tokenizer.json"

_GGUF_TOKENS = ("bos", "eos", "eot", "eom", "unk", "pad")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_tokenizer(path: Path) -> Tokenizer:
    """Read the `tokenizer.json` of a model directory, or of a GGUF file, and the settings that go with it.

    A GGUF file's own tokenizer is read only if there is no `tokenizer.json` beside it.

    Raises:
        ModelError: there is no tokenizer, or it cannot be read.
    """
    gguf = find_gguf(path)
    return _from_directory(path) if gguf is None else _from_gguf(gguf)


def read_tokenizer_json(path: Path) -> str:
    """Return the text of a model's `tokenizer.json`; for a GGUF file without one, its tokenizer as such text.

    Raises:
        ModelError: the GGUF file's tokenizer cannot be read.
        OSError: the file cannot be read.
    """
    gguf = find_gguf(path)
    file = (path if gguf is None else gguf.parent) / TOKENIZER_FILE
    if gguf is None or file.is_file():
        return file.read_text(encoding="utf-8")
    text: str = read_gguf_tokenizer(GGUFFile(gguf)).to_str()
    return text


def _from_directory(path: Path) -> Tokenizer:
    backend = _read_backend(path)
    settings = read_json(path / "tokenizer_config.json") or {}
    model_config = read_json(path / "config.json") or {}
    special_tokens = _special_tokens((read_json(path / "special_tokens_map.json") or {}) | settings)
    bos_token = special_tokens.get("bos_token")
    bos_id = model_config.get("bos_token_id") if bos_token is None else backend.token_to_id(bos_token)
    eos_token = special_tokens.get("eos_token")
    eos_ids = [
        *_ids((read_json(path / "generation_config.json") or {}).get("eos_token_id")),
        *_ids(model_config.get("eos_token_id")),
        *_ids(None if eos_token is None else backend.token_to_id(eos_token)),
    ]
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        bos_token_id=bos_id,
        chat_template=_template_source(path, settings),
    )


def _from_gguf(path: Path) -> Tokenizer:
    file = GGUFFile(path)
    metadata = file.metadata
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _GGUF_TOKENS}
    eos_ids = (ids["eos"], ids["eot"], ids["eom"])
    has_json = (path.parent / TOKENIZER_FILE).is_file()
    return Tokenizer(
        _read_backend(path.parent) if has_json else read_gguf_tokenizer(file),
        special_tokens={
            f"{name}_token": tokens[token_id]
            for name, token_id in ids.items()
            if token_id is not None and f"{name}_token" in _NAMED_TOKENS and token_id < len(tokens)
        },
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in eos_ids if token_id is not None)),
        bos_token_id=ids["bos"],
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / TOKENIZER_FILE
    if not file.is_file():
        raise ModelError(f"{path} holds no tokenizer.json, the only tokenizer format that Quire reads")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file} cannot be read: {error}") from error


def _template_source(path: Path, settings: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if template is None:
        template = (read_json(path / "chat_template.json") or {}).get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the named tokens' text; an entry is the text itself or an object with `content`."""
    found = {}
    for name in _NAMED_TOKENS:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _ids(value: Any) -> list[int]:
    """Return the ids in an entry that holds none, one or a list."""
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]
