"""What an object holds on to: every Python object that can be reached from it, and their size."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable

from mixed_world import World

from quire.request import Request

_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)


def reachable(root: object, without: Iterable[object]) -> list[object]:
    """Return all objects that `root` leads to, not through classes, functions, modules or `without`."""
    seen = {id(one) for one in without}
    found, to_visit = [], [root]
    while to_visit:
        one = to_visit.pop()
        if id(one) in seen or isinstance(one, _SHARED):
            continue
        seen.add(id(one))
        found.append(one)
        to_visit += gc.get_referents(one)
    return found


def held_by_scheduler(world: World) -> list[object]:
    """Return what the scheduler and its connector hold, apart from what the tests themselves keep."""
    ours = [world, world.runner, world.events, world.compiler, world.config]
    if world.connector is not None:
        ours.append(world.connector.store)
    return reachable(world.scheduler, ours)


def num_bytes(objects: list[object]) -> int:
    return sum(map(sys.getsizeof, objects))


def requests_among(objects: list[object]) -> list[Request]:
    return [one for one in objects if isinstance(one, Request)]
