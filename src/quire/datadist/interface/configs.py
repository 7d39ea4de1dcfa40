"""What a user sets, as objects that turn into the options of `LLMDataDist.init` and `add_model`."""

from __future__ import annotations

import ipaddress
import json
import re

from quire.datadist.argument_checks import OFFSET, TIMEOUT_MS, U16, ArgumentChecks, Bounds
from quire.datadist.enums import DataType
from quire.datadist.interface import option_keys

_I32_INDEX = Bounds(0, 2**31 - 1)
_SHAPE = re.compile(r"\s*-?\d+\s*(,\s*-?\d+\s*)*", re.ASCII)


class _Config:
    """Options of which some have properties."""

    def __init__(self) -> None:
        self._ge_options: dict[str, str] = {}

    @property
    def ge_options(self) -> dict[str, str]:
        """Further options; what the other properties set wins over equal keys here."""
        return dict(self._ge_options)

    @ge_options.setter
    def ge_options(self, ge_options: dict[str, str]) -> None:
        with ArgumentChecks() as check:
            self._ge_options = check.text_options("ge_options", ge_options)

    def _merged(self, options: dict[str, str | int | None]) -> dict[str, str]:
        """Return the options that are set, with booleans as "1" and "0"."""
        set_options = {
            key: str(int(value)) if isinstance(value, bool) else str(value)
            for key, value in options.items()
            if value is not None
        }
        return self._ge_options | set_options


