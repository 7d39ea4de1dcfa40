"""Asynchronous layer-by-layer transfers during computation."""

from __future__ import annotations

import abc
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence

from quire.datadist.argument_checks import ADDRESS, TIMEOUT_MS, U32, U64, ArgumentChecks
from quire.datadist.caches.cache_keys import BlocksCacheKey, CacheKeyByIdAndIndex
from quire.datadist.status import LLMException, LLMStatusCode

logger = logging.getLogger(__name__)


class LayerSynchronizer(abc.ABC):
    """Reports when a layer has been computed; a base class for users."""

    @abc.abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Wait until a layer's KV is in the source cache.

        Called from the task's thread, with both arguments by position, once for each layer that is pushed, in
        ascending order.

        Args:
            layer_index: index of the source cache, from 0.
            timeout_in_millis: maximum wait, `sync_kv_timeout`.

        Returns:
            Whether it is. If not, or if this raises, neither this layer nor later ones are pushed.
        """


class TransferConfig:
    """A destination by its addresses, all in one cache of a peer, registered or allocated.

    Args:
        dst_cluster_id: cluster id of the peer.
        dst_addrs: for each source tensor, where its slot goes, or the peer's tensor whose blocks are written.
        src_layer_range: `range` of layers, step 1; None: all.
        src_batch_index: index of the source slot.
    """

    def __init__(
        self,
        dst_cluster_id: int,
        dst_addrs: list[int],
        src_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        with ArgumentChecks() as check:
            self.dst_cluster_id = check.integer("dst_cluster_id", dst_cluster_id, U64)
            self.dst_addrs = check.integers("dst_addrs", dst_addrs, ADDRESS)
            check.instance("src_layer_range", src_layer_range, range, type(None))
            self.src_batch_index = check.integer("src_batch_index", src_batch_index, U32)
        self.src_layer_range = src_layer_range


class TransferWithCacheKeyConfig:
    """A destination by the key of a registered cache of a peer.

    Args:
        cache_key: key of a blocks cache, or of a slot.
        src_layer_range: `range` of layers, step 1; None: all.
        dst_layer_range: the same, as long; None: the same layers.
        src_batch_index: index of the source slot.
    """

    def __init__(
        self,
        cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        with ArgumentChecks() as check:
            check.instance("cache_key", cache_key, BlocksCacheKey, CacheKeyByIdAndIndex)
            check.instance("src_layer_range", src_layer_range, range, type(None))
            check.instance("dst_layer_range", dst_layer_range, range, type(None))
            self.src_batch_index = check.integer("src_batch_index", src_batch_index, U32)
        self.cache_key = cache_key
        self.src_layer_range = src_layer_range
        self.dst_layer_range = dst_layer_range


@dataclasses.dataclass(frozen=True)
class LayerTransfer:
    """One layer of one configuration.

    Attributes:
        layer: layer of the source.
        config: number of the configuration.
        move: pushes it; raises `LLMException`.
    """

    layer: int
    config: int
    move: Callable[[], None]


class CacheTask:
    """A running transfer, in a separate thread.

    Args:
        synchronizer: asked for each layer before it is moved.
        transfers: in the order of their layers.
        num_configs: number of configurations.
        timeout_ms: for each layer.
    """

    def __init__(
        self,
        synchronizer: LayerSynchronizer,
        transfers: Sequence[LayerTransfer],
        num_configs: int,
        timeout_ms: int,
    ) -> None:
        self._synchronizer = synchronizer
        self._transfers = transfers
        self._timeout_ms = timeout_ms
        self._changed = threading.Condition()
        self._started: set[int] = set()
        self._results: list[LLMStatusCode | None] = [None] * num_configs
        self._thread = threading.Thread(target=self._run, name="datadist-task", daemon=True)
        self._thread.start()

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait for the end.

        Args:
            timeout_in_millis: None: for as long as it takes.

        Returns:
            LLM_SUCCESS, or the first failure; LLM_TIMEOUT if it has not ended in time.
        """
        codes = self.get_results(timeout_in_millis)
        if None in codes:
            return LLMStatusCode.LLM_TIMEOUT
        failures = [code for code in codes if code is not None and code is not LLMStatusCode.LLM_SUCCESS]
        return failures[0] if failures else LLMStatusCode.LLM_SUCCESS

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Wait for the end, and return the result of each configuration.

        Args:
            timeout_in_millis: None: for as long as it takes.

        Returns:
            LLM_SUCCESS, LLM_TIMEOUT (it has not ended in time, or its layer was not computed in time),
            LLM_FAILED (the synchronizer raised), or what a push raises; None: not started.
        """
        with ArgumentChecks() as check:
            milliseconds = timeout_in_millis
            if milliseconds is not None:
                milliseconds = check.integer("timeout_in_millis", milliseconds, TIMEOUT_MS)
        with self._changed:
            self._changed.wait_for(
                lambda: None not in self._results, None if milliseconds is None else milliseconds / 1e3
            )
            return [
                LLMStatusCode.LLM_TIMEOUT if code is None and number in self._started else code
                for number, code in enumerate(self._results)
            ]

    def _run(self) -> None:
        last = {one.config: one for one in self._transfers}
        layer = -1
        for one in self._transfers:
            if self._results[one.config] is not None:
                continue
            if one.layer != layer:
                layer = one.layer
                code = self._wait_for_layer(layer)
                if code is not LLMStatusCode.LLM_SUCCESS:
                    self._end_all(code)
                    return
            self._started.add(one.config)
            code = _moved(one)
            if code is not LLMStatusCode.LLM_SUCCESS or last[one.config] is one:
                self._end(one.config, code)

    def _wait_for_layer(self, layer: int) -> LLMStatusCode:
        started = time.monotonic()
        try:
            is_computed = bool(self._synchronizer.synchronize_layer(layer, self._timeout_ms))
        except BaseException:
            logger.exception("synchronize_layer(%d) failed", layer)
            return LLMStatusCode.LLM_FAILED
        if is_computed:
            return LLMStatusCode.LLM_SUCCESS
        seconds = time.monotonic() - started
        logger.warning("layer %d was not computed within %.3f s", layer, seconds)
        return LLMStatusCode.LLM_TIMEOUT

    def _end(self, config: int, code: LLMStatusCode) -> None:
        with self._changed:
            self._results[config] = code
            self._changed.notify_all()

    def _end_all(self, code: LLMStatusCode) -> None:
        with self._changed:
            self._results = [code if one is None else one for one in self._results]
            self._changed.notify_all()


def _moved(transfer: LayerTransfer) -> LLMStatusCode:
    try:
        transfer.move()
    except LLMException as error:
        logger.warning("layer %d was not pushed: %s", transfer.layer, error)
        return error.status_code
    except BaseException:
        logger.exception("layer %d was not pushed", transfer.layer)
        return LLMStatusCode.LLM_FAILED
    return LLMStatusCode.LLM_SUCCESS
