"""Records of files and batches, in a database beside the files."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from pathlib import Path

import msgspec

from quire.server.batches.answers import Batch, FileObject
from quire.server.storage.database import Database
from quire.server.wire.errors import UNAVAILABLE, ApiError

MAX_BATCHES = 10_000
"""Maximum number of batches kept per tenant; the oldest ended ones are forgotten."""

_SCRIPT = """
PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL UNIQUE,
    purpose TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    description BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of_tenants ON files (tenant, number);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL UNIQUE,
    has_ended INTEGER NOT NULL,
    description BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_of_tenants ON batches (tenant, number);
"""
_ENDED = frozenset({"completed", "failed", "expired", "cancelled"})

_decode_file = msgspec.json.Decoder(FileObject).decode
_decode_batch = msgspec.json.Decoder(Batch).decode


def has_ended(batch: Batch) -> bool:
    """Return whether a batch has ended."""
    return batch.status in _ENDED


class Records:
    """Files and batches by tenant and id.

    Args:
        path: path of the database.

    Raises (all methods):
        ApiError: 503: the database has failed or timed out.
    """

    def __init__(self, path: Path) -> None:
        self._database = Database(
            str(path), _SCRIPT, thread_name="quire-batch-records", unavailable=_unavailable
        )

    async def close(self) -> None:
        """Close the database, unless it hangs."""
        await self._database.close()

    async def add_file(self, tenant: str, file: FileObject, max_files: int) -> bool:
        """Add a file if the tenant has fewer than `max_files`; return whether it was added."""

        def add(database: sqlite3.Connection) -> bool:
            count = "SELECT COUNT(*) FROM files WHERE tenant = ?"
            if database.execute(count, (tenant,)).fetchone()[0] >= max_files:
                return False
            _insert_file(database, tenant, file)
            return True

        return await self._database.run(add)

    async def get_file(self, tenant: str, file_id: str) -> FileObject | None:
        """Return a file; None if it does not exist."""
        query = "SELECT description FROM files WHERE tenant = ? AND id = ?"
        row = await self._database.run(lambda database: database.execute(query, (tenant, file_id)).fetchone())
        return None if row is None else _decode_file(row[0])

    async def delete_file(self, tenant: str, file_id: str) -> bool:
        """Delete a file's record; return whether it existed."""
        query = "DELETE FROM files WHERE tenant = ? AND id = ?"
        return bool(
            await self._database.run(lambda database: database.execute(query, (tenant, file_id)).rowcount)
        )

    async def list_files(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None,
        from_time: int | None = None,
        is_ascending: bool,
        purpose: str | None,
    ) -> list[FileObject]:
        """Return files in the order of their creation, at most `limit`.

        Args:
            tenant: the tenant's name.
            limit: maximum number.
            after: id of the file before the first one returned; None: start at the beginning.
            from_time: start at the first file that was created then, or after that in this order.
            is_ascending: whether the oldest comes first rather than the newest.
            purpose: purpose of the files; None: any.

        Raises:
            ApiError: 404: there is no file `after`.
        """

        def rows(database: sqlite3.Connection) -> list[tuple[bytes]]:
            return _page(
                database,
                "files",
                tenant,
                limit=limit,
                after=after,
                from_time=from_time,
                is_ascending=is_ascending,
                purpose=purpose,
            )

        return [_decode_file(row[0]) for row in await self._database.run(rows)]

    async def num_bytes_by_tenant(self) -> dict[str, int]:
        """Return the size of each tenant's files."""
        query = "SELECT tenant, SUM(num_bytes) FROM files GROUP BY tenant"
        return dict(await self._database.run(lambda database: database.execute(query).fetchall()))

    async def file_ids(self) -> set[str]:
        """Return the ids of all files, of all tenants."""
        rows = await self._database.run(lambda database: database.execute("SELECT id FROM files").fetchall())
        return {row[0] for row in rows}

    async def add_batch(self, tenant: str, batch: Batch) -> None:
        """Add a batch; the oldest ended ones beyond the limit are deleted."""

        def add(database: sqlite3.Connection) -> None:
            values = tenant, batch.id, has_ended(batch), msgspec.json.encode(batch)
            database.execute(
                "INSERT INTO batches (tenant, id, has_ended, description) VALUES (?, ?, ?, ?)", values
            )
            database.execute(
                "DELETE FROM batches WHERE tenant = :tenant AND has_ended AND number <= (SELECT number FROM "
                "batches WHERE tenant = :tenant ORDER BY number DESC LIMIT 1 OFFSET :kept)",
                {"tenant": tenant, "kept": MAX_BATCHES},
            )

        await self._database.run(add)

    async def put_batch(self, tenant: str, batch: Batch, files: Collection[FileObject] = ()) -> None:
        """Store a batch's new state and the files that it has written, atomically."""

        def put(database: sqlite3.Connection) -> None:
            query = "UPDATE batches SET has_ended = ?, description = ? WHERE id = ?"
            database.execute(query, (has_ended(batch), encoded, batch.id))
            for file in files:
                _insert_file(database, tenant, file)

        encoded = msgspec.json.encode(batch)
        await self._database.run(put)

    async def get_batch(self, tenant: str, batch_id: str) -> Batch | None:
        """Return a batch as last stored; None if it does not exist."""
        query = "SELECT description FROM batches WHERE tenant = ? AND id = ?"
        row = await self._database.run(
            lambda database: database.execute(query, (tenant, batch_id)).fetchone()
        )
        return None if row is None else _decode_batch(row[0])

    async def list_batches(
        self, tenant: str, *, limit: int, after: str | None, from_time: int | None = None
    ) -> list[Batch]:
        """Return batches, the newest first, at most `limit`.

        Args:
            tenant: the tenant's name.
            limit: maximum number.
            after: id of the batch before the first one returned; None: start at the newest.
            from_time: start at the newest batch that was created by then.

        Raises:
            ApiError: 404: there is no batch `after`.
        """

        def rows(database: sqlite3.Connection) -> list[tuple[bytes]]:
            return _page(
                database,
                "batches",
                tenant,
                limit=limit,
                after=after,
                from_time=from_time,
                is_ascending=False,
            )

        return [_decode_batch(row[0]) for row in await self._database.run(rows)]

    async def unfinished_batches(self) -> list[tuple[str, Batch]]:
        """Return the batches that have not ended, with their tenants, the oldest first."""
        query = "SELECT tenant, description FROM batches WHERE NOT has_ended ORDER BY number"
        rows = await self._database.run(lambda database: database.execute(query).fetchall())
        return [(tenant, _decode_batch(description)) for tenant, description in rows]


