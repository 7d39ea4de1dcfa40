"""Reading a tokenizer from a model directory or a GGUF file. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from quire.config import ChatTemplateConfig
from quire.errors import ModelError
from quire.models.checkpoints.gguf.file import GGUFFile
from quire.models.checkpoints.gguf.location import find_gguf
from quire.models.checkpoints.gguf.tokenizer import read_gguf_tokenizer
from quire.models.checkpoints.json_files import read_json
from quire.models.checkpoints.model_files import MAX_TEMPLATE_BYTES, find_file, read_text
from quire.models.checkpoints.special_ids import special_ids
from quire.models.checkpoints.tokenizers.classes import tokenizer_class
from quire.models.checkpoints.tokenizers.special_tokens import SETTINGS_FILE, read_special_tokens
from quire.models.text.tokenizer import DEFAULT_TEMPLATING, Tokenizer
from quire.models.wrappers import decoder_entries

TOKENIZER_FILE = "tokenizer.json"
_MAX_TOKENIZER_BYTES = 256 << 20  # the largest published ones have some 40 MB

_OTHER_FILES = ("tokenizer.model", "vocab.json", "tekken.json", "spiece.model", "tiktoken.model")
_TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
_GGUF_TOKENS = {name: f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom")}
_GGUF_NAMED_TOKENS = {  # as llama.cpp spells them
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",
    "cls_token": "tokenizer.ggml.cls_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
# They end turns in the chats of models that Quire reads from GGUF files; metadata often name none of them.
_ENDS_OF_TURNS = frozenset({"<|end|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>"})


def read_tokenizer(
    path: Path, templating: ChatTemplateConfig = DEFAULT_TEMPLATING, *, extra_eos_ids: Sequence[int] = ()
) -> Tokenizer:
    """Read the `tokenizer.json` of a model directory, or of a GGUF file, and the settings that go with it.

    A GGUF file's own tokenizer is read only if there is no `tokenizer.json` beside it.

    Args:
        path: path of the directory or the file.
        templating: limits of the chat template, and its text if it is not the model's own.
        extra_eos_ids: ids that end a sequence, besides those that are read.

    Raises:
        ModelError: there is no tokenizer, or it cannot be read.
    """
    gguf = find_gguf(path)
    if gguf is None:
        return _from_directory(path, templating, extra_eos_ids)
    return _from_gguf(gguf, templating, extra_eos_ids)


def eos_ids_of_configs(path: Path, vocab_size: int) -> list[int]:
    """Return the ids that end a sequence by a model directory's generation_config.json and config.json.

    Raises:
        ModelError: an id is not in the vocabulary, or a file cannot be read.
    """
    return [
        token_id
        for name in ("generation_config.json", "config.json")
        for token_id in special_ids(
            decoder_entries(read_json(path / name) or {}).get("eos_token_id"),
            source=f"{path / name}: eos_token_id",
            vocab_size=vocab_size,
        )
    ]


def _from_directory(path: Path, templating: ChatTemplateConfig, extra_eos_ids: Sequence[int]) -> Tokenizer:
    settings = read_json(path / SETTINGS_FILE) or {}
    whole = read_json(path / "config.json") or {}
    model_config = {**decoder_entries(whole), "model_type": whole.get("model_type")}
    backend, special_tokens = _as_in_transformers(path, settings, model_config)
    vocab_size = max(_num_ids(backend), _int_or_0(model_config.get("vocab_size")))
    eos_token, bos_token = special_tokens.get("eos_token"), special_tokens.get("bos_token")
    eos_ids = [*eos_ids_of_configs(path, vocab_size), *_id_of(backend, eos_token), *extra_eos_ids]
    bos_ids = (
        _id_of(backend, bos_token)
        if bos_token
        else special_ids(
            model_config.get("bos_token_id"),
            source=f"{path / 'config.json'}: bos_token_id",
            vocab_size=vocab_size,
        )
    )
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        bos_token_id=next(iter(bos_ids), None),
        chat_template=templating.chat_template or _template_source(path, settings),
        template_limits=templating,
    )


def _as_in_transformers(
    path: Path, settings: Mapping[str, Any], model_config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Return the tokenizer that a directory's files make together, and its special tokens' texts by role."""
    backend = _read_backend(path)
    limit = _int_or_0(model_config.get("vocab_size")) or None
    try:
        decisive = tokenizer_class(settings, model_config, backend)
        defaults = {} if decisive is None else decisive.tokens
        tokens = read_special_tokens(path, settings, defaults, backend.get_added_tokens_decoder())
        if decisive is not None:
            backend = decisive.rebuild(backend, {**settings, **tokens.texts()})
        tokens.add_to(backend, _num_ids(backend), limit)
        if decisive is not None and decisive.ignores_flags:
            tokens.without_flags().add_to(backend, _num_ids(backend), limit)
    except (ModelError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception; its panics are not even that
        raise ModelError(f"the tokenizer in {path} cannot be built: {error!s:.500}") from error
    backend.encode_special_tokens = settings.get("split_special_tokens") is True
    return backend, tokens.texts()


def _from_gguf(path: Path, templating: ChatTemplateConfig, extra_eos_ids: Sequence[int]) -> Tokenizer:
    file = GGUFFile(path)
    metadata = file.metadata
    tokens = file.entries("tokenizer.ggml.tokens", str)
    has_json = find_file(path.parent, TOKENIZER_FILE) is not None
    backend = _read_backend(path.parent) if has_json else read_gguf_tokenizer(file)
    vocab_size = max(_num_ids(backend), len(tokens))
    ids = {
        name: special_ids(metadata.get(key), source=f"{path}: {key}", vocab_size=vocab_size)
        for name, key in _GGUF_TOKENS.items()
    }
    named = {f"{name}_token": next(iter(ids[name]), None) for name in ("bos", "eos")}
    # Only chat templates see these. Where a model has no such token, files have ids beyond the vocabulary.
    named |= {name: file.entry(key, int) for name, key in _GGUF_NAMED_TOKENS.items()}
    ends = [number for number, token in enumerate(tokens) if token in _ENDS_OF_TURNS]
    return Tokenizer(
        backend,
        special_tokens={
            name: tokens[token_id]
            for name, token_id in named.items()
            if token_id is not None and 0 <= token_id < len(tokens)
        },
        eos_token_ids=tuple(dict.fromkeys([*ids["eos"], *ids["eot"], *ids["eom"], *ends, *extra_eos_ids])),
        bos_token_id=next(iter(ids["bos"]), None),
        chat_template=templating.chat_template or _gguf_template_source(metadata, path),
        template_limits=templating,
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    file = find_file(path, TOKENIZER_FILE)
    if file is None:
        raise _no_tokenizer(path)
    text = read_text(file, _MAX_TOKENIZER_BYTES)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception; its panics are not even that
        raise ModelError(f"{file} cannot be read: {error!s:.500}") from error


def _no_tokenizer(path: Path) -> ModelError:
    other = next((name for name in _OTHER_FILES if find_file(path, name) is not None), None)
    advice = f"; convert {other} by saving it with transformers' AutoTokenizer" if other else ""
    return ModelError(f"{path} holds no tokenizer.json, the only tokenizer format that Quire reads{advice}")


def _template_source(path: Path, settings: Mapping[str, Any]) -> str | None:
    default, tool_use = (
        None if (file := find_file(path, name)) is None else read_text(file, MAX_TEMPLATE_BYTES)
        for name in ("chat_template.jinja", _TOOL_TEMPLATE_FILE)
    )
    if default is None:
        old_file = path / "chat_template.json"
        places = ((settings, path / SETTINGS_FILE), (read_json(old_file) or {}, old_file))
        values, source = next(
            (place for place in places if place[0].get("chat_template") is not None), places[0]
        )
        named = _named_templates(values.get("chat_template"), source)
        default = named["default"]
        tool_use = named["tool_use"] if tool_use is None else tool_use
    return _of_two(tool_use, default)


def _gguf_template_source(metadata: Mapping[str, Any], file: Path) -> str | None:
    keys = "tokenizer.chat_template", "tokenizer.chat_template.tool_use"
    default, tool_use = (_checked_template(metadata.get(key), file) for key in keys)
    return _of_two(tool_use, default)


def _named_templates(entry: Any, file: Path) -> dict[str, str | None]:
    """Return the named templates of an entry: a text, an object, or a list of named ones."""
    if isinstance(entry, list):
        named = [(one.get("name"), one.get("template")) for one in entry if isinstance(one, dict)]
        entry = {name: template for name, template in named if isinstance(name, str)}
    elif not isinstance(entry, dict):
        entry = {"default": entry}
    return {name: _checked_template(entry.get(name), file) for name in ("default", "tool_use")}


def _checked_template(template: Any, file: Path) -> str | None:
    if template is not None and not (isinstance(template, str) and len(template) <= MAX_TEMPLATE_BYTES):
        raise ModelError(
            f"{file}: the chat template is {template!r:.100}; it must be a text of at most "
            f"{MAX_TEMPLATE_BYTES} characters"
        )
    return template


def _of_two(with_tools: str | None, without: str | None) -> str | None:
    """Return one template of two, each rendered as if it were alone; `without` if there is only that.

    The marks between them keep jinja2 from removing the white space that these begin and end with.
    """
    if with_tools is None:
        return without
    if without is None:
        without = "{{ raise_exception('the model has a chat template for requests with tools only') }}"
    mark = "{{ '' }}"
    first, second = (mark + text.removesuffix("\n") + mark for text in (with_tools, without))
    return "{% if tools %}" + first + "{% else %}" + second + "{% endif %}"


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> list[int]:
    """Return the id of a token, if there is such a token."""
    token_id = None if token is None else backend.token_to_id(token)
    return [] if token_id is None else [token_id]


def _num_ids(backend: tokenizers.Tokenizer) -> int:
    """Return one more than the largest id; added tokens may leave gaps."""
    size: int = backend.get_vocab_size(with_added_tokens=True)
    return max(size, *(token_id + 1 for token_id in backend.get_added_tokens_decoder()), 1)


def _int_or_0(value: Any) -> int:
    return value if type(value) is int else 0
