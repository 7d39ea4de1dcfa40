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
        store: to put it in.
        tenant: whose it is.
        previous: id of the response before it in the conversation, if there is one.
        given: JSON list of the items that it was asked with.
        num_given: number of them.
    """

    store: ResponseStore
    tenant: str
    previous: str | None
    given: bytes
    num_given: int

    async def keep(self, answer: ResponseAnswer) -> None:
        """Store the response; if that fails, it says that it is not stored, and so does the log."""
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