def _insert_file(database: sqlite3.Connection, tenant: str, file: FileObject) -> None:
    database.execute(
        "INSERT INTO files (tenant, id, purpose, num_bytes, description) VALUES (?, ?, ?, ?, ?)",
        (tenant, file.id, file.purpose, file.bytes, msgspec.json.encode(file)),
    )


def _page(
    database: sqlite3.Connection,
    table: str,
    tenant: str,
    *,
    limit: int,
    after: str | None,
    from_time: int | None,
    is_ascending: bool,
    purpose: str | None = None,
) -> list[tuple[bytes]]:
    comparison, order = (">", "ASC") if is_ascending else ("<", "DESC")
    condition = "" if purpose is None else "AND purpose = :purpose"
    values: dict[str, str | int | None] = {"tenant": tenant, "limit": limit, "purpose": purpose}
    if after is not None:
        query = f"SELECT number FROM {table} WHERE tenant = ? AND id = ?"
        row = database.execute(query, (tenant, after)).fetchone()
        if row is None:
            raise ApiError(404, f"after is {after!r}, which does not exist", param="after")
        condition += f" AND number {comparison} :first"
        values["first"] = row[0]
    if from_time is not None:
        first = (
            f"SELECT number FROM {table} WHERE tenant = :tenant AND "
            f"json_extract(CAST(description AS TEXT), '$.created_at') {comparison}= :from_time "
            f"ORDER BY number {order} LIMIT 1"
        )
        condition += f" AND number {comparison}= ({first})"
        values["from_time"] = from_time
    return database.execute(
        f"SELECT description FROM {table} WHERE tenant = :tenant {condition} ORDER BY number {order} "
        "LIMIT :limit",
        values,
    ).fetchall()


def _unavailable(problem: str) -> ApiError:
    return ApiError(
        503,
        f"the database of files and batches {problem}",
        kind=UNAVAILABLE,
        code="batch_store_unavailable",
    )
