"""Identifiers of requests and peers."""

from __future__ import annotations

import ipaddress
from typing import Any, overload

from typing_extensions import override

from quire.datadist.argument_checks import U16, U32, U64, UINT64_MAX, ArgumentChecks


class _U64Property:
    """A property that holds an unsigned 64-bit integer."""

    def __init__(self, description: str) -> None:
        self.__doc__ = description

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, request: None, owner: type) -> _U64Property: ...
    @overload
    def __get__(self, request: LLMReq, owner: type) -> int: ...
    def __get__(self, request: LLMReq | None, owner: type) -> _U64Property | int:
        return self if request is None else request._ids[self._name]

    def __set__(self, request: LLMReq, value: int) -> None:
        with ArgumentChecks() as check:
            number = check.integer(self._name, value, U64)
        request._ids[self._name] = number


class LLMReq:
    """A request; `LLMReq()` is a placeholder for an idle slot.

    Args:
        req_id: `UINT64_MAX`: none.
        prompt_length: in tokens.
        prompt_cluster_id: where its prompt is computed.
        decoder_cluster_id: where its answer is; informational.
        prefix_id: id of the prefix that the prompt begins with; `UINT64_MAX`: none.
    """

    req_id = _U64Property("`UINT64_MAX`: none.")
    prompt_length = _U64Property("In tokens.")
    prompt_cluster_id = _U64Property("Where its prompt is computed.")
    decoder_cluster_id = _U64Property("Where its answer is; informational.")
    prefix_id = _U64Property("Id of the prefix that the prompt begins with; `UINT64_MAX`: none.")

    def __init__(
        self,
        req_id: int = UINT64_MAX,
        prompt_length: int = 0,
        prompt_cluster_id: int = 0,
        decoder_cluster_id: int = 0,
        prefix_id: int = UINT64_MAX,
    ) -> None:
        given: dict[str, Any] = {
            "req_id": req_id,
            "prompt_length": prompt_length,
            "prompt_cluster_id": prompt_cluster_id,
            "decoder_cluster_id": decoder_cluster_id,
            "prefix_id": prefix_id,
        }
        with ArgumentChecks() as check:
            self._ids = {name: check.integer(name, value, U64) for name, value in given.items()}

    @property
    def is_placeholder(self) -> bool:
        """Whether it is an idle slot's placeholder."""
        return self.req_id == UINT64_MAX

    @override
    def __repr__(self) -> str:
        return f"LLMReq({', '.join(f'{name}={value}' for name, value in self._ids.items())})"


class LLMClusterInfo:
    """A peer and its address. One remote entry is needed: the PROMPT's address and listen port."""

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._local_ip_infos: list[tuple[int, int]] = []
        self._remote_ip_infos: list[tuple[int, int]] = []

    @property
    def remote_cluster_id(self) -> int | None:
        """Id of the peer; `None` until it is set."""
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, remote_cluster_id: int) -> None:
        with ArgumentChecks() as check:
            number = check.integer("remote_cluster_id", remote_cluster_id, U64)
        self._remote_cluster_id = number

    @property
    def local_ip_infos(self) -> tuple[tuple[int, int], ...]:
        """Own addresses, (ip as an integer, port); informational."""
        return tuple(self._local_ip_infos)

    @property
    def remote_ip_infos(self) -> tuple[tuple[int, int], ...]:
        """Addresses of the peer, (ip as an integer, port)."""
        return tuple(self._remote_ip_infos)

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Add an own address, in the forms of `append_remote_ip_info`."""
        self._local_ip_infos.append(_checked_address(ip, port))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address of the peer.

        Args:
            ip: IPv4, dotted, or as an integer in little-endian order: 1 is "1.0.0.0".
            port: that the PROMPT listens on.
        """
        self._remote_ip_infos.append(_checked_address(ip, port))


def dotted(ip: int) -> str:
    """Return the text of an address given as an integer in little-endian order."""
    return str(ipaddress.IPv4Address(ip.to_bytes(4, "little")))


def _checked_address(ip: object, port: object) -> tuple[int, int]:
    with ArgumentChecks() as check:
        if isinstance(ip, str):
            port_number = check.integer("port", port, U16)
            number = int.from_bytes(ipaddress.IPv4Address(ip).packed, "little")
        else:
            number = check.integer("ip", ip, U32)
            port_number = check.integer("port", port, U16)
    return number, port_number
