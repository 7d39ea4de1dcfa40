"""The scheduler side of a KV connector, as the phases of a step call it."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.errors import InvalidRequestError
from quire.kv.connectors.interface import KVConnector
from quire.request import Request
from quire.scheduling.guards.context import StepClock
from quire.step import IntArray, SchedulerOutput

logger = logging.getLogger(__name__)


class ConnectorCalls:
    """Calls a connector that may raise at any call: what it raises is logged and costs one request its load.

    Args:
        connector: None: nothing is ever found elsewhere.
        clock: of the steps.
        patience: seconds for which a request waits for the connector to know whether it has KV.
    """

    def __init__(self, connector: KVConnector | None, clock: StepClock, *, patience: float) -> None:
        self._connector = connector
        self._clock = clock
        self._patience = patience
        self._unanswered: dict[str, float] = {}  # since when the connector does not know, by request id
        self._loaded: set[int] = set()  # blocks that it is to load, and whose load has not failed

    @property
    def num_unanswered(self) -> int:
        """Number of waiting requests for which the connector is still looking for KV."""
        return len(self._unanswered)

    def arrive(self, request: Request) -> None:
        """See `KVConnector.request_arrived`.

        Raises:
            InvalidRequestError: the request is to be refused.
        """
        if self._connector is None:
            return
        try:
            self._connector.request_arrived(request)
        except InvalidRequestError:
            raise
        except Exception:
            logger.exception("the KV connector failed when request %r arrived", request.request_id)

    def find(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `KVConnector.get_num_new_matched_tokens`; nothing is found if that fails."""
        if self._connector is None:
            return 0, False
        try:
            count, is_async = self._connector.get_num_new_matched_tokens(request, num_computed_tokens)
            count, is_async = None if count is None else operator.index(count), bool(is_async)
        except Exception:
            logger.exception("the KV connector failed to look request %r up", request.request_id)
            return 0, False
        return self._answer_of(request, count), is_async

    def _answer_of(self, request: Request, count: int | None) -> int | None:
        """Return the answer, or 0 if none has come for as long as a load may take."""
        if count is not None:
            self._unanswered.pop(request.request_id, None)
            return count
        since = self._unanswered.setdefault(request.request_id, self._clock.now)
        if self._clock.now < since + self._patience:
            return None
        logger.error(
            "the KV connector has not said for %g s (kv_transfer_timeout) whether it has KV of request %r, "
            "which is now computed",
            self._patience,
            request.request_id,
        )
        del self._unanswered[request.request_id]
        request.kv_load_failed = True
        return 0

    def begin_load(
        self,
        request: Request,
        block_ids: IntArray,
        num_external_tokens: int,
        checkpoint: int = -1,
        num_local_tokens: int = 0,
    ) -> bool:
        """See `KVConnector.load_state`, called for a checkpoint, and `update_state_after_alloc`.

        Returns:
            False if that fails.
        """
        assert self._connector is not None, "without a connector nothing is found elsewhere"
        self._loaded.update(block_ids[0].tolist())
        try:
            told = _as_told(self._connector, block_ids)
            if checkpoint >= 0:
                self._connector.load_state(request, checkpoint, num_local_tokens)
            self._connector.update_state_after_alloc(request, told, num_external_tokens)
        except Exception:
            logger.exception("the KV connector failed to load for request %r", request.request_id)
            return False
        return True

    def lends_prompt(self, request: Request) -> bool:
        """See `KVConnector.lends_prompt`; False if that fails."""
        if self._connector is None:
            return False
        try:
            return bool(self._connector.lends_prompt(request))
        except Exception:
            logger.exception("the KV connector failed to say whether it lends request %r", request.request_id)
            return False

    def take_failed(self, block_ids: frozenset[int]) -> frozenset[int]:
        """Return which of these blocks, whose load is said to have failed, were to be loaded; each once."""
        failed = block_ids & self._loaded
        if failed != block_ids:
            logger.error("the KV connector reports a failed load of blocks that it was not asked to load")
        self._loaded -= failed
        return failed

    def cancel_load(self, request_id: str) -> None:
        """See `KVConnector.cancel_load`."""
        assert self._connector is not None, "without a connector nothing is being loaded"
        try:
            self._connector.cancel_load(request_id)
        except Exception:
            logger.exception("the KV connector failed to cancel the load of request %r", request_id)

    def finish(
        self, request: Request, block_ids: IntArray, checkpoint: int | None = None
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """See `KVConnector.lend_state`, called for a checkpoint, and `request_finished`.

        Nothing is held if one of them fails.

        Parameters that are not plain data cannot be sent to anyone. The blocks are held all the same: the
        worker side may count on them.
        """
        if self._connector is None:
            return False, None
        self._unanswered.pop(request.request_id, None)
        try:
            told = _as_told(self._connector, block_ids)
            if checkpoint is not None:
                self._connector.lend_state(request, checkpoint)
            is_read_later, params = self._connector.request_finished(request, told)
            is_read_later = bool(is_read_later)
        except Exception:
            logger.exception("the KV connector failed at the end of request %r", request.request_id)
            return False, None
        return is_read_later, self._plain(request, params)

    def _plain(self, request: Request, params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if params is None:
            return None
        try:
            plain = dict(params)
            msgspec.msgpack.encode(plain)  # to the front
            msgspec.json.encode(plain)  # to a client
        except Exception:
            logger.exception("the kv_transfer_params of request %r cannot be sent", request.request_id)
            return None
        return plain

    def leases_renewed(self) -> list[str]:
        """See `KVConnector.leases_renewed`; none if that fails."""
        if self._connector is None:
            return []
        try:
            return sorted(map(_id, self._connector.leases_renewed()))
        except Exception:
            logger.exception("the KV connector failed to say which leases are renewed")
            return []

    def end_lease(self, request_id: str) -> None:
        """See `KVConnector.lease_ended`."""
        assert self._connector is not None, "without a connector nothing is lent"
        try:
            self._connector.lease_ended(request_id)
        except Exception:
            logger.exception("the KV connector failed when the lease of request %r ended", request_id)

    def reset(self) -> bool:
        """See `KVConnector.reset`; False if that fails."""
        if self._connector is None:
            return True
        try:
            return bool(self._connector.reset())
        except Exception:
            logger.exception("the KV connector failed to forget what it stores")
            return False

    def metadata_of(self, output: SchedulerOutput) -> object | None:
        """See `KVConnector.build_connector_meta`; what that raises is raised: the step cannot be computed."""
        return None if self._connector is None else self._connector.build_connector_meta(output)


def _as_told(connector: KVConnector, block_ids: IntArray) -> IntArray | list[int]:
    """Return blocks [G, blocks] as a connector expects them, for it to keep."""
    return block_ids.copy() if connector.by_group else block_ids[0].tolist()


def _id(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no request id")
    return name
