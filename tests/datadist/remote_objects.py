"""Objects of `quire.datadist` in a child process, used as if they were in this one.

A call takes and returns plain data, keys, descriptions and requests by value, and everything else that
`quire.datadist` hands out as a `RemoteObject`, which stands for it here. What is raised there is raised here.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import subprocesses
from quire.datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    KvCache,
    KvCacheManager,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMModel,
    LLMReq,
    ModelRunner,
    Tensor,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

BY_REFERENCE = (
    CacheTask,
    KvCache,
    KvCacheManager,
    LayerSynchronizer,
    LLMDataDist,
    LLMModel,
    ModelRunner,
    Tensor,
)
BY_VALUE: dict[type, tuple[str, ...]] = {
    BlocksCacheKey: ("prompt_cluster_id", "model_id"),
    CacheDesc: ("num_tensors", "shape", "data_type", "placement"),
    CacheKey: ("prompt_cluster_id", "req_id", "model_id", "prefix_id"),
    CacheKeyByIdAndIndex: ("cluster_id", "cache_id", "batch_index"),
    TransferConfig: ("dst_cluster_id", "dst_addrs", "src_layer_range", "src_batch_index"),
    TransferWithCacheKeyConfig: ("cache_key", "src_layer_range", "dst_layer_range", "src_batch_index"),
    LLMReq: ("req_id", "prompt_length", "prompt_cluster_id", "decoder_cluster_id", "prefix_id"),
}
PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; import remote_objects; remote_objects.serve()"


class RemoteProcess:
    """A child process that runs functions of importable modules when asked to."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._lock = threading.Lock()
        self._is_killed = False
        self._dropped: list[int] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_killed(self) -> bool:
        return self._is_killed

    def kill(self) -> None:
        """Kill it as `kill -9` does, and wait until it is gone."""
        self._is_killed = True
        self._process.kill()
        self._process.wait()

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if self._is_killed:
            raise EOFError("the process has been killed")
        with self._lock:
            dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
            _send(self._process.stdin, (dropped, function, arguments, keywords), self._number_of)
            has_returned, result = _receive(self._process.stdout, self._object_of)
        if has_returned:
            return result
        raise result

    def drop(self, number: int) -> None:
        """Let the child forget an object, when it is called next."""
        self._dropped.append(number)

    @staticmethod
    def _number_of(value: object) -> int | None:
        return value.number if isinstance(value, RemoteObject) else None

    def _object_of(self, number: int) -> RemoteObject:
        return RemoteObject(self, number)


class RemoteObject:
    """Stands for an object in a `RemoteProcess`: has its methods and its readable properties."""

    def __init__(self, process: RemoteProcess, number: int) -> None:
        self.process, self.number = process, number

    def __del__(self) -> None:
        self.process.drop(self.number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.process.call(_attribute, self, name)
        if value is not _Method:
            return value
        return lambda *arguments, **keywords: self.process.call(_invoke, self, name, arguments, keywords)


@contextlib.contextmanager
def remote_process(limit: float = subprocesses.LIMIT) -> Iterator[RemoteProcess]:
    """Run a `RemoteProcess` while the block lasts, for at most `limit` seconds."""
    command = [sys.executable, "-c", PROGRAM, *sys.path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocesses.started(command, limit=limit, preload=True, **pipes) as process:
        yield RemoteProcess(process)


def serve() -> None:
    """Answer calls until the other side is gone; what is printed goes to standard error."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    objects = _Objects()
    while True:
        try:
            dropped, function, arguments, keywords = _receive(requests, objects.object_of)
        except EOFError:
            return
        try:
            answer = True, function(*arguments, **keywords)
        except Exception as error:
            answer = False, error
        del arguments, keywords
        objects.drop(dropped)
        _send(answers, answer, objects.number_of)
        del answer


class _Objects:
    """The objects that the other process refers to, each as often as it has been sent."""

    def __init__(self) -> None:
        self._objects: dict[int, object] = {}
        self._counts: Counter[int] = Counter()

    def number_of(self, value: object) -> int | None:
        """Count one more reference to an object; plain data has no number."""
        if not isinstance(value, BY_REFERENCE):
            return None
        self._objects[id(value)] = value
        self._counts[id(value)] += 1
        return id(value)

    def object_of(self, number: int) -> object:
        return self._objects[number]

    def drop(self, numbers: list[int]) -> None:
        self._counts.subtract(numbers)
        for number in set(numbers):
            if not self._counts[number]:
                del self._objects[number], self._counts[number]


class _Method:
    """Stands for a method where a value is expected."""


def _attribute(owner: object, name: str) -> Any:
    value = getattr(owner, name)
    return _Method if callable(value) else value


def _invoke(owner: object, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return getattr(owner, name)(*arguments, **keywords)


class _Pickler(pickle.Pickler):
    def __init__(self, file: BinaryIO, number_of: Callable[[object], int | None]) -> None:
        super().__init__(file)
        self._number_of = number_of

    def persistent_id(self, value: object) -> int | None:
        return self._number_of(value)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, LLMException):
            return _exception, (value.args, value.status_code)
        if isinstance(value, LLMClusterInfo):
            return _cluster_info, (value.remote_cluster_id, value.local_ip_infos, value.remote_ip_infos)
        if type(value) in BY_VALUE:
            return type(value), tuple(getattr(value, name) for name in BY_VALUE[type(value)])
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, object_of: Callable[[int], object]) -> None:
        super().__init__(file)
        self._object_of = object_of

    def persistent_load(self, number: int) -> object:
        return self._object_of(number)


def _exception(arguments: tuple[Any, ...], status_code: Any) -> LLMException:
    return LLMException(*arguments, status_code=status_code)


def _cluster_info(remote_cluster_id: int | None, local: Any, remote: Any) -> LLMClusterInfo:
    info = LLMClusterInfo()
    if remote_cluster_id is not None:
        info.remote_cluster_id = remote_cluster_id
    for ip, port in local:
        info.append_local_ip_info(ip, port)
    for ip, port in remote:
        info.append_remote_ip_info(ip, port)
    return info


def _send(file: BinaryIO, message: object, number_of: Callable[[object], int | None]) -> None:
    buffer = io.BytesIO()
    _Pickler(buffer, number_of).dump(message)
    data = buffer.getvalue()
    file.write(len(data).to_bytes(8, "little") + data)
    file.flush()


def _receive(file: BinaryIO, object_of: Callable[[int], object]) -> Any:
    size = file.read(8)
    data = file.read(int.from_bytes(size, "little"))
    if len(size) < 8 or len(data) < int.from_bytes(size, "little"):
        raise EOFError("the process at the other end is gone")
    return _Unpickler(io.BytesIO(data), object_of).load()
