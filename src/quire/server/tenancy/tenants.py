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
    """A tenant, as requests see it; it stays the same object when the key file is read again.

    Args:
        config: from the key file.
        is_separate: whether its requests are kept apart from other tenants'.
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
        """Whether it sees the requests of every tenant."""
        return self.config.admin or not self.is_separate

    def request_options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of `RequestOptions` for a request whose client gives some of them.

        The client's `user` says nothing about a separate tenant's share: it would get more by naming several.
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
            what: it has asked for.
            param: which says so in the body; None: none does.
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
        """Whether it may see the call with this id (`engine_id`)."""
        return self.sees_all or engine_id.startswith(f"{self.name}:")

    def cache_salt(self, salt: str) -> str:
        """Return the salt of a request whose client gives `salt`; no other tenant can have the same."""
        if not self.is_separate:
            return salt
        group = self.config.cache_group
        digest = blake2b(digest_size=16)
        for part in ("group" if group else "tenant", group or self.name, salt):
            digest.update(len(part.encode()).to_bytes(4, "little") + part.encode())
        return digest.hexdigest()

    def engine_id(self, call_id: str) -> str:
        """Return a call's id as no other tenant's call has it, since two may choose the same."""
        return f"{self.name}:{call_id}" if self.is_separate else call_id

    def call_id(self, engine_id: str) -> str:
        """Return the id by which the tenant knows a call: an admin's has the other tenant's name."""
        return engine_id.removeprefix(f"{self.name}:") if self.is_separate else engine_id


class Tenants:
    """The tenants of a server, by their keys.

    With a key file, tenants are separate, and the keys of `api_key` belong to one more, the operator's.
    Without, all requests have one tenant, whether a key is asked for or not.

    Args:
        api_key: keys, separated by spaces.
        path: of the key file; empty: there is none.

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
        """Those that are kept apart: of the key file at present, and the operator's if that has keys."""
        own = (self._default,) if self._own_digests else ()
        return (*self._by_name.values(), *own) if self.are_separate else ()

    def of_headers(self, headers: Mapping[str, str]) -> Tenant | None:
        """Return whose request has these headers (names in lower case); None: no key in them is valid."""
        given = (headers.get(name, "").encode("latin-1") for name in ("authorization", "x-api-key"))
        return next(filter(None, map(self.of_key, presented_keys(*given))), None)

    def of_name(self, name: str) -> Tenant | None:
        """Return the tenant of a name; None: it is not there, or not any more."""
        return self._default if name == self._default.name else self._by_name.get(name)

    def of_key(self, key: bytes) -> Tenant | None:
        """Return the tenant that a key belongs to; None: the key is not valid."""
        return self._by_digest.get(key_digest(key))

    async def watch(self, reload_now: asyncio.Event) -> None:
        """Read the key file again whenever it changes, or `reload_now` is set; never returns."""
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
        """Read the key file again if it has changed, or `is_forced`; if it is invalid, all stays as it is."""
        state = file_state(self._path)
        if state == self._state and not is_forced:
            return
        self._state = state
        try:
            self._take(await asyncio.to_thread(read_key_file, self._path))
        except ConfigError as error:
            logger.error("the API keys stay as they are, because of an error in the new file: %s", error)
        else:
            logger.warning("api_keys_file %s was read again: %d tenants", self._path, len(self._by_name))

    def _take(self, file: KeyFile) -> None:
        """Let the tenants of the file be those of the server; who is in both goes on."""
        by_name: dict[str, Tenant] = {}
        for name, config in file.tenants.items():
            by_name[name] = tenant = self._by_name.get(name) or Tenant(config, is_separate=True)
            tenant.config = config
        self._by_name = by_name
        self._by_digest = dict.fromkeys(self._own_digests, self._default) | {
            digest: by_name[name] for digest, name in file.names.items()
        }
