"""The ingress on Ray Serve: the router of `quire route`, which learns its engines from Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.cluster.app import create_app
from quire.cluster.engines.registry import MAX_ENGINES, Engine, Role
from quire.cluster.router import Router
from quire.config import RouterConfig
from quire.server.http.listening import bound_socket
from quire.server.http.server import HttpServer

Replicas = Sequence[Mapping[str, Any]]
"""What running replicas say of themselves, see `QuireServer.record_replica_metadata`."""

_listeners: dict[str, Callable[[Replicas], None]] = {}  # by the name of the deployment


def announce(name: str, replicas: Replicas) -> None:
    """Tell this process's ingress, if there is one, which replicas of a deployment are running."""
    if (listener := _listeners.get(name)) is not None:
        listener(replicas)


class EngineUpdates:
    """Makes a router's engines those that Ray runs, one change at a time.

    Args:
        router: the router.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._replicas: dict[str, Replicas] = {}  # by deployment
        self._changed = asyncio.Event()

    def note(self, name: str, replicas: Replicas) -> None:
        """Note which replicas of a deployment are running."""
        self._replicas[name] = replicas
        self._changed.set()

    async def run(self) -> None:
        """Change the router's engines after each note, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.apply()

    async def apply(self) -> None:
        """Remove the engines that have ended, whose running requests go on, and add new ones."""
        replicas = [one for of_one in self._replicas.values() for one in of_one if one]
        wanted = {one["url"]: Engine(one["url"], Role(one["role"]), one["key"]) for one in replicas}
        engines = self._router.engines.by_url
        for url, engine in list(engines.items()):
            if url not in wanted or engine.key != wanted[url].key:
                await self._router.remove(engine)
        new = [engine for url, engine in wanted.items() if url not in engines]
        room = MAX_ENGINES - len(engines)
        await asyncio.gather(*map(self._router.add, new[:room]))


class QuireIngress:
    """A replica of the ingress.

    Args:
        config: configuration of the router; it names no engines.
        engines: handles of the engines' deployments.
        port: where it listens itself, beside Ray's proxies, at the node's address; 0: nowhere.
        models: names of the models that the engines serve.

    Raises:
        ConfigError: it cannot listen there.
    """

    async def __init__(  # type: ignore[misc]
        self,
        config: RouterConfig,
        engines: Sequence[DeploymentHandle],
        port: int = 0,
        *,
        models: Sequence[str] = (),
    ) -> None:
        async with contextlib.AsyncExitStack() as stack:
            self._router = Router(config, models)
            stack.push_async_callback(self._router.close)
            loop = asyncio.get_running_loop()
            updates = EngineUpdates(self._router)
            for handle in engines:
                name = handle.deployment_name

                def listen(replicas: Replicas, name: str = name) -> None:
                    loop.call_soon_threadsafe(updates.note, name, replicas)

                _listeners[name] = listen
                stack.callback(_listeners.pop, name)
                handle.options(method_name="check_health")  # from now on, Ray tells this process its replicas
            self._updating = asyncio.create_task(updates.run())
            stack.callback(self._updating.cancel)
            self._app = create_app(self._router, changes_engines=False)
            if port:
                # During an update, the new replica listens there before the old one has ended.
                bound = bound_socket(ray.util.get_node_ip_address(), port, shared=True)
                stack.enter_context(contextlib.closing(bound))
                await stack.enter_async_context(HttpServer(self._app, config.connections).serving(bound))
            self._running = stack.pop_all()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application: that of `quire route`."""
        return _Application(self._app)

    async def check_health(self) -> None:
        """Return if it follows which engines there are; otherwise raise what went wrong."""
        if self._updating.done():
            self._updating.result()

    async def __del__(self) -> None:
        """Close it, once its requests have ended or `drain_timeout` has passed."""
        self._router.calls.begin_drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._router.config.drain_timeout):
                await self._router.calls.wait_idle()
        self._router.stop_serving()
        await self._running.aclose()


class _Application:
    """ASGI application: the router's, for Ray, which has a lifespan and may prefix paths.

    Args:
        app: the router's application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._lifespan = Starlette()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        if prefix := scope.get("root_path", ""):  # the route prefix, which engines do not know
            path = scope["path"].removeprefix(prefix) or "/"
            raw_path = scope["raw_path"].removeprefix(prefix.encode()) or b"/"
            scope = {**scope, "root_path": "", "path": path, "raw_path": raw_path}
        await self._app(scope, receive, send)
