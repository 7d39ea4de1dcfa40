"""Special and added tokens from the files beside a tokenizer.json.

All as in transformers. Since 2023, `tokenizer_config.json` itself lists the added tokens, and then counts
alone; before, `special_tokens_map.json` and `added_tokens.json` stood beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from quire.errors import ModelError
from quire.models.checkpoints.json_files import entry, read_json

SETTINGS_FILE = "tokenizer_config.json"
_MAP_FILE, _ADDED_FILE = "special_tokens_map.json", "added_tokens.json"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MAX_TOKEN_CHARACTERS = 4096
_MAX_DIGITS = 10  # of a token id
_MAX_TOKENS = 1 << 16  # of one file; the most published have about 6,000


@dataclasses.dataclass(slots=True, frozen=True)
class SpecialTokens:
    """Tokens in the order in which they get ids where the vocabulary does not have them.

    Args:
        by_role: such as bos_token, or a role of the model's own.
        added: tokens that the files list as added to the vocabulary, special or not.
        special: those by role, and further special tokens. Of one text, the last one's flags count.
    """

    by_role: dict[str, AddedToken]
    added: list[AddedToken]
    special: list[AddedToken]

    def texts(self) -> dict[str, str]:
        """Return the tokens' texts by role, of the roles that all models share."""
        return {role: self.by_role[role].content for role in _ROLES if role in self.by_role}

    def without_flags(self) -> SpecialTokens:
        """Return special tokens for which the files give no flags."""
        return SpecialTokens({}, [AddedToken(token.content, special=True) for token in self.special], [])

    def add_to(self, backend: tokenizers.Tokenizer, num_ids: int, limit: int | None) -> None:
        """Add to a tokenizer what it lacks; it takes over what the files say of tokens that it has.

        Args:
            backend: the tokenizer.
            num_ids: one more than its largest id.
            limit: ids that the model knows; a token that would get another is left out. None: not known.
        """
        listed = {token.content for token in (*self.added, *backend.get_added_tokens_decoder().values())}
        special = [token for token in self.special if token.content not in listed]
        kept: list[AddedToken] = []
        new: set[str] = set()
        for token in (*self.added, *special):
            if backend.token_to_id(token.content) is None and token.content not in new:
                if limit is not None and num_ids + len(new) >= limit:
                    continue
                new.add(token.content)
            kept.append(token)
        backend.add_tokens(kept)


def read_special_tokens(
    path: Path, settings: Mapping[str, Any], defaults: Mapping[str, str], in_json: Mapping[int, AddedToken]
) -> SpecialTokens:
    """Return the tokens that the files of a model name.

    Args:
        path: the model's directory.
        settings: the content of its tokenizer_config.json.
        defaults: texts by role, of roles that the files do not mention.
        in_json: the tokens that its tokenizer.json lists as added, by id.

    Raises:
        ModelError: an entry is not what it should be.
    """
    file = path / SETTINGS_FILE
    listed = entry(settings, "added_tokens_decoder", dict, file)
    mapping_file = path / _MAP_FILE
    mapping = (read_json(mapping_file) or {}) if listed is None else {}
    places = [(settings, file), (mapping, mapping_file)]
    roles, others = _roles([(defaults, file), *places]), _others(places)
    if listed is None:
        # transformers reads added_tokens.json before the objects in tokenizer_config.json.
        texts = {key: value for key, value in settings.items() if not isinstance(value, dict)}
        named = _roles([(texts, file), (mapping, mapping_file)])
        special = {one.token.content for role, one in named.items() if role in _ROLES}
        special |= {one.token.content for one in others}
        by_id = _of_added_file(path / _ADDED_FILE, special) | dict(in_json)
    else:
        by_id = _of_settings(listed, f"{file}: added_tokens_decoder")
    added = [by_id[number] for number in sorted(by_id)]
    by_text = {token.content: token for token in added}
    by_role = {role: by_text.get(one.token.content, one.token) for role, one in roles.items()}
    for token in by_role.values():
        token.special = True
    # To transformers, a text equals no object, even with the flags that the text gets.
    distinct = {(one.is_text, repr(one.token)): one.token for one in (*roles.values(), *others)}
    return SpecialTokens(by_role, added, list(distinct.values()))


