"""Quire on Ray Serve: `serve run quire.ray:app model=mini`, or `build_app` in Python.

`app` takes options by the names of the flags of `quire serve` and `quire route`, and those of `RayConfig`.
Ray places engines, restarts them, scales and updates them, and has the proxies that clients connect to. An
engine replica (`replica.py`) is an engine with its front, which listens on a port of its own. It replaces an
engine process that dies itself, and has Ray start another replica only when it gives up. An ingress replica
(`ingress.py`) is the router of `quire route`: it learns from Ray which engines there are (`engine_list.py`),
and from their KV events which prefixes they have cached. docs/many-machines.md has more.

It needs the extra `ray`, which `import quire` does not import.
"""

from __future__ import annotations

from quire.lazy_attributes import lazy_attributes

TYPE_CHECKING = False

if TYPE_CHECKING:
    from quire.ray.application import app, build_app
    from quire.ray.llm_server import QuireLLMServer

__all__ = ["QuireLLMServer", "app", "build_app"]

__getattr__, __dir__ = lazy_attributes(
    globals(),
    {
        "QuireLLMServer": "quire.ray.llm_server",
        "app": "quire.ray.application",
        "build_app": "quire.ray.application",
    },
)
