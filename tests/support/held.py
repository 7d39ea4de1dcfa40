"""How much an object keeps: tests see that something forgets without knowing where it remembers."""

from __future__ import annotations

import collections
import gc
import types

CONTAINERS = (list, dict, set, tuple, collections.deque)
CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def num_held(root: object) -> int:
    """Return the number of entries of all containers that can be reached from `root`, itself left out.

    Code is not followed: what a function or a class reaches belongs to everybody.
    """
    seen, to_follow, num_entries = {id(root)}, [root], 0
    while to_follow:
        for found in gc.get_referents(to_follow.pop()):
            if id(found) not in seen and not isinstance(found, CODE):
                seen.add(id(found))
                to_follow.append(found)
                num_entries += len(found) if isinstance(found, CONTAINERS) else 0
    return num_entries
