"""GET, POST and DELETE /route/engines: managing engines at run time."""

from __future__ import annotations

import msgspec

from quire.cluster.engines.registry import MAX_ENGINES, Engine, EngineState, Role
from quire.cluster.router import Router
from quire.config import engine_url
from quire.errors import ConfigError, InvalidRequestError
from quire.server.wire.errors import ApiError


class EngineChange(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST: an engine to add, to drain, or to stop draining."""

    url: str
    role: Role | None = None
    draining: bool = False


class ListedEngine(msgspec.Struct, kw_only=True):
    """One engine in the list."""

    url: str
    role: Role
    state: EngineState
    reason: str | None
    models: list[str]
    in_flight: int
    waiting_bytes: int


class EngineList(msgspec.Struct, kw_only=True):
    """Answer of all three methods."""

    object: str = "list"
    data: list[ListedEngine]


def list_engines(router: Router) -> EngineList:
    """Return all engines."""
    return EngineList(
        data=[
            ListedEngine(
                url=engine.url,
                role=engine.role,
                state=engine.state,
                reason=engine.failure,
                models=[card.id for card in (engine.models or {}).values()],
                in_flight=engine.num_requests,
                waiting_bytes=engine.num_waiting_bytes,
            )
            for engine in router.engines.by_url.values()
        ]
    )


async def change_engine(router: Router, body: bytes) -> None:
    """Add an engine, or change whether it drains (gets no new requests).

    Raises:
        InvalidRequestError: the body is not an `EngineChange`, or the change is not possible.
    """
    try:
        change = msgspec.json.decode(body, type=EngineChange)
        url = engine_url(change.url, "url")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f'the body is invalid: {error}; it must be like {{"url": "http://…", "role": "decode"}}'
        ) from None
    except ConfigError as error:
        raise InvalidRequestError(str(error), param="url") from None
    known = router.engines.by_url.get(url)
    engine = _new_engine(router, url, change.role) if known is None else known
    if change.role not in (None, engine.role):
        raise InvalidRequestError(
            f"role is {change.role!r}, but {url} is a {engine.role!r} engine; remove it first", param="role"
        )
    engine.is_draining = change.draining
    if known is None:
        await router.add(engine)


async def remove_engine(router: Router, url: str) -> None:
    """Remove an engine; its running requests continue.

    Raises:
        ApiError: 404, there is none with this URL.
    """
    engine = router.engines.by_url.get(url.rstrip("/"))
    if engine is None:
        known = ", ".join(router.engines.by_url) or "none"
        raise ApiError(404, f"there is no engine {url!r:.300}; the engines are: {known}", param="url")
    await router.remove(engine)


def _new_engine(router: Router, url: str, role: Role | None) -> Engine:
    if role is None:
        raise InvalidRequestError(
            f"role is missing, and {url} is new; it must be one of {', '.join(Role)}", param="role"
        )
    if len(router.engines.by_url) >= MAX_ENGINES:
        raise InvalidRequestError(f"there are {MAX_ENGINES} engines already, which is the limit", param="url")
    return Engine(url, role)
