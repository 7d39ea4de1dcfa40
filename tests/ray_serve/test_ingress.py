"""The ingress's engines are the replicas that Ray runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.cluster.engines.registry import MAX_ENGINES, Engine

pytest.importorskip("ray.serve", reason="Ray is not installed; make test-ray installs it")

from quire.ray.ingress import EngineUpdates


class Router:
    """A router that notes its changes."""

    def __init__(self) -> None:
        self.engines = SimpleNamespace(by_url={})
        self.changes: list[str] = []

    async def add(self, engine: Engine) -> None:
        self.engines.by_url[engine.url] = engine
        self.changes.append(f"+{engine.url} {engine.role}")

    async def remove(self, engine: Engine) -> None:
        del self.engines.by_url[engine.url]
        self.changes.append(f"-{engine.url}")


def replica(url: str, role: str = "both", key: str = "") -> dict[str, Any]:
    return {"url": url, "role": role, "model": "mini", "key": key}


async def test_replicas_come_and_go() -> None:
    router: Any = Router()
    updates = EngineUpdates(router)
    updates.note("Prefill", [replica("a", "prefill")])
    updates.note("Decode", [replica("b", "decode"), replica("c", "decode")])
    await updates.apply()
    assert router.changes == ["+a prefill", "+b decode", "+c decode"]
    router.changes.clear()
    updates.note("Decode", [replica("c", "decode"), replica("d", "decode")])
    await updates.apply()
    assert router.changes == ["-b", "+d decode"]
    router.changes.clear()
    updates.note("Decode", [replica("d", "decode"), replica("c", "decode")])
    updates.note("Prefill", [])
    await updates.apply()
    assert router.changes == ["-a"]


async def test_a_new_replica_at_an_old_address_is_a_new_engine() -> None:
    router: Any = Router()
    updates = EngineUpdates(router)
    updates.note("Engine", [replica("a", key="1")])
    await updates.apply()
    updates.note("Engine", [replica("a", key="2")])
    await updates.apply()
    assert router.changes == ["+a both", "-a", "+a both"]
    assert router.engines.by_url["a"].key == "2"


async def test_a_replica_that_says_nothing_is_none() -> None:
    router: Any = Router()
    updates = EngineUpdates(router)
    updates.note("Engine", [{}, replica("a")])
    await updates.apply()
    assert router.changes == ["+a both"]


async def test_the_router_takes_so_many_engines_and_no_more() -> None:
    router: Any = Router()
    updates = EngineUpdates(router)
    updates.note("Engine", [replica(str(number)) for number in range(MAX_ENGINES + 3)])
    await updates.apply()
    assert len(router.engines.by_url) == MAX_ENGINES
