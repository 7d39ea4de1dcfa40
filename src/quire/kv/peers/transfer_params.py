"""Parsing `kv_transfer_params`: lend the request's prompt, or read it from a peer."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from quire.errors import InvalidRequestError

TransferId = Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[!-~]+\Z")]
Address = tuple[str, int]


class LendingParams(msgspec.Struct, frozen=True):
    """The engine is to compute the prompt and lend its KV.

    Attributes:
        transfer_id: by which a peer may ask for it before there is an answer; None: the engine chooses one.
    """

    do_remote_decode: bool = False
    transfer_id: TransferId | None = None


class BorrowingParams(msgspec.Struct, frozen=True):
    """A peer lends the prompt's KV, or is about to.

    Attributes:
        remote_host: IPv4 address that the peer listens on.
        remote_port: its port.
        transfer_id: id of the loan.
        remote_engine_id: of the start of the peer that has answered; empty: it has not answered yet.
    """

    remote_host: Annotated[str, msgspec.Meta(max_length=15)]
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    transfer_id: TransferId
    remote_engine_id: Annotated[str, msgspec.Meta(max_length=16)] = ""
    do_remote_prefill: bool = False

    @property
    def address(self) -> Address:
        """Where the peer listens."""
        return self.remote_host, self.remote_port


P = TypeVar("P", LendingParams, BorrowingParams)


def lending_params(params: Mapping[str, Any] | None) -> LendingParams | None:
    """Return what a request says about lending; None: nothing.

    Raises:
        InvalidRequestError: a value is invalid.
    """
    if not params or not params.get("do_remote_decode"):
        return None
    return _converted(params, LendingParams)


def borrowing_params(params: Mapping[str, Any] | None) -> BorrowingParams | None:
    """Return what a request says about reading from a peer; None: nothing.

    Raises:
        InvalidRequestError: a value is invalid.
    """
    if not params or not params.get("do_remote_prefill"):
        return None
    read = _converted(params, BorrowingParams)
    try:
        ipaddress.IPv4Address(read.remote_host)
    except ValueError as error:
        raise InvalidRequestError(
            f"remote_host is {read.remote_host!r}, not an IPv4 address", param="kv_transfer_params"
        ) from error
    return read


def _converted(params: Mapping[str, Any], kind: type[P]) -> P:
    """Return the parameters of a kind; null is the same as left out, as other engines' proxies write it."""
    try:
        return msgspec.convert({name: value for name, value in params.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(
            f"kv_transfer_params is invalid: {error}", param="kv_transfer_params"
        ) from error
