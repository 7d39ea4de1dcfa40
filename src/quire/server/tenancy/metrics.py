"""Prometheus metrics of each tenant."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from quire.server.tenancy.tenants import Tenants


@dataclasses.dataclass(slots=True)
class TenantFigures:
    """Counters of one tenant's requests (one per prompt of a call) and tokens.

    Attributes:
        num_requests: requests sent to the engine, or waiting to be.
        num_waiting: live requests without a token so far.
        num_running: live requests with a token.
        num_prompt_tokens: prompt tokens of answered requests.
        num_generated_tokens: generated tokens of all requests.
    """

    num_requests: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0


_COUNTERS = (
    (
        "num_requests",
        "quire_tenant_requests",
        "Number of requests of a tenant, counting each prompt of a call.",
    ),
    ("num_prompt_tokens", "quire_tenant_prompt_tokens", "Number of prompt tokens of answered requests."),
    ("num_generated_tokens", "quire_tenant_generation_tokens", "Number of generated tokens."),
)
_GAUGES = (
    ("num_waiting", "quire_tenant_requests_waiting", "Number of requests that have no token so far."),
    ("num_running", "quire_tenant_requests_running", "Number of running requests with at least one token."),
)


class TenantCollector(Collector):
    """The counters of all current tenants.

    Args:
        tenants: the server's tenants.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; called by the registry."""
        tenants = self._tenants.separate
        for attribute, name, meaning in _COUNTERS:
            counter = CounterMetricFamily(name, meaning, labels=["tenant"])
            for tenant in tenants:
                counter.add_metric([tenant.name], getattr(tenant.figures, attribute))
            yield counter
        for attribute, name, meaning in _GAUGES:
            gauge = GaugeMetricFamily(name, meaning, labels=["tenant"])
            for tenant in tenants:
                gauge.add_metric([tenant.name], getattr(tenant.figures, attribute))
            yield gauge
        refused = CounterMetricFamily(
            "quire_tenant_refusals",
            "Number of times that a limit of the key file refused a tenant's call or one of its prompts.",
            labels=["tenant", "limit"],
        )
        for tenant in tenants:
            for limit, number in tenant.usage.num_refusals.items():
                refused.add_metric([tenant.name, limit], number)
        yield refused
