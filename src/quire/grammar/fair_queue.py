"""Specifications that wait to be compiled: tenants take turns, and so do the smallest and oldest of each."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict

from quire.structured_outputs import StructuredOutputsParams


class FairQueue:
    """What is to be compiled next. A specification may stand in the queues of several tenants.

    Of a tenant's own, every other one is the smallest, so that small ones do not wait behind many that are
    large, and the rest are the oldest, so that none waits for ever.
    """

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, _TenantQueue] = OrderedDict()

    def push(self, tenant: str, spec: StructuredOutputsParams) -> None:
        """Add a specification to those of its tenant."""
        self._by_tenant.setdefault(tenant, _TenantQueue()).push(spec)

    def pop(self) -> StructuredOutputsParams | None:
        """Take out the next specification of the tenant whose turn it is; None: nothing waits."""
        if not self._by_tenant:
            return None
        tenant, queue = self._by_tenant.popitem(last=False)
        spec = queue.pop()
        self.remove(spec)
        if queue.specs:
            self._by_tenant[tenant] = queue
        return spec

    def remove(self, spec: StructuredOutputsParams) -> None:
        """Take a specification out wherever it stands."""
        for tenant in [tenant for tenant, queue in self._by_tenant.items() if spec in queue.specs]:
            del self._by_tenant[tenant].specs[spec]
            if not self._by_tenant[tenant].specs:
                del self._by_tenant[tenant]

    def clear(self) -> None:
        """Take everything out."""
        self._by_tenant.clear()


class _TenantQueue:
    """The specifications of one tenant, never empty between calls of `FairQueue`."""

    def __init__(self) -> None:
        self.specs: dict[StructuredOutputsParams, None] = {}  # the oldest first
        self._by_size: list[tuple[int, int, StructuredOutputsParams]] = []  # a heap; some are gone
        self._counter = itertools.count()
        self._takes_smallest = True

    def push(self, spec: StructuredOutputsParams) -> None:
        self.specs[spec] = None
        heapq.heappush(self._by_size, (_num_characters(spec), next(self._counter), spec))

    def pop(self) -> StructuredOutputsParams:
        while self._by_size[0][2] not in self.specs:
            heapq.heappop(self._by_size)
        spec = self._by_size[0][2] if self._takes_smallest else next(iter(self.specs))
        self._takes_smallest = not self._takes_smallest
        del self.specs[spec]
        return spec


def _num_characters(spec: StructuredOutputsParams) -> int:
    values = (spec.json, spec.regex, spec.choice, spec.grammar)
    return sum(sum(map(len, value)) for value in values if value is not None)
