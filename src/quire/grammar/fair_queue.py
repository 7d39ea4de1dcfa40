"""Specifications that wait to be compiled: tenants take turns, and each has its own in the order it asked."""

from __future__ import annotations

from collections import OrderedDict

from quire.structured_outputs import StructuredOutputsParams


class FairQueue:
    """What is to be compiled next. A specification may stand in the queues of several tenants."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, dict[StructuredOutputsParams, None]] = OrderedDict()

    def push(self, tenant: str, spec: StructuredOutputsParams) -> None:
        """Add a specification behind those of its tenant."""
        self._by_tenant.setdefault(tenant, {})[spec] = None

    def pop(self) -> StructuredOutputsParams | None:
        """Take out the first specification of the tenant whose turn it is; None: nothing waits."""
        if not self._by_tenant:
            return None
        tenant, specs = self._by_tenant.popitem(last=False)
        spec = next(iter(specs))
        self.remove(spec)
        specs.pop(spec)
        if specs:
            self._by_tenant[tenant] = specs
        return spec

    def remove(self, spec: StructuredOutputsParams) -> None:
        """Take a specification out wherever it stands."""
        for tenant in [tenant for tenant, specs in self._by_tenant.items() if spec in specs]:
            del self._by_tenant[tenant][spec]
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]

    def clear(self) -> None:
        """Take everything out."""
        self._by_tenant.clear()
