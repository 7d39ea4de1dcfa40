"""Tensors of a KV cache in a safetensors file, with a description of what they belong to."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from typing_extensions import override

from quire.kv.cache.plain_data import PlainData, plain_text

_DESCRIPTION = "paged_cache"  # key of the file's metadata


class TensorData(PlainData):
    """Plain data with tensors, which can be kept in a safetensors file beside it."""

    @override
    @abstractmethod
    def to_dict(self, tensors: str | Path | None = None) -> dict[str, Any]:
        """Return all but the tensors; these are written to the file `tensors`, if it is given."""

    @override
    @classmethod
    @abstractmethod
    def from_dict(cls, data: Mapping[str, Any], *args: Any, **kwargs: Any) -> Self:
        """Return the object that `to_dict` wrote down; the second argument is the tensors' file or None."""

    @override
    def to_json(self, tensors: str | Path | None = None, **kwargs: Any) -> str:
        """Return `to_dict(tensors)` as JSON; `kwargs` are those of `json.dumps`."""
        return json.dumps(self.to_dict(tensors), **kwargs)

    @override
    @classmethod
    def from_json(cls, json_str: str, tensors: str | Path | None = None, **kwargs: Any) -> Self:
        """Return the object that `to_json` wrote down; other arguments as for `from_dict`."""
        return cls.from_dict(json.loads(json_str), tensors, **kwargs)


def save_tensors(
    path: str | Path, tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]
) -> None:
    """Write tensors to a file; it appears whole or not at all.

    Args:
        path: path of the file; one that is there is replaced.
        tensors: by name.
        description: plain data by which `load_tensors` knows them.
    """
    unfinished = Path(f"{path}.{os.getpid()}.unfinished")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, unfinished, metadata={_DESCRIPTION: plain_text(description)})
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_tensors(
    path: str | Path, tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]
) -> None:
    """Copy what a file has into `tensors`, by name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no safetensors file, it belongs to something of another description, or a tensor is
            missing or has another shape or type; nothing is copied.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get(_DESCRIPTION)
            if found != plain_text(description):
                raise ValueError(f"{path} does not hold the tensors of this cache; it describes {found}")
            loaded = {name: file.get_tensor(name) for name in tensors}
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if (loaded[name].shape, loaded[name].dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{name} in {path} is {loaded[name].dtype} {list(loaded[name].shape)}; this cache has "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
    for name, tensor in tensors.items():
        tensor.copy_(loaded[name])
