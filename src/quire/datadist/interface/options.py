"""Parsing of the options of `LLMDataDist.init` and `add_model`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.enums import DataType, LLMRole
from quire.datadist.interface.configs import LLMConfig, ModelConfig, parse_address
from quire.datadist.status import invalid
from quire.datadist.transports.opening import DEFAULT_TRANSPORTS, transport_names
from quire.datadist.transports.tcp import MAX_STREAMS

POOL_SIZE = "ge.flowGraphMemMaxSize"
DEVICE = "quire.device"
TOKEN = "quire.token"
CHECKSUM = "quire.checksum"
TRANSPORTS = "quire.transports"
TCP_STREAMS = "quire.tcpStreams"

DEFAULT_TIMEOUT_MS = 1000
DEFAULT_TCP_STREAMS = 4

_MAX_I32 = 2**31 - 1
_MAX_I64 = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class InitOptions:
    """Options of `init`; unknown ones are ignored.

    Attributes:
        address: where this side listens, ip and port, or None.
        device: what `Placement.DEVICE` means.
        timeout: timeout of calls that move KV, in seconds.
        pool_bytes: maximum number of bytes of all caches, or None.
        token: that peers must have; empty: none.
        use_checksum: whether transfers are verified by checksums, except over shared memory.
        transports: names of allowed transports, in a PROMPT's order of preference.
        num_tcp_streams: maximum number of connections of a link.
    """

    address: tuple[str, int] | None
    device: torch.device
    timeout: float
    pool_bytes: int | None
    token: bytes
    use_checksum: bool
    transports: tuple[str, ...]
    num_tcp_streams: int

    @classmethod
    def read(cls, role: LLMRole, options: Mapping[str, str]) -> InitOptions:
        """Read options.

        Raises:
            LLMException: LLM_PARAM_INVALID, one that is required is missing, or one is malformed.
        """
        index = _integer(options, LLMConfig.device_id.key, 0, _MAX_I32)
        if index is None:
            raise invalid(f"{LLMConfig.device_id.key} is missing; set device_id")
        timeout_ms = _integer(options, LLMConfig.sync_kv_timeout.key, 1, _MAX_I32)
        num_streams = _integer(options, TCP_STREAMS, 1, MAX_STREAMS)
        return cls(
            address=listen_address(role, options),
            device=_device(options, index),
            timeout=(timeout_ms or DEFAULT_TIMEOUT_MS) / 1e3,
            pool_bytes=_integer(options, POOL_SIZE, 0, _MAX_I64),
            token=options.get(TOKEN, "").encode(),
            use_checksum=_boolean(options, CHECKSUM, default=True),
            transports=_transports(options),
            num_tcp_streams=num_streams or DEFAULT_TCP_STREAMS,
        )


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Options of `add_model`; unknown ones are ignored.

    Attributes:
        desc: description of the model's cache.
        seq_len_limit: maximum tokens of a prompt, or None.
        is_paged: whether the cache is a blocks cache.
        has_prefixes: whether prompts may begin with a precomputed prefix.
    """

    desc: CacheDesc
    seq_len_limit: int | None
    is_paged: bool
    has_prefixes: bool

    @classmethod
    def read(cls, options: Mapping[str, str]) -> ModelOptions:
        """Read options.

        Raises:
            LLMException: LLM_PARAM_INVALID, one that is required is missing, or one is malformed.
        """
        shapes = [_shape(text) for text in _items(options, ModelConfig.kv_shapes.key)]
        data_types = [_data_type(text) for text in _items(options, ModelConfig.kv_dtypes.key)]
        if len(shapes) != len(data_types):
            raise invalid(f"there are {len(shapes)} kv_shapes and {len(data_types)} kv_dtypes")
        if any(shape != shapes[0] for shape in shapes) or len(set(data_types)) != 1:
            raise invalid("kv_shapes must be equal, and kv_dtypes, too")
        is_paged = _boolean(options, ModelConfig.enable_page_attention.key, default=False)
        seq_len_dim = _integer(options, ModelConfig.kv_seq_len_dim_index.key, 0, len(shapes[0]) - 1)
        is_flow_model = _boolean(options, ModelConfig.is_flow_model.key, default=False)
        if is_flow_model and len(_items(options, ModelConfig.om_paths.key)) != 1:
            raise invalid("om_paths must have one path with is_flow_model")
        return cls(
            desc=CacheDesc(len(shapes), shapes[0], data_types[0]),
            seq_len_limit=None if seq_len_dim is None or is_paged else shapes[0][seq_len_dim],
            is_paged=is_paged,
            has_prefixes=_boolean(options, ModelConfig.enable_shared_system_prefix.key, default=False),
        )


def listen_address(role: LLMRole, options: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the ip and port to listen on: a PROMPT must listen, MIX may, a DECODER never does.

    Raises:
        LLMException: LLM_PARAM_INVALID, it is missing or malformed.
    """
    text = options.get(LLMConfig.listen_ip_info.key)
    if role is LLMRole.DECODER or (text is None and role is LLMRole.MIX):
        return None
    if text is None:
        raise invalid(f"{LLMConfig.listen_ip_info.key} is missing; a PROMPT needs listen_ip_info")
    try:
        return parse_address(text)
    except ValueError as error:
        raise invalid(f"{LLMConfig.listen_ip_info.key}: {error}") from error


def _integer(options: Mapping[str, str], key: str, least: int, greatest: int) -> int | None:
    text = options.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= greatest):
        raise invalid(f"{key} is {text!r}, not an integer in {least}..{greatest}")
    return int(text)


def _boolean(options: Mapping[str, str], key: str, *, default: bool) -> bool:
    text = options.get(key)
    if text not in (None, "0", "1"):
        raise invalid(f"{key} is {text!r}, not '0' or '1'")
    return default if text is None else text == "1"


def _transports(options: Mapping[str, str]) -> tuple[str, ...]:
    text = options.get(TRANSPORTS)
    try:
        return DEFAULT_TRANSPORTS if text is None else transport_names(text)
    except ValueError as error:
        raise invalid(f"{TRANSPORTS} {error}") from error


def _items(options: Mapping[str, str], key: str) -> list[str]:
    text = options.get(key)
    if not text:
        raise invalid(f"{key} is missing")
    return text.split(";")


def _shape(text: str) -> list[int]:
    try:
        shape = [int(dim) for dim in text.split(",")]
    except ValueError:
        raise invalid(f"{ModelConfig.kv_shapes.key} has {text!r}, not 'd0,d1,...'") from None
    if not all(1 <= dim <= _MAX_I64 for dim in shape):
        raise invalid(f"{ModelConfig.kv_shapes.key} has {text!r}, whose dimensions are not all positive")
    return shape


def _data_type(text: str) -> DataType:
    known = {str(int(one)): one for one in DataType}
    if text not in known:
        raise invalid(f"{ModelConfig.kv_dtypes.key} has {text!r}; the data types are {', '.join(known)}")
    return known[text]


def _device(options: Mapping[str, str], index: int) -> torch.device:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    name = options.get(DEVICE, default)
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda" or index >= torch.cuda.device_count():
        raise invalid(
            f"{DEVICE} is {name!r} and {LLMConfig.device_id.key} {index}; here are cpu and "
            f"{torch.cuda.device_count()} cuda devices"
        )
    return torch.device("cuda", index)
