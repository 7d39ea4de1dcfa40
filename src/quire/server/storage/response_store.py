"""Responses stored for later turns, in an SQLite database in memory or in a file."""

from __future__ import annotations

import dataclasses
import sqlite3

from quire.server.storage.database import Database
from quire.server.wire.errors import UNAVAILABLE, ApiError

MAX_TURNS = 1000
"""Maximum number of responses in a conversation."""

MAX_ITEMS = 4096
"""Maximum number of items in a conversation; each takes microseconds to check."""

_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    previous TEXT,
    input BLOB NOT NULL,
    output BLOB NOT NULL,
    answer BLOB NOT NULL,
    num_items INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    UNIQUE (tenant, id)
);
CREATE INDEX IF NOT EXISTS sizes ON responses (tenant, number, num_bytes);
CREATE TABLE IF NOT EXISTS items (
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    response INTEGER NOT NULL REFERENCES responses (number) ON DELETE CASCADE,
    PRIMARY KEY (tenant, id)
);
CREATE INDEX IF NOT EXISTS items_of_responses ON items (response);
"""
_SETTINGS = "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA foreign_keys=ON;"
_CHAIN = """
WITH RECURSIVE chain(number, previous, turn) AS (
    SELECT number, previous, 1 FROM responses WHERE tenant = :tenant AND id = :id
    UNION ALL
    SELECT one.number, one.previous, chain.turn + 1
    FROM responses AS one JOIN chain ON one.id = chain.previous
    WHERE one.tenant = :tenant AND chain.turn <= :most
)
SELECT responses.previous, num_items, input, output
FROM chain JOIN responses USING (number) ORDER BY turn
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response, with its input items.

    Args:
        id: id of the response.
        previous: id of the previous response in the conversation, if any.
        input: JSON list of the new input items of this request.
        output: JSON list of the response's items.
        answer: JSON of the whole response.
        num_items: number of items in both lists.
        item_ids: ids of the response's items.
    """

    id: str
    previous: str | None
    input: bytes
    output: bytes
    answer: bytes
    num_items: int
    item_ids: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the stored data."""
        return len(self.input) + len(self.output) + len(self.answer)


class ResponseStore:
    """Responses by tenant and id.

    Args:
        path: path of the database; `IN_MEMORY`: it ends with the server.
        max_bytes: maximum size of a tenant's responses; beyond that, the oldest are dropped.

    Raises (all methods):
        ApiError: 503: the database has failed or timed out.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._database = Database(
            path, _SETTINGS + _TABLES, thread_name="quire-responses", unavailable=_unavailable
        )

    async def put(self, tenant: str, response: StoredResponse) -> bool:
        """Store a response, replacing one with the same id; return whether it is small enough."""
        if response.num_bytes > self._max_bytes:
            return False
        await self._database.run(lambda database: self._put(database, tenant, response))
        return True

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response; None if it does not exist."""
        query = "SELECT previous, input, output, answer, num_items FROM responses WHERE tenant = ? AND id = ?"
        row = await self._database.run(
            lambda database: database.execute(query, (tenant, response_id)).fetchone()
        )
        if row is None:
            return None
        fields = ("previous", "input", "output", "answer", "num_items")
        return StoredResponse(id=response_id, **dict(zip(fields, row, strict=True)))

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; return whether it existed."""
        query = "DELETE FROM responses WHERE tenant = ? AND id = ?"
        return bool(
            await self._database.run(lambda database: database.execute(query, (tenant, response_id)).rowcount)
        )

    async def conversation(self, tenant: str, response_id: str, max_bytes: int) -> list[bytes]:
        """Return the items of a conversation up to a response, as JSON lists, the oldest first.

        Args:
            tenant: the tenant's name.
            response_id: id of the last response.
            max_bytes: maximum size of all items.

        Raises:
            ApiError: 404: a response does not exist; 400: there are more than `MAX_TURNS` responses,
                `MAX_ITEMS` items or `max_bytes` bytes.
        """
        turns = await self._database.run(lambda database: _turns(database, tenant, response_id, max_bytes))
        return [part for turn in reversed(turns) for part in turn]

    async def output_with(self, tenant: str, item_id: str) -> bytes | None:
        """Return the items of the response with this item, as a JSON list; None: there is none."""
        query = (
            "SELECT output FROM items JOIN responses ON response = number "
            "WHERE items.tenant = ? AND items.id = ?"
        )
        row = await self._database.run(lambda database: database.execute(query, (tenant, item_id)).fetchone())
        return None if row is None else bytes(row[0])

    async def close(self) -> None:
        """Close the database, unless it hangs."""
        await self._database.close()

    def _put(self, database: sqlite3.Connection, tenant: str, response: StoredResponse) -> None:
        values = (
            tenant, response.id, response.previous, response.input, response.output, response.answer,
            response.num_items, response.num_bytes,
        )  # fmt: skip
        database.execute(
            "INSERT INTO responses (tenant, id, previous, input, output, answer, num_items, num_bytes) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (tenant, id) DO UPDATE SET "
            "output = excluded.output, answer = excluded.answer, num_items = excluded.num_items, "
            "num_bytes = excluded.num_bytes",
            values,
        )
        [number] = database.execute(
            "SELECT number FROM responses WHERE tenant = ? AND id = ?", (tenant, response.id)
        ).fetchone()
        database.executemany(
            "INSERT OR REPLACE INTO items VALUES (?, ?, ?)",
            [(tenant, item_id, number) for item_id in response.item_ids],
        )
        total = "SELECT SUM(num_bytes) FROM responses WHERE tenant = ?"
        [excess] = database.execute(total, (tenant,)).fetchone()
        excess -= self._max_bytes
        oldest = database.execute(
            "SELECT number, num_bytes FROM responses WHERE tenant = ? ORDER BY number", (tenant,)
        )
        while excess > 0:
            number, num_bytes = oldest.fetchone()
            database.execute("DELETE FROM responses WHERE number = ?", (number,))
            excess -= num_bytes


def _turns(
    database: sqlite3.Connection, tenant: str, response_id: str, max_bytes: int
) -> list[tuple[bytes, bytes]]:
    """Return the items of a response and its predecessors, the newest first."""
    turns: list[tuple[bytes, bytes]] = []
    num_items = num_bytes = 0
    missing: str | None = response_id
    rows = database.execute(_CHAIN, {"tenant": tenant, "id": response_id, "most": MAX_TURNS})
    for previous, items, given, output in rows:
        missing = previous
        turns.append((given, output))
        num_items += items
        num_bytes += len(given) + len(output)
        for number, limit, what in (
            (len(turns), MAX_TURNS, "responses"),
            (num_items, MAX_ITEMS, "items"),
            (num_bytes, max_bytes, "bytes"),
        ):
            if number > limit:
                raise ApiError(
                    400,
                    f"the conversation has more than {limit} {what}; start a new one with the relevant parts",
                    param="previous_response_id",
                )
    if missing is not None:
        raise not_found(missing, "previous_response_id")
    return turns


def _unavailable(problem: str) -> ApiError:
    return ApiError(
        503,
        f"the store of responses {problem}; set store to false, and leave out previous_response_id",
        kind=UNAVAILABLE,
        code="response_store_unavailable",
    )


def not_found(response_id: str, param: str | None = None) -> ApiError:
    """Return the error for a response that does not exist."""
    return ApiError(
        404,
        f"there is no response {response_id!r}: it was not stored, was deleted, or was dropped for "
        "newer ones (the server's max_stored_response_bytes)",
        param=param,
        code="response_not_found",
    )
