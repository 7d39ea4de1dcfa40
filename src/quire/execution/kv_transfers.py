"""The worker side of a KV connector, driven through the steps of one engine."""

from __future__ import annotations

from quire.kv.connector import KVConnector
from quire.kv.paged_cache import PagedAttentionCache
from quire.step import KVConnectorOutput, SchedulerOutput


class KVTransfers:
    """Calls a connector before, during and after each step's forward pass; is the pass's `LayerHook`.

    Args:
        connector: its worker side.
        kv_cache: the tensors that it reads from and writes to.
    """

    def __init__(self, connector: KVConnector, kv_cache: PagedAttentionCache) -> None:
        self._connector = connector
        self._kv_cache = kv_cache
        connector.register_kv_caches(kv_cache)

    def begin(self, output: SchedulerOutput) -> None:
        """Start the loads of a step."""
        self._connector.start_load_kv(output.kv_connector_metadata)

    def before_layer(self, layer: int) -> None:
        """Wait for what the layer's attention reads."""
        self._connector.wait_for_layer_load(layer)

    def after_attention(self, layer: int) -> None:
        """Start storing what the step has written to the layer."""
        kv = self._kv_cache.views[layer]
        self._connector.save_kv_layer(layer, kv.key_pages.transpose(0, 1), kv.value_pages.transpose(0, 1))

    def end(self, output: SchedulerOutput) -> KVConnectorOutput:
        """Wait for the stores of a step, and return what has ended or failed since the last step."""
        self._connector.wait_for_save()
        sent, received = self._connector.get_finished(output.finished_req_ids)
        return KVConnectorOutput(sent, received, self._connector.get_block_ids_with_load_errors())
