"""A rank other than 0: `python -m quire.engine.ranks.process DESCRIPTOR PARENT`, started by `RankGroup`.

DESCRIPTOR is of a socket to rank 0, whose process id is PARENT. It carries what the rank is and what it
computes, and is its *lifeline*: when it closes, rank 0's process has ended, and this one exits immediately,
even within a step. SIGINT and SIGTERM are ignored: the parent process, which gets them too, decides.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

from quire.engine.ranks.messages import (
    HEARTBEAT_INTERVAL,
    AllocateCaches,
    Channel,
    RankAlive,
    RankConnecting,
    RankFailed,
    RankReady,
    RankStart,
    ToRank,
)
from quire.errors import ExchangeError, QuireError

logger = logging.getLogger(__name__)


def main() -> None:
    """Compute what rank 0 says until its process ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(2, 1)  # what is printed goes to standard error
    logging.basicConfig(format="%(asctime)s rank[%(process)d] %(levelname)s %(message)s")
    # Told of the parent: it may have ended before this process looks for it.
    descriptor, parent = map(int, sys.argv[1:3])
    channel = Channel(socket.socket(fileno=descriptor))
    inbox: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(channel, inbox, parent), daemon=True).start()
    try:
        _serve(channel, inbox)
    except Exception as error:
        _fail(channel, error)


def _receive(channel: Channel, inbox: queue.SimpleQueue[ToRank], parent: int) -> NoReturn:
    """Take in messages until the channel closes, or rank 0's process ends while a fork keeps it open."""
    beat = time.monotonic()
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == parent:
            readable, _, _ = select.select([channel], [], [], HEARTBEAT_INTERVAL)
            if readable:
                inbox.put(channel.receive())
            if time.monotonic() >= beat:
                beat = time.monotonic() + HEARTBEAT_INTERVAL
                channel.send(RankAlive())
    os._exit(0)


def _serve(channel: Channel, inbox: queue.SimpleQueue[ToRank]) -> NoReturn:
    # slow; rank 0 imports the same in the meantime
    from quire.engine.ranks.shard_runner import ShardRunner

    start = inbox.get()
    assert isinstance(start, RankStart)
    runner = ShardRunner(start, on_connecting=lambda: channel.send(RankConnecting()))
    gc.freeze()  # objects alive now stay: garbage collections can skip them
    channel.send(RankReady())
    while True:
        message = inbox.get()
        runner.run(message)
        if isinstance(message, AllocateCaches):
            channel.send(RankReady())


def _fail(channel: Channel, error: Exception) -> NoReturn:
    reason = str(error)
    if not isinstance(error, QuireError):
        logger.error("rank failed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
    channel.send(RankFailed(reason, is_consequence=isinstance(error, ExchangeError)))
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
