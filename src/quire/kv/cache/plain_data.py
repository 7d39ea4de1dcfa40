"""Objects that can be saved as plain data and read back."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Self

import numpy as np

from quire.errors import nearest_name


class PlainData(ABC):
    """Has a dictionary of JSON's types, and is made from one."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the object as numbers, texts, lists and dictionaries."""

    @classmethod
    @abstractmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the object that `to_dict` saved.

        Raises:
            ValueError: a key is missing or unknown, or a value is out of range; names it.
        """

    def to_json(self, **kwargs: Any) -> str:
        """Return the object as JSON; `kwargs` are those of `json.dumps`."""
        return json.dumps(self.to_dict(), **kwargs)

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        """Return the object that `to_json` saved.

        Raises:
            ValueError: the text is not JSON, or as for `from_dict`.
        """
        return cls.from_dict(json.loads(json_str))


def plain_text(data: Any) -> str:
    """Return plain data as JSON that is the same for the same content."""
    return json.dumps(data, sort_keys=True)


def plain_number(value: Any) -> Any:
    """Return a scalar of numpy's as Python's, which JSON knows; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def check_keys(
    owner: str, data: Mapping[str, Any], keys: Iterable[str], optional: Collection[str] = ()
) -> None:
    """Raise ValueError unless `data` has these keys, but for the optional ones, and no other.

    The error names `owner` and the key.
    """
    known = list(keys)
    if not isinstance(data, Mapping):
        raise ValueError(f"{owner} is made from a dictionary, and this is {type(data).__name__}")
    for name in data:
        if name not in known:
            raise ValueError(f"{owner} has no {name!r}; {nearest_name(str(name), known)}")
    for name in known:
        if name not in data and name not in optional:
            raise ValueError(f"{owner} needs {name!r}, which is missing; there are {sorted(data)}")
