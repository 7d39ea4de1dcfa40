"""Policies that are built in but for their calls that fail, when told to: they raise, or return nonsense."""

from __future__ import annotations

from quire.config import SchedulerConfig
from quire.kv.blocks.retention import RETENTIONS
from quire.scheduling.policies import ADMISSIONS, ORDERS, VICTIMS

METHODS = {  # of each policy by the field that chooses it: those that are asked, and those that are told
    "policy": (
        ORDERS,
        ("key", "lane", "lane_key", "running_key", "changed_lanes"),
        ("queued", "unqueued", "admitted", "left"),
    ),
    "admission": (ADMISSIONS, ("admits",), ("left",)),
    "victim": (VICTIMS, ("choose",), ()),
    "prefix_retention": (RETENTIONS, ("rank",), ()),
}
NONSENSE = (None, "text", -1, 10**9, 0.5, float("nan"), (), (1, "text"), (float("nan"),), [1], {}, object())


class Fault:
    """What the next call of a method does instead of what it should: `what` is returned, or raised."""

    def __init__(self, method: str, what: object) -> None:
        self.method = method
        self.what = what


def misbehaving(built_in: type, asked: tuple[str, ...], told: tuple[str, ...]) -> type:
    """Return a subclass whose methods fail as its attribute `fault` says, once."""

    def failing(name: str):
        def method(self, *arguments):
            fault, answer = self.fault, getattr(super(policy, self), name)(*arguments)
            if fault is None or fault.method != name:
                return answer
            type(self).fault = None
            if isinstance(fault.what, Exception):
                raise fault.what
            return fault.what

        return method

    methods = {name: failing(name) for name in asked + told}
    namespace = {"fault": None, "asked": asked, "told": told, **methods}
    policy = type(f"Misbehaving{built_in.__name__}", (built_in,), namespace)
    return policy


def misbehaving_policies(config: SchedulerConfig) -> dict[str, type]:
    """Return, for each field that chooses a policy, the chosen one as one that fails when told to."""
    return {
        field: misbehaving(registry.class_of(getattr(config, field)), asked, told)
        for field, (registry, asked, told) in METHODS.items()
    }
