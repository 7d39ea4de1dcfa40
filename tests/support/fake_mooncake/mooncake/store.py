"""A Mooncake store in the directory that is its metadata server.

The file `faults` in there has what calls are to do in place of their work, as OPERATION=FAULT.
"""

import ctypes
import os
import threading
from pathlib import Path


class MooncakeDistributedStore:
    def setup(self, config):
        self._directory = Path(config["metadata_server"])
        return self._fault("setup") or 0

    def register_buffer(self, address, num_bytes):
        self._registered = range(address, address + num_bytes)
        return self._fault("register_buffer") or 0

    def unregister_buffer(self, address):
        return self._fault("unregister_buffer") or 0

    def batch_is_exist(self, names):
        fault = self._fault("exist")
        return fault if fault is not None else [int((self._directory / name).exists()) for name in names]

    def batch_put_from(self, names, addresses, sizes):
        fault = self._fault("put")
        if fault is not None:
            return fault
        for name, address, size in zip(names, addresses, sizes, strict=True):
            assert address in self._registered
            assert address + size - 1 in self._registered
            if not (self._directory / name).exists():
                new = self._directory / f"new-{os.getpid()}-{threading.get_ident()}"
                new.write_bytes(ctypes.string_at(address, size))
                new.rename(self._directory / name)
        return [0] * len(names)

    def batch_get_into(self, names, addresses, sizes):
        fault = self._fault("get")
        if fault is not None:
            return fault
        results = []
        for name, address, size in zip(names, addresses, sizes, strict=True):
            path = self._directory / name
            content = path.read_bytes() if path.exists() else None
            if content is None or len(content) > size:
                results.append(-704 if content is None else -600)
                continue
            ctypes.memmove(address, content, len(content))
            results.append(len(content))
        return results

    def remove(self, name, force=False):
        fault = self._fault("remove")
        if fault is None:
            (self._directory / name).unlink(missing_ok=True)
        return fault or 0

    def close(self):
        return self._fault("close") or 0

    def _fault(self, operation):
        """Do what the file asks for; return what the call is to return, None if it is to do its work."""
        file = self._directory / "faults"
        faults = dict(line.split("=") for line in file.read_text().split()) if file.exists() else {}
        fault = faults.get(operation)
        if fault == "raise":
            raise RuntimeError("the store failed")
        if fault == "hang":
            threading.Event().wait()
        if fault == "crash":
            os._exit(139)
        if fault == "error":
            return [-900] if operation in ("put", "get", "exist") else -900
        results = {
            None: None,
            "full": [-200],
            "more": [1] * 1000,  # than were asked about
            "huge": [10**9],
            "text": "no list",
            "empty": [],
        }
        return results[fault]