class LLMConfig(_Config):
    """Options of `LLMDataDist.init`. What is not set is not in the options."""

    def __init__(self) -> None:
        super().__init__()
        self._listen_ip_info: str | None = None
        self._device_id: int | None = None
        self._sync_kv_timeout: int | None = None
        self._enable_cache_manager: bool | None = None
        self._enable_remote_cache_accessible: bool | None = None
        self._enable_switch_role: bool | None = None
        self._local_comm_res: str | None = None
        self._mem_pool_cfg: str | None = None
        self._transfer_backend: str | None = None
        self._link_total_time: int | None = None
        self._link_retry_count: int | None = None

    @property
    def listen_ip_info(self) -> str | None:
        """Where a PROMPT listens, "ip:port"; port 0 is any free one."""
        return self._listen_ip_info

    @listen_ip_info.setter
    def listen_ip_info(self, listen_ip_info: str) -> None:
        with ArgumentChecks() as check:
            check.instance("listen_ip_info", listen_ip_info, str)
        parse_address(listen_ip_info)
        self._listen_ip_info = listen_ip_info

    @property
    def device_id(self) -> int | None:
        """Index of the device; may also be set as a list or tuple that holds it alone."""
        return self._device_id

    @device_id.setter
    def device_id(self, device_id: int | list[int] | tuple[int, ...]) -> None:
        with ArgumentChecks() as check:
            given = device_id if isinstance(device_id, (list, tuple)) else [device_id]
            indices = check.integers("device_id", given, _I32_INDEX)
            check.require(len(indices) == 1, f"device_id has {len(indices)} devices; one object has one")
        self._device_id = indices[0]

    @property
    def sync_kv_timeout(self) -> int | None:
        """Time limit of a call that moves KV, in milliseconds; may also be set as a string of digits."""
        return self._sync_kv_timeout

    @sync_kv_timeout.setter
    def sync_kv_timeout(self, sync_kv_timeout: int | str) -> None:
        with ArgumentChecks() as check:
            value: object = sync_kv_timeout
            if isinstance(value, str):
                is_number = value.isascii() and value.isdigit()
                check.require(is_number, f"sync_kv_timeout is {value!r}, not a number of milliseconds")
                value = int(value) if is_number else TIMEOUT_MS.least
            timeout = check.integer("sync_kv_timeout", value, TIMEOUT_MS)
        self._sync_kv_timeout = timeout

    @property
    def enable_cache_manager(self) -> bool:
        """Whether `cache_manager` is used; it always can be."""
        return bool(self._enable_cache_manager)

    @enable_cache_manager.setter
    def enable_cache_manager(self, enable_cache_manager: bool) -> None:
        with ArgumentChecks() as check:
            check.instance("enable_cache_manager", enable_cache_manager, bool)
        self._enable_cache_manager = enable_cache_manager

    @property
    def enable_remote_cache_accessible(self) -> bool:
        """Whether peers reach caches by address; they never do."""
        return bool(self._enable_remote_cache_accessible)

    @enable_remote_cache_accessible.setter
    def enable_remote_cache_accessible(self, enable_remote_cache_accessible: bool) -> None:
        with ArgumentChecks() as check:
            check.instance("enable_remote_cache_accessible", enable_remote_cache_accessible, bool)
        self._enable_remote_cache_accessible = enable_remote_cache_accessible

    @property
    def enable_switch_role(self) -> bool:
        """Whether `switch_role` is used; it always can be."""
        return bool(self._enable_switch_role)

    @enable_switch_role.setter
    def enable_switch_role(self, enable_switch_role: bool) -> None:
        with ArgumentChecks() as check:
            check.instance("enable_switch_role", enable_switch_role, bool)
        self._enable_switch_role = enable_switch_role

    @property
    def local_comm_res(self) -> str | None:
        """What the device is connected to; for the option only."""
        return self._local_comm_res

    @local_comm_res.setter
    def local_comm_res(self, local_comm_res: str) -> None:
        with ArgumentChecks() as check:
            check.instance("local_comm_res", local_comm_res, str)
        self._local_comm_res = local_comm_res

    @property
    def mem_pool_cfg(self) -> str | None:
        """Of memory pools, as JSON; for the option only."""
        return self._mem_pool_cfg

    @mem_pool_cfg.setter
    def mem_pool_cfg(self, mem_pool_cfg: str) -> None:
        with ArgumentChecks() as check:
            check.instance("mem_pool_cfg", mem_pool_cfg, str)
            check.require(_is_json(mem_pool_cfg), f"mem_pool_cfg is {mem_pool_cfg!r:.80}, not JSON")
        self._mem_pool_cfg = mem_pool_cfg

    @property
    def transfer_backend(self) -> str | None:
        """Name of a backend; for the option only. `quire.transports` chooses."""
        return self._transfer_backend

    @transfer_backend.setter
    def transfer_backend(self, transfer_backend: str) -> None:
        with ArgumentChecks() as check:
            check.instance("transfer_backend", transfer_backend, str)
        self._transfer_backend = transfer_backend

    @property
    def link_total_time(self) -> int | None:
        """Time limit of linking; for the option only. `link_clusters` has a timeout."""
        return self._link_total_time

    @link_total_time.setter
    def link_total_time(self, link_total_time: int) -> None:
        with ArgumentChecks() as check:
            check.integer("link_total_time", link_total_time, _I32_INDEX)
        self._link_total_time = link_total_time

    @property
    def link_retry_count(self) -> int | None:
        """Number of attempts to link; for the option only."""
        return self._link_retry_count

    @link_retry_count.setter
    def link_retry_count(self, link_retry_count: int) -> None:
        with ArgumentChecks() as check:
            check.integer("link_retry_count", link_retry_count, _I32_INDEX)
        self._link_retry_count = link_retry_count

    def generate_options(self) -> dict[str, str]:
        """Return what was set, as options."""
        options = {
            option_keys.LISTEN_IP_INFO: self._listen_ip_info,
            option_keys.DEVICE_ID: self._device_id,
            option_keys.SYNC_KV_TIMEOUT: self._sync_kv_timeout,
            option_keys.ENABLE_CACHE_MANAGER: self._enable_cache_manager,
            option_keys.ENABLE_REMOTE_CACHE_ACCESSIBLE: self._enable_remote_cache_accessible,
            option_keys.ENABLE_SWITCH_ROLE: self._enable_switch_role,
            option_keys.LOCAL_COMM_RES: self._local_comm_res,
            option_keys.MEM_POOL_CFG: self._mem_pool_cfg,
            option_keys.TRANSFER_BACKEND: self._transfer_backend,
            option_keys.LINK_TOTAL_TIME: self._link_total_time,
            option_keys.LINK_RETRY_COUNT: self._link_retry_count,
        }
        return self._merged(options)


