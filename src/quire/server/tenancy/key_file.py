"""The key file: tenants, their keys, weights and limits, in TOML."""

from __future__ import annotations

import bisect
import dataclasses
import logging
import os
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from quire.config import TenantConfig
from quire.errors import ConfigError
from quire.server.tenancy.api_keys import key_digest

logger = logging.getLogger(__name__)

MAX_BYTES = 1_048_576
DEFAULT_TENANT = "default"  # of keys outside the file

_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_MAX_LINES_OF_A_VALUE = 256  # tried to find where an entry ends

FileState = tuple[int, int, int, int]  # device, inode, nanoseconds of the last change, bytes


@dataclasses.dataclass(frozen=True, slots=True)
class KeyFile:
    """Contents of a key file.

    Attributes:
        tenants: configurations by name.
        names: names of tenants by the digests of their keys.
    """

    tenants: Mapping[str, TenantConfig]
    names: Mapping[bytes, str]


def file_state(path: str) -> FileState | None:
    """Return a value that changes with the file; None if the file does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def read_key_file(path: str) -> KeyFile:
    """Read the file, and warn if other users can read it.

    Raises:
        ConfigError: it cannot be read, or something in it is invalid; the message names line and field.
    """
    return _Reader(path, _text(path)).read()


def _text(path: str) -> str:
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"api_keys_file {path} is not a regular file")
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"api_keys_file {path!r:.300} cannot be read: {error}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"api_keys_file {path} has more than {MAX_BYTES} bytes, which is the limit")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning(
            "api_keys_file %s has mode %o, which gives other users access; run chmod 600",
            path,
            stat.S_IMODE(status.st_mode),
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: the file is not UTF-8") from None


class _Reader:
    """Reads one file; errors never show possible keys."""

    def __init__(self, path: str, text: str) -> None:
        self._path = path
        self._lines = text.splitlines(keepends=True)
        self._text = text

    def read(self) -> KeyFile:
        try:
            parsed = tomllib.loads(self._text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{self._path} is not valid TOML: {_without_values(error)}") from None
        except RecursionError:
            raise ConfigError(f"{self._path} is not valid TOML: its values are nested too deeply") from None
        for name in parsed:
            if name != "tenants":
                raise self._error((name,), "is unknown; the file has tables [tenants.NAME] only")
        tables = parsed.get("tenants", {})
        if not isinstance(tables, dict) or not tables:
            raise self._error(("tenants",), "must be tables such as [tenants.NAME], at least one")
        names: dict[bytes, str] = {}
        tenants = {name: self._tenant(name, table, names) for name, table in tables.items()}
        return KeyFile(tenants, names)

    def _tenant(self, name: str, table: Any, names: dict[bytes, str]) -> TenantConfig:
        path = ("tenants", name)
        if not _NAME.fullmatch(name):
            raise self._error(
                path, "is not a valid tenant name; it must be 1 to 64 letters, digits, '_', '.', '@' or '-'"
            )
        if name == DEFAULT_TENANT:
            raise self._error(path, "is the tenant of the keys in api_key; choose another name")
        if not isinstance(table, dict):
            raise self._error(path, f"must be a table, [tenants.{name}]")
        for digest in self._digests(path, table.pop("keys", None)):
            if digest in names:
                raise self._error((*path, "keys"), f"has a key that {names[digest]!r} has already")
            names[digest] = name
        if "name" in table:
            raise self._error((*path, "name"), "is given by the table's header; leave it out")
        try:
            return TenantConfig(name=name, **table)
        except ConfigError as error:
            said = str(error)
            begins = {
                field: (f"TenantConfig.{field} ", f"TenantConfig has no field {field!r}") for field in table
            }
            wrong = [field for field in table if said.startswith(begins[field])]
            raise self._error((*path, *wrong[:1]), said.removeprefix("TenantConfig.")) from None

    def _digests(self, path: Sequence[str], keys: Any) -> list[bytes]:
        """Return the digests of a tenant's keys, each given as plain text or as its SHA-256."""
        if not isinstance(keys, list) or not keys:
            raise self._error(
                (*path, "keys") if keys is not None else path, "needs keys, a list of at least one string"
            )
        digests = []
        for index, key in enumerate(keys):
            problem = _problem_of(key)
            if problem:
                raise self._error((*path, "keys"), f"has a key (number {index + 1}) that {problem}")
            hashed = _DIGEST.fullmatch(key)
            digests.append(bytes.fromhex(hashed[1]) if hashed else key_digest(key.encode()))
        return digests

    def _error(self, path: Sequence[str], problem: str) -> ConfigError:
        line = self._line_of(path)
        where = self._path if line is None else f"{self._path}, line {line}"
        return ConfigError(f"{where}: {'.'.join(path)}: {problem}")

    def _line_of(self, path: Sequence[str]) -> int | None:
        """Return the line, from 1, where an entry begins; None if it is not found.

        It is the last line of the shortest beginning of the file that has the entry.
        """
        numbers = range(1, len(self._lines) + 1)
        line = bisect.bisect_left(numbers, True, key=lambda number: self._has_entry(number, path))
        return line + 1 if line < len(numbers) else None

    def _has_entry(self, number: int, path: Sequence[str]) -> bool:
        """Whether the first `number` lines, extended to the end of their last value, have an entry."""
        for end in range(number, min(number + _MAX_LINES_OF_A_VALUE, len(self._lines)) + 1):
            try:
                found: Any = tomllib.loads("".join(self._lines[:end]))
            except tomllib.TOMLDecodeError:
                continue  # inside a value
            for name in path:
                if not isinstance(found, dict) or name not in found:
                    return False
                found = found[name]
            return True
        return True


def _problem_of(key: Any) -> str:
    """Return what is wrong with a key; empty: it is valid."""
    if not isinstance(key, str):
        return "is not a string"
    if key.startswith("sha256:") and not _DIGEST.fullmatch(key):
        return "begins with 'sha256:', which must be followed by 64 hexadecimal digits"
    if not key or any(letter.isspace() for letter in key):
        return "is empty or has a space, which no client can send"
    return ""


def _without_values(error: tomllib.TOMLDecodeError) -> str:
    """Return the error's position only, as its message may quote a key."""
    place = re.search(r"\(at (line \d+), column \d+\)", str(error))
    return "see its end" if place is None else f"see {place[1]}"
