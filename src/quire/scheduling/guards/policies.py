"""Policies that are not built in, each behind a guard: one that fails is replaced by the default for good.

A policy fails if it raises or returns an invalid value. The default then makes this decision too, so that a
fault in a policy costs no request anything.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Collection, Hashable
from numbers import Real
from typing import Any, Generic, TypeVar

import numpy as np
from typing_extensions import override

from quire.config import SchedulerConfig
from quire.request import Request
from quire.scheduling.policies import ADMISSIONS, ORDERS, VICTIMS
from quire.scheduling.policies.admission import AdmissionPolicy, Candidate, MemoryView, Reserve
from quire.scheduling.policies.order import FirstComeFirstServed, OrderKey, QueueOrder
from quire.scheduling.policies.victim import Last, RunningView, VictimPolicy

logger = logging.getLogger(__name__)

PolicyT = TypeVar("PolicyT")
AnswerT = TypeVar("AnswerT")


class Guard(Generic[PolicyT]):
    """Asks a policy until it fails, and the default from then on.

    Args:
        field: the configuration field that chooses the policy, such as "SchedulerConfig.policy".
        policy: may fail.
        default: takes its place; it must not depend on what came before.
        on_replaced: called when it does.
    """

    def __init__(
        self, field: str, policy: PolicyT, default: PolicyT, on_replaced: Callable[[], None]
    ) -> None:
        self.is_replaced = False
        self._on_replaced = on_replaced
        self._field = field
        self._policy = policy
        self._default = default

    def ask(self, method: str, checked: Callable[[Any], AnswerT], *arguments: object) -> AnswerT:
        """Return what a method of the policy returns, as `checked` does, which raises if it is invalid."""
        if not self.is_replaced:
            try:
                return checked(getattr(self._policy, method)(*arguments))
            except Exception:
                self.is_replaced = True
                self._on_replaced()
                logger.exception(
                    "%s %s failed in %s(); until the engine ends, %s takes its place",
                    self._field,
                    type(self._policy).__qualname__,
                    method,
                    type(self._default).__name__,
                )
        answer: AnswerT = getattr(self._default, method)(*arguments)
        return answer


class GuardedOrder(QueueOrder):
    """A queue order that never raises. Its keys change when the order is replaced."""

    def __init__(self, guard: Guard[QueueOrder], default: QueueOrder, *, reads_priority: bool) -> None:
        super().__init__(config=default.config, find_cached=default.find_cached)
        self._guard = guard
        self.reads_priority = reads_priority

    @property
    @override
    def is_replaced(self) -> bool:
        return self._guard.is_replaced

    @override
    def key(self, request: Request) -> OrderKey:
        return self._guard.ask("key", _key, request)

    @override
    def lane(self, request: Request) -> Hashable:
        return self._guard.ask("lane", _lane, request)

    @override
    def lane_key(self, request: Request) -> OrderKey:
        return self._guard.ask("lane_key", _key, request)

    @override
    def running_key(self, request: Request) -> OrderKey:
        return self._guard.ask("running_key", _key, request)

    @override
    def changed_lanes(self) -> Collection[Hashable] | None:
        return self._guard.ask("changed_lanes", _lanes)

    @override
    def queued(self, request: Request) -> None:
        self._guard.ask("queued", _nothing, request)

    @override
    def unqueued(self, request: Request) -> None:
        self._guard.ask("unqueued", _nothing, request)

    @override
    def admitted(self, request: Request) -> None:
        self._guard.ask("admitted", _nothing, request)

    @override
    def left(self, request: Request) -> None:
        self._guard.ask("left", _nothing, request)


class GuardedAdmission(AdmissionPolicy):
    """An admission policy that never raises."""

    def __init__(self, guard: Guard[AdmissionPolicy], config: SchedulerConfig) -> None:
        super().__init__(config=config)
        self._guard = guard

    @override
    def admits(self, candidate: Candidate, memory: MemoryView) -> bool:
        return self._guard.ask("admits", _bool, candidate, memory)

    @override
    def left(self, request: Request) -> None:
        self._guard.ask("left", _nothing, request)


class GuardedVictim(VictimPolicy):
    """A victim policy that never raises."""

    def __init__(self, guard: Guard[VictimPolicy]) -> None:
        self._guard = guard

    @override
    def choose(self, running: RunningView) -> int:
        num_candidates = len(running.num_tokens)

        def index(answer: Any) -> int:
            chosen = operator.index(answer)
            if not 0 <= chosen < num_candidates:
                raise ValueError(f"it chose {chosen} of {num_candidates} requests, which count from 0")
            return chosen

        return self._guard.ask("choose", index, running)


def build_order(
    config: SchedulerConfig, find_cached: Callable[[Request], int], on_replaced: Callable[[], None]
) -> QueueOrder:
    """Return the order of `SchedulerConfig.policy`, behind a guard unless it is built in.

    Raises:
        ConfigError: there is none of that name.
    """
    order = ORDERS.build(config.policy, config=config, find_cached=find_cached)
    if ORDERS.has(order):
        return order
    default = FirstComeFirstServed(config=config, find_cached=find_cached)
    guard = Guard(ORDERS.field, order, default, on_replaced)
    return GuardedOrder(guard, default, reads_priority=bool(order.reads_priority))


def build_admission(config: SchedulerConfig, on_replaced: Callable[[], None]) -> AdmissionPolicy:
    """Return the policy of `SchedulerConfig.admission`, behind a guard unless it is built in.

    Raises:
        ConfigError: there is none of that name.
    """
    policy = ADMISSIONS.build(config.admission, config=config)
    if ADMISSIONS.has(policy):
        return policy
    return GuardedAdmission(Guard(ADMISSIONS.field, policy, Reserve(config=config), on_replaced), config)


def build_victim(config: SchedulerConfig, on_replaced: Callable[[], None]) -> VictimPolicy:
    """Return the policy of `SchedulerConfig.victim`, behind a guard unless it is built in.

    Raises:
        ConfigError: there is none of that name.
    """
    policy = VICTIMS.build(config.victim)
    return policy if VICTIMS.has(policy) else GuardedVictim(Guard(VICTIMS.field, policy, Last(), on_replaced))


def _nothing(answer: object) -> None:
    """Take any answer: none is used."""


def _bool(answer: object) -> bool:
    if not isinstance(answer, (bool, np.bool_)):
        raise TypeError(f"it returned {type(answer).__name__}, not bool")
    return bool(answer)


def _key(answer: object) -> OrderKey:
    """Return a key that can be compared with every other."""
    if not isinstance(answer, tuple):
        raise TypeError(f"it returned {type(answer).__name__}, not a tuple of numbers")
    for number in answer:
        if not isinstance(number, Real) or math.isnan(number):
            raise TypeError(f"it returned {answer!r}, which is not a tuple of numbers")
    return answer


def _lane(answer: Hashable) -> Hashable:
    hash(answer)
    return answer


def _lanes(answer: Collection[Hashable] | None) -> Collection[Hashable] | None:
    return None if answer is None else frozenset(answer)
