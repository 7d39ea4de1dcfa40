"""Learning from Ray Serve which engine replicas there are.

Ray pickles this module by value, with its globals; what it calls must be in others.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from typing_extensions import override

from quire.ray.ingress import announce


class EngineList(RequestRouter):  # type: ignore[misc]
    """Ray's choice between engine replicas, in each process that has a handle of their deployment.

    Requests do not come this way: it tells the ingress which replicas there are, as soon as Ray knows.
    """

    @override
    def initialize_state(self, *, name: str) -> None:
        self._name = name

    @override
    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        announce(self._name, [replica.replica_metadata for replica in replicas])

    @override
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]
