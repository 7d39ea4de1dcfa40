"""Links to a peer, opened on demand, with a back-off after a failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from quire.datadist.links.decoder_link import DecoderLink

LINK_TIMEOUT = 5.0
"""Seconds for a peer to answer when it is linked to, or told news."""

DOWN_SECONDS = 2.0
"""Seconds for which a peer that could not be linked to is not tried again."""

MAX_DOUBT_SECONDS = 60.0
"""Seconds for which a peer that delivers nothing is not asked what it has cached, at most."""

OpenLink = Callable[[float], DecoderLink]
"""Links to the peer before a deadline; raises `OSError`."""


class PeerLinks:
    """Links to one peer, for several threads.

    Args:
        open_link: links to the peer.
    """

    def __init__(self, open_link: OpenLink) -> None:
        self._open_link = open_link
        self._down_until = 0.0
        self._doubtful_until = 0.0
        self._doubt_seconds = 0.0  # of the last doubt
        self._transport = ""  # of the last link
        self._num_open = 0
        self._counting = threading.Lock()

    @property
    def transport(self) -> str:
        """The transport to the peer; empty: there is no link."""
        return self._transport if self._num_open else ""

    @property
    def is_doubtful(self) -> bool:
        """Whether the peer has recently answered but failed to deliver what it claimed to have cached."""
        return time.monotonic() < self._doubtful_until

    def note_delivery(self, *, has_come: bool) -> None:
        """Note whether something has come that the peer said it has cached: doubts last longer each time."""
        with self._counting:
            if has_come:
                self._doubt_seconds = 0.0
            elif not self.is_doubtful:
                self._doubt_seconds = min(MAX_DOUBT_SECONDS, max(DOWN_SECONDS, 2 * self._doubt_seconds))
                self._doubtful_until = time.monotonic() + self._doubt_seconds

    @property
    def is_down(self) -> bool:
        """Whether linking to the peer has just failed."""
        return time.monotonic() < self._down_until

    def open(self, deadline: float) -> DecoderLink:
        """Return a new link.

        Raises:
            OSError: linking to the peer fails, or has just failed.
        """
        if self.is_down:
            raise ConnectionError("linking to it has just failed")
        limit = time.monotonic() + LINK_TIMEOUT
        try:
            link = self._open_link(min(deadline, limit))
        except OSError as error:
            had_time = deadline >= limit or not isinstance(error, TimeoutError)
            if had_time:
                self._down_until = time.monotonic() + DOWN_SECONDS
            raise
        with self._counting:
            self._num_open += 1
            self._transport = link.transport
        return link

    def close(self, link: DecoderLink) -> None:
        """Take down a link that `open` has returned; call it once for each."""
        with self._counting:
            self._num_open -= 1
        link.drop()


class OneLink:
    """A thread's own link to a peer, which is opened when it is needed.

    Args:
        links: links of the peer.
    """

    def __init__(self, links: PeerLinks) -> None:
        self._links = links
        self._link: DecoderLink | None = None

    def get(self, deadline: float) -> DecoderLink:
        """Return the link, or a new one if it does not stand; raises what `PeerLinks.open` does."""
        if self._link is None or not self._link.stands:
            self.drop()
            self._link = self._links.open(deadline)
        return self._link

    def drop(self) -> None:
        """Take the link down."""
        link, self._link = self._link, None
        if link is not None:
            self._links.close(link)