class _Named(NamedTuple):
    """A special token that a file names, and whether as a text rather than as an object with flags."""

    token: AddedToken
    is_text: bool


def _roles(places: Iterable[tuple[Mapping[str, Any], Path]]) -> dict[str, _Named]:
    """Return the tokens with a role, the common ones first; of several places the last counts."""
    found: dict[str, _Named | None] = {}
    for values, file in places:
        named = values.get("extra_special_tokens")
        own = {role: value for role, value in values.items() if _is_role(role, value)}
        together = {**own, **(named if isinstance(named, dict) else {})}
        _check_count(together, str(file))
        for role, value in together.items():
            is_none = value in (None, "")  # old files have an empty text
            found[role] = None if is_none else _named(value, f"{file}: {role:.100}")
    ordered = {role: found.get(role) for role in (*_ROLES, *found)}
    return {role: one for role, one in ordered.items() if one is not None}


def _named(value: Any, source: str) -> _Named:
    return _Named(_token(value, source, special=True), isinstance(value, str))


def _is_role(name: str, value: Any) -> bool:
    """Return whether an entry gives a token a role: one that all models share, or one of the model's own."""
    is_tagged = isinstance(value, dict) and value.get("__type") == "AddedToken"
    return name in _ROLES or (name.endswith("_token") and (isinstance(value, str) or is_tagged))


def _others(places: Iterable[tuple[Mapping[str, Any], Path]]) -> list[_Named]:
    found: dict[str, _Named] = {}
    for values, file in places:
        for name in ("extra_special_tokens", "additional_special_tokens"):
            tokens = values.get(name)
            if isinstance(tokens, list) and tokens and not (found and name == "additional_special_tokens"):
                _check_count(tokens, f"{file}: {name}")
                read = [_named(token, f"{file}: {name}") for token in tokens]
                found |= {one.token.content: one for one in read}
                break
    return list(found.values())


def _of_added_file(file: Path, special: Set[str]) -> dict[int, AddedToken]:
    values = read_json(file) or {}
    _check_count(values, str(file))
    found = {}
    for text, number in values.items():
        if type(number) is not int:
            raise ModelError(f"{file} has {number!r:.100} for {text!r:.100}; it must be a token id")
        is_special = text in special
        found[number] = _token(text, str(file), special=is_special, normalized=not is_special)
    return found


def _of_settings(listed: Mapping[str, Any], source: str) -> dict[int, AddedToken]:
    _check_count(listed, source)
    wrong = next((key for key in listed if not (key.isdecimal() and len(key) < _MAX_DIGITS)), None)
    if wrong is not None:
        raise ModelError(f"{source} has the key {wrong!r:.100}; it must be a token id")
    return {int(key): _token(token, f"{source}.{key}") for key, token in listed.items()}


def _check_count(tokens: Any, source: str) -> None:
    if len(tokens) > _MAX_TOKENS:
        raise ModelError(f"{source} has {len(tokens)} tokens; at most {_MAX_TOKENS} are read there")


def _token(value: Any, source: str, **flags: bool) -> AddedToken:
    """Return a token that a file has as its text, or as an object with `content` and flags.

    Args:
        value: the text or the object.
        source: file and key, for the error.
        flags: what counts where the file says nothing of it; `special` is never false where it is true here.
    """
    text = value.get("content") if isinstance(value, dict) else value
    if not (isinstance(text, str) and 0 < len(text) <= _MAX_TOKEN_CHARACTERS):
        raise ModelError(
            f"{source} is {value!r:.100}; it must be a text of at most {_MAX_TOKEN_CHARACTERS} characters, "
            "or an object with such a content"
        )
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ModelError(f"{source} is {value!r:.100}; it must be valid Unicode")
    if isinstance(value, dict):
        flags = {name: bool(value[name]) for name in _FLAGS if name in value} | (
            {"special": True} if flags.get("special") else {}
        )
    return AddedToken(text, **flags)
