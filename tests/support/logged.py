"""An access log that a test reads."""

import contextlib
import json
import os
import threading

from quire.server.wire import access_log
from quire.server.wire.access_log import AccessLog


class LoggedLines:
    """A log whose lines are read into `lines` as they come."""

    def __init__(self, line_format):
        source, descriptor = os.pipe()
        self._source = os.fdopen(source, "rb")
        self._descriptor = descriptor
        self.log = AccessLog(line_format, descriptor)
        self._read = []
        self._reader = threading.Thread(target=lambda: self._read.extend(self._source))
        self._reader.start()

    @property
    def lines(self):
        """All lines; no more can be written."""
        if self._descriptor is not None:
            self.log.writer.close()
            os.close(self._descriptor)
            self._descriptor = None
            self._reader.join()
            self._source.close()
        return self._read

    @property
    def entries(self):
        return [json.loads(line) for line in self.lines]


@contextlib.contextmanager
def logged(monkeypatch, line_format="json"):
    monkeypatch.setattr(access_log, "CLOSE_TIMEOUT", 60)
    lines = LoggedLines(line_format)
    try:
        yield lines
    finally:
        assert lines.lines is not None
