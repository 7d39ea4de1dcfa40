"""A stand-in for NCCL, on the host."""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from quire.engine.ranks import nccl


class NcclStandIn:
    """Has gloo do what `ProcessGroupNCCL` does; on the host, an exchange has ended when it was asked for."""

    class Options:
        _timeout = datetime.timedelta(minutes=10)

    made: ClassVar[list[NcclStandIn]] = []

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        assert os.environ[nccl.BLOCKING_WAIT] == "1"  # else a watchdog may end the process
        gloo_options = dist.ProcessGroupGloo._Options()
        gloo_options._timeout = options._timeout
        gloo_options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, gloo_options)
        self.is_aborted = threading.Event()
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device == torch.device("cuda", 0)  # the only one that the process sees

    def abort(self) -> None:
        """End the group, before its communicator closes the file of the group's store.

        A store opens its file again at its end, by a descriptor whose number may be another's by then: the
        process aborts if that is no file. Tapes and tests may keep this object longer.
        """
        self._gloo = None
        self.is_aborted.set()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            assert not args[-1].asyncOp  # in the current stream
            self.do(lambda: self._exchange(name, *args))

        return call

    def do(self, exchange: Callable[[], None]) -> None:
        """Do an exchange that was asked for."""
        exchange()

    def _exchange(self, name: str, *args: Any) -> None:
        gloo = self._gloo
        if gloo is None:
            raise RuntimeError("NCCL communicator was aborted")
        getattr(gloo, name)(*args).wait()
