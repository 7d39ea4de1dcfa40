"""The counters of a tier's connector, which several threads add to."""

from __future__ import annotations

import threading

from quire.kv.connectors.stats import KVConnectorStats


class Counters:
    """Counts in the fields of a `KVConnectorStats`."""

    def __init__(self) -> None:
        self.stats = KVConnectorStats()
        self._lock = threading.Lock()

    def add(self, **numbers: int) -> None:
        """Add numbers to the fields of these names."""
        with self._lock:
            for name, number in numbers.items():
                setattr(self.stats, name, getattr(self.stats, name) + number)
