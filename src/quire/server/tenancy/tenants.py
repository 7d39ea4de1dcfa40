"""Tenants: lookup by API key, and isolation between them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from quire.config import TenantConfig
from quire.errors import ConfigError
from quire.server.tenancy.api_keys import digests_of, key_digest, presented_keys
from quire.server.tenancy.key_file import DEFAULT_TENANT, KeyFile, file_state, read_key_file
from quire.server.tenancy.limits import TenantUsage
from quire.server.tenancy.metrics import TenantFigures
from quire.server.wire.errors import ApiError

logger = logging.getLogger(__name__)

WATCH_INTERVAL = 2.0
"""Interval of checks for a changed key file, in seconds."""


class Tenant:
    """A tenant; it stays the same object when the key file is reloaded.

    Args:
        config: its entry in the key file.
        is_separate: whether it is isolated from other tenants.
    """

    def __init__(self, config: TenantConfig, *, is_separate: bool) -> None:
        self._config = config
        self.is_separate = is_separate
        self.usage = TenantUsage(config)
        self.figures = TenantFigures()

    @property
    def config(self) -> TenantConfig:
        """The tenant's entry in the key file."""
        return self._config

    @config.setter
    def config(self, config: TenantConfig) -> None:
        self._config = config
        self.usage.configure(config)

    @property
    def name(self) -> str:
        """Name in the key file; empty if keys name no tenants."""
        return self.config.name if self.is_separate else ""

    @property
    def sees_all(self) -> bool:
        """Whether it may see the requests of all tenants."""
        return self.config.admin or not self.is_separate

    def request_options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of `RequestOptions` for a request, given the client's.

        The client's `user` does not affect a separate tenant's share, which several users would enlarge.
        """
        if not self.is_separate:
            return given
        own: dict[str, Any] = {"tenant": self.name, "tenant_weight": self.config.weight}
        own["cache_salt"] = self.cache_salt(given.get("cache_salt", ""))
        if self.config.max_pin_time and "pin_prefix" in given:
            own["pin_prefix"] = min(given["pin_prefix"], self.config.max_pin_time)
        return given | own

    def require_kv_transfer(self, what: str, param: str | None = None) -> None:
        """Raise `ApiError` 403 unless the tenant may send kv_transfer_params.

        Args:
            what: what the request asks for.
            param: the body's field that asks for it; None: none.
        """
        if self.is_separate and not self.config.kv_transfer:
            raise ApiError(
                403,
                f"{what} is for routers: the tenant {self.name!r} has no kv_transfer in the "
                "server's key file",
                param=param,
                code="not_permitted",
            )

    def sees(self, engine_id: str) -> bool:
        """Whether the tenant may see the call with this id (`engine_id`)."""
        return self.sees_all or engine_id.startswith(f"{self.name}:")

    def cache_salt(self, salt: str) -> str:
        """Return a request's cache salt from the client's, unique to the tenant or its cache group."""
        if not self.is_separate:
            return salt
        group = self.config.cache_group
        digest = blake2b(digest_size=16)
        for part in ("group" if group else "tenant", group or self.name, salt):
            digest.update(len(part.encode()).to_bytes(4, "little") + part.encode())
        return digest.hexdigest()

    def engine_id(self, call_id: str) -> str:
        """Return a call's id, unique across tenants."""
        return f"{self.name}:{call_id}" if self.is_separate else call_id

    def call_id(self, engine_id: str) -> str:
        """Return a call's id for the tenant; for an admin, those of other tenants include the name."""
        return engine_id.removeprefix(f"{self.name}:") if self.is_separate else engine_id


class Tenants:
    """The tenants of a server, by their keys.

    With a key file, tenants are separate, and the keys of `api_key` belong to the operator's tenant. Without
    one, all requests have the same tenant, with or without a key.

    Args:
        api_key: space-separated keys.
        path: path of the key file; empty: there is none.

    Raises:
        ConfigError: the key file cannot be read, or is invalid.
    """

    def __init__(self, api_key: str, path: str = "") -> None:
        self._path = path
        self._own_digests = digests_of(api_key)
        self._state = file_state(self._path) if self._path else None
        is_separate = bool(self._path)
        self._default = Tenant(TenantConfig(name=DEFAULT_TENANT, admin=True), is_separate=is_separate)
        self._by_name: dict[str, Tenant] = {}
        self._by_digest: Mapping[bytes, Tenant] = dict.fromkeys(self._own_digests, self._default)
        if is_separate:
            self._take(read_key_file(self._path))

    @property
    def are_separate(self) -> bool:
        """Whether there is a key file."""
        return bool(self._path)

    @property
    def needs_key(self) -> bool:
        """Whether requests need a key."""
        return bool(self._by_digest)

    @property
    def default(self) -> Tenant:
        """The tenant of requests without a key."""
        return self._default

    @property
    def separate(self) -> tuple[Tenant, ...]:
        """The separate tenants: those of the key file, and the operator's if it has keys."""
        own = (self._default,) if self._own_digests else ()
        return (*self._by_name.values(), *own) if self.are_separate else ()

    def of_headers(self, headers: Mapping[str, str]) -> Tenant | None:
        """Return the tenant of a request with these headers (names in lower case); None: no valid key."""
        given = (headers.get(name, "").encode("latin-1") for name in ("authorization", "x-api-key"))
        return next(filter(None, map(self.of_key, presented_keys(*given))), None)

    def of_name(self, name: str) -> Tenant | None:
        """Return the tenant of this name; None: it does not exist."""
        return self._default if name == self._default.name else self._by_name.get(name)

    def of_key(self, key: bytes) -> Tenant | None:
        """Return the tenant of a key; None: the key is invalid."""
        return self._by_digest.get(key_digest(key))

    async def watch(self, reload_now: asyncio.Event) -> None:
        """Reload the key file whenever it changes or `reload_now` is set; never returns."""
        while True:
            try:
                async with asyncio.timeout(WATCH_INTERVAL):
                    await reload_now.wait()
            except TimeoutError:
                pass
            is_forced = reload_now.is_set()
            reload_now.clear()
            await self.reload(is_forced=is_forced)

    async def reload(self, *, is_forced: bool = False) -> None:
        """Reload the key file if it has changed or `is_forced`; an invalid one changes nothing."""
        state = file_state(self._path)
        if state == self._state and not is_forced:
            return
        self._state = state
        try:
            self._take(await asyncio.to_thread(read_key_file, self._path))
        except ConfigError as error:
            logger.error("the API keys are unchanged, because of an error in the new file: %s", error)
        else:
            logger.warning("api_keys_file %s was reloaded: %d tenants", self._path, len(self._by_name))

    def _take(self, file: KeyFile) -> None:
        """Replace the tenants by those of the file; tenants in both keep their objects."""
        by_name: dict[str, Tenant] = {}
        for name, config in file.tenants.items():
            by_name[name] = tenant = self._by_name.get(name) or Tenant(config, is_separate=True)
            tenant.config = config
        self._by_name = by_name
        self._by_digest = dict.fromkeys(self._own_digests, self._default) | {
            digest: by_name[name] for digest, name in file.names.items()
        }
