"""Storing a response when it is complete."""

from __future__ import annotations

import dataclasses
import logging

from quire.server.responses.answers import ResponseAnswer
from quire.server.storage.response_store import ResponseStore, StoredResponse
from quire.server.wire.answers import encode
from quire.server.wire.errors import ApiError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Keeping:
    """Stores one response.

    Args:
        store: the store.
        tenant: its tenant.
        previous: id of the previous response in the conversation, if any.
        given: JSON list of the input items.
        num_given: number of input items.
    """

    store: ResponseStore
    tenant: str
    previous: str | None
    given: bytes
    num_given: int

    async def keep(self, answer: ResponseAnswer) -> None:
        """Store the response; if that fails, log it and set its `store` to false."""
        try:
            is_stored = await self.store.put(
                self.tenant,
                StoredResponse(
                    id=answer.id,
                    previous=self.previous,
                    input=self.given,
                    output=encode(answer.output),
                    answer=encode(answer),
                    num_items=self.num_given + len(answer.output),
                    item_ids=tuple(item.id for item in answer.output),
                ),
            )
        except ApiError as error:
            log.warning("response %s is not stored: %s", answer.id, error.message)
            is_stored = False
        answer.store = is_stored
