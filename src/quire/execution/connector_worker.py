"""The worker side of a KV connector, driven through the steps of one engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.execution.failed_requests import BlockTables, FailedRequests, StepErrors
from quire.kv.cache.paged_cache import PagedAttentionCache, views_of_layers
from quire.kv.cache.state_cache import StateCache
from quire.kv.connectors.interface import KVConnector
from quire.models.decoder import LayerHook
from quire.step import KVConnectorOutput, SchedulerOutput


class KVTransfers:
    """Calls a connector before, during and after each step's forward pass.

    Args:
        connector: its worker side.
        kv_caches: of each cache group, that it reads from and writes to; more than one only with `by_group`.
        block_size: tokens per KV block.
        states: of recurrent layers; None: there are none.
    """

    def __init__(
        self,
        connector: KVConnector,
        kv_caches: Sequence[PagedAttentionCache],
        block_size: int,
        states: StateCache | None = None,
    ) -> None:
        self._connector = connector
        self._views = views_of_layers(kv_caches)
        self._pages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of the layers seen so far
        self._failed = FailedRequests(block_size)
        if states is not None:
            connector.register_states(states)
        connector.register_kv_caches(tuple(kv_caches) if connector.by_group else kv_caches[0])

    @property
    def layer_hook(self) -> LayerHook | None:
        """What a forward pass calls around each layer; None: nothing."""
        return self if self._connector.works_by_layer else None

    def begin(self, output: SchedulerOutput) -> None:
        """Start the loads of a step."""
        self._failed.begin(output)
        self._connector.start_load_kv(output.kv_connector_metadata)

    def before_layer(self, layer: int) -> None:
        """Wait for what the layer's attention reads."""
        self._connector.wait_for_layer_load(layer)

    def after_attention(self, layer: int) -> None:
        """Start storing what the step has written to the layer."""
        if layer not in self._pages:
            kv = self._views[layer]
            self._pages[layer] = kv.key_pages.transpose(0, 1), kv.value_pages.transpose(0, 1)
        self._connector.save_kv_layer(layer, *self._pages[layer])

    def end(
        self, output: SchedulerOutput, errors: StepErrors, block_tables: BlockTables
    ) -> KVConnectorOutput:
        """Store what a step computed; return the transfers that ended or failed since the last step.

        Args:
            output: the step that was begun.
            errors: of the step.
            block_tables: returns those of its rows.
        """
        verdict = self._failed.end(errors, block_tables)
        if verdict.is_known:
            self._connector.wait_for_save(verdict.failed_ids())
        else:
            self._connector.begin_save(verdict.failed_ids)
        sent, received = self._connector.get_finished(output.finished_req_ids)
        return KVConnectorOutput(sent, received, self._connector.get_block_ids_with_load_errors())