class ModelConfig(_Config):
    """Options of `LLMDataDist.add_model`. What is not set is not in the options."""

    def __init__(self) -> None:
        super().__init__()
        self._kv_shapes: list[str] | None = None
        self._kv_dtypes: list[DataType] | None = None
        self._kv_seq_len_dim_index: int | None = None
        self._enable_page_attention: bool | None = None
        self._enable_shared_system_prefix: bool | None = None
        self._om_paths: list[str] | None = None
        self._is_flow_model: bool | None = None

    @property
    def kv_shapes(self) -> list[str] | None:
        """Shape of each KV tensor, "d0,d1,..."; all equal."""
        return None if self._kv_shapes is None else list(self._kv_shapes)

    @kv_shapes.setter
    def kv_shapes(self, kv_shapes: list[str]) -> None:
        with ArgumentChecks() as check:
            shapes = check.items("kv_shapes", kv_shapes, str)
            for shape in shapes:
                check.require(
                    _SHAPE.fullmatch(shape) is not None, f"kv_shapes has {shape!r}, not 'd0,d1,...'"
                )
        self._kv_shapes = shapes

    @property
    def kv_dtypes(self) -> list[DataType] | None:
        """Data type of each KV tensor; all equal."""
        return None if self._kv_dtypes is None else list(self._kv_dtypes)

    @kv_dtypes.setter
    def kv_dtypes(self, kv_dtypes: list[DataType]) -> None:
        with ArgumentChecks() as check:
            self._kv_dtypes = check.items("kv_dtypes", kv_dtypes, DataType)

    @property
    def kv_seq_len_dim_index(self) -> int | None:
        """Dimension that counts tokens."""
        return self._kv_seq_len_dim_index

    @kv_seq_len_dim_index.setter
    def kv_seq_len_dim_index(self, kv_seq_len_dim_index: int) -> None:
        with ArgumentChecks() as check:
            index = check.integer("kv_seq_len_dim_index", kv_seq_len_dim_index, OFFSET)
        self._kv_seq_len_dim_index = index

    @property
    def enable_page_attention(self) -> bool:
        """Whether dimension 0 counts blocks that belong to no slot."""
        return bool(self._enable_page_attention)

    @enable_page_attention.setter
    def enable_page_attention(self, enable_page_attention: bool) -> None:
        with ArgumentChecks() as check:
            check.instance("enable_page_attention", enable_page_attention, bool)
        self._enable_page_attention = enable_page_attention

    @property
    def enable_shared_system_prefix(self) -> bool:
        """Whether prompts may begin with a prefix that was computed before."""
        return bool(self._enable_shared_system_prefix)

    @enable_shared_system_prefix.setter
    def enable_shared_system_prefix(self, enable_shared_system_prefix: bool) -> None:
        with ArgumentChecks() as check:
            check.instance("enable_shared_system_prefix", enable_shared_system_prefix, bool)
        self._enable_shared_system_prefix = enable_shared_system_prefix

    @property
    def om_paths(self) -> list[str] | None:
        """Files for a default runner."""
        return None if self._om_paths is None else list(self._om_paths)

    @om_paths.setter
    def om_paths(self, om_paths: list[str]) -> None:
        with ArgumentChecks() as check:
            self._om_paths = check.items("om_paths", om_paths, str)

    @property
    def is_flow_model(self) -> bool:
        """Whether `om_paths` is one path."""
        return bool(self._is_flow_model)

    @is_flow_model.setter
    def is_flow_model(self, is_flow_model: bool) -> None:
        with ArgumentChecks() as check:
            check.instance("is_flow_model", is_flow_model, bool)
        self._is_flow_model = is_flow_model

    def generate_options(self) -> dict[str, str]:
        """Return what was set, as options."""
        dtypes = self._kv_dtypes
        options = {
            option_keys.KV_SHAPES: None if self._kv_shapes is None else ";".join(self._kv_shapes),
            option_keys.KV_DTYPES: None if dtypes is None else ";".join(str(int(one)) for one in dtypes),
            option_keys.KV_SEQ_LEN_DIM_INDEX: self._kv_seq_len_dim_index,
            option_keys.ENABLE_PAGE_ATTENTION: self._enable_page_attention,
            option_keys.ENABLE_SHARED_SYSTEM_PREFIX: self._enable_shared_system_prefix,
            option_keys.OM_PATHS: None if self._om_paths is None else ";".join(self._om_paths),
            option_keys.IS_FLOW_MODEL: self._is_flow_model,
        }
        return self._merged(options)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def parse_address(text: str) -> tuple[str, int]:
    """Return ip and port of "ip:port"; raise `ValueError` if it is anything else."""
    ip, colon, port = text.partition(":")
    is_port = port.isascii() and port.isdigit() and int(port) <= U16.greatest
    if not colon or not is_port:
        raise ValueError(f"the address is {text!r}, not 'ip:port'")
    return str(ipaddress.IPv4Address(ip)), int(port)


LlmConfig = LLMConfig
