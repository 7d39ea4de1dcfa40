"""Configuration objects that produce the options of `LLMDataDist.init` and `add_model`."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

from quire.datadist.argument_checks import OFFSET, TIMEOUT_MS, U16, ArgumentChecks, Bounds
from quire.datadist.enums import DataType

_I32_INDEX = Bounds(0, 2**31 - 1)
_SHAPE = re.compile(r"\s*-?\d+\s*(,\s*-?\d+\s*)*", re.ASCII)

T = TypeVar("T")

_Check = Callable[[ArgumentChecks, str, Any], Any]
"""Checks a value for the argument of this name, and returns the value to store."""


class _Option(Generic[T]):
    """A property of a configuration, and the option that it sets.

    Args:
        key: key of the option.
        description: description of the property.
        check: takes its values.
        unset: its value until it is set; the option is left out then.
    """

    def __init__(self, key: str, description: str, check: _Check, unset: Any = None) -> None:
        self.__doc__ = description
        self.key = key
        self._check = check
        self._unset = unset

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, config: None, owner: type) -> Self: ...
    @overload
    def __get__(self, config: _Config, owner: type) -> T: ...
    def __get__(self, config: _Config | None, owner: type) -> Any:
        if config is None:
            return self
        value = config._values.get(self.key, self._unset)
        return list(value) if isinstance(value, list) else value

    def __set__(self, config: _Config, value: Any) -> None:
        with ArgumentChecks() as check:
            kept = self._check(check, self._name, value)
        config._values[self.key] = kept


def _integer(bounds: Bounds) -> _Check:
    return lambda check, name, value: check.integer(name, value, bounds)


def _instance(kind: type) -> _Check:
    def checked(check: ArgumentChecks, name: str, value: Any) -> Any:
        check.instance(name, value, kind)
        return value

    return checked


def _items(kind: type) -> _Check:
    return lambda check, name, value: check.items(name, value, kind)


def _address(check: ArgumentChecks, name: str, value: Any) -> str:
    check.instance(name, value, str)
    parse_address(value)
    return str(value)


def _one_index(check: ArgumentChecks, name: str, value: Any) -> int:
    given = value if isinstance(value, (list, tuple)) else [value]
    indices = check.integers(name, given, _I32_INDEX)
    check.require(len(indices) == 1, f"{name} has {len(indices)} devices; one object has one")
    return indices[0] if indices else 0


def _milliseconds(check: ArgumentChecks, name: str, value: Any) -> int:
    if isinstance(value, str):
        is_number = value.isascii() and value.isdigit()
        check.require(is_number, f"{name} is {value!r}, not a number of milliseconds")
        value = int(value) if is_number else TIMEOUT_MS.least
    return check.integer(name, value, TIMEOUT_MS)


def _json(check: ArgumentChecks, name: str, value: Any) -> str:
    check.instance(name, value, str)
    try:
        json.loads(value)
    except ValueError:
        check.require(False, f"{name} is {value!r:.80}, not JSON")
    return str(value)


def _shapes(check: ArgumentChecks, name: str, value: Any) -> list[str]:
    shapes = check.items(name, value, str)
    for shape in shapes:
        check.require(_SHAPE.fullmatch(shape) is not None, f"{name} has {shape!r}, not 'd0,d1,...'")
    return shapes


def _flag(key: str, description: str) -> _Option[bool]:
    return _Option(key, description, _instance(bool), unset=False)


class _Config:
    """Options, some of them with properties."""

    def __init__(self) -> None:
        self._ge_options: dict[str, str] = {}
        self._values: dict[str, Any] = {}  # set properties by option key

    @property
    def ge_options(self) -> dict[str, str]:
        """More options; properties take precedence over equal keys."""
        return dict(self._ge_options)

    @ge_options.setter
    def ge_options(self, ge_options: dict[str, str]) -> None:
        with ArgumentChecks() as check:
            self._ge_options = check.text_options("ge_options", ge_options)

    def generate_options(self) -> dict[str, str]:
        """Return the options that were set."""
        return self._ge_options | {key: _text(value) for key, value in self._values.items()}


class LLMConfig(_Config):
    """Options of `LLMDataDist.init`; unset ones are left out."""

    listen_ip_info = _Option[str | None](
        "llm.listenIpInfo", 'Where a PROMPT listens, "ip:port"; port 0 is any free one.', _address
    )
    device_id = _Option[int | None](
        "ge.exec.deviceId",
        "Index of the device; also accepted as a list or tuple with one item.",
        _one_index,
    )
    sync_kv_timeout = _Option[int | None](
        "llm.SyncKvCacheWaitTime",
        "Time limit of a call that moves KV, in milliseconds; also accepted as a string of digits.",
        _milliseconds,
    )
    enable_cache_manager = _flag(
        "llm.EnableCacheManager", "Whether `cache_manager` is used; always available."
    )
    enable_remote_cache_accessible = _flag(
        "llm.EnableRemoteCacheAccessible", "Whether peers access caches by address; not supported."
    )
    enable_switch_role = _flag("llm.EnableSwitchRole", "Whether `switch_role` is used; always available.")
    local_comm_res = _Option[str | None](
        "llm.LocalCommRes", "Communication resources of the device; stored only.", _instance(str)
    )
    mem_pool_cfg = _Option[str | None](
        "llm.MemPoolConfig", "Configuration of memory pools, as JSON; stored only.", _json
    )
    transfer_backend = _Option[str | None](
        "llm.TransferBackend",
        "Name of a backend; stored only. `quire.transports` selects one.",
        _instance(str),
    )
    link_total_time = _Option[int | None](
        "llm.LinkTotalTime",
        "Time limit of linking; stored only. `link_clusters` has a timeout.",
        _integer(_I32_INDEX),
    )
    link_retry_count = _Option[int | None](
        "llm.LinkRetryCount", "Number of attempts to link; stored only.", _integer(_I32_INDEX)
    )


class ModelConfig(_Config):
    """Options of `LLMDataDist.add_model`; unset ones are left out."""

    kv_shapes = _Option[list[str] | None](
        "llm.RefInputShapes", 'Shape of each KV tensor, "d0,d1,..."; all equal.', _shapes
    )
    kv_dtypes = _Option[list[DataType] | None](
        "llm.RefInputDtypes", "Data type of each KV tensor; all equal.", _items(DataType)
    )
    kv_seq_len_dim_index = _Option[int | None](
        "llm.RefInputSeqLenDimIndex", "Dimension that counts tokens.", _integer(OFFSET)
    )
    enable_page_attention = _flag(
        "llm.EnablePagedAttention", "Whether dimension 0 counts blocks that belong to no slot."
    )
    enable_shared_system_prefix = _flag(
        "llm.EnableSharedSystemPrefix", "Whether prompts may begin with a precomputed prefix."
    )
    om_paths = _Option[list[str] | None]("llm.OmCachePath", "Files for a default runner.", _items(str))
    is_flow_model = _flag("llm.IsFlowModel", "Whether `om_paths` is one path.")


def _text(value: Any) -> str:
    """Return a value as an option's text: booleans as "1" and "0", lists joined with ";"."""
    if isinstance(value, list):
        return ";".join(map(_text, value))
    return str(int(value)) if isinstance(value, int) else str(value)


def parse_address(text: str) -> tuple[str, int]:
    """Return ip and port of "ip:port"; raise `ValueError` if it is anything else."""
    ip, colon, port = text.partition(":")
    is_port = port.isascii() and port.isdigit() and int(port) <= U16.greatest
    if not colon or not is_port:
        raise ValueError(f"the address is {text!r}, not 'ip:port'")
    return str(ipaddress.IPv4Address(ip)), int(port)


LlmConfig = LLMConfig
