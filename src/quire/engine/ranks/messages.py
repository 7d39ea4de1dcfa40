"""The messages between rank 0 and the other ranks, besides the exchanged tensors.

Pickled: both ends of a channel are processes of one engine, and nobody else holds an end.
"""

from __future__ import annotations

import dataclasses
import pickle
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from quire.kernels.attention.sparse_prefill import KeySelection, SkippedKeys
    from quire.kv.cache.metadata import PagedAttentionCacheMetaData
    from quire.models.checkpoints.loading import WeightOptions
    from quire.models.config import ModelConfig

HEARTBEAT_INTERVAL = 0.5

_LENGTH = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True, slots=True)
class RankStart:
    """The first message to a rank: which it is, and what it loads."""

    rank: int
    size: int
    rendezvous: int  # descriptor of a file through which the ranks find each other
    timeout: float  # seconds
    model_path: str
    model: ModelConfig  # the whole model's
    weights: WeightOptions
    num_threads: int


@dataclasses.dataclass(frozen=True, slots=True)
class AllocateCaches:
    """Take memory for the KV cache of each group and for states; then the rank is ready again.

    It takes the place of what the rank had before.
    """

    metadata: tuple[PagedAttentionCacheMetaData, ...]
    file: int | None  # with the KV of all ranks, a descriptor that the process has; None: each has its own
    num_slots: int = 0  # sequences that have states of recurrent layers; 0: there are no such layers
    num_states: int = 0  # of theirs, and that are kept for the prefix cache


@dataclasses.dataclass(frozen=True, slots=True)
class Reserve:
    """Allocate the memory for steps of this many tokens, so that it does not move."""

    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class CompileOnly:
    """Compile kernels and compute nothing from now on (`KernelSet.compile_only`), or do both again."""

    begins: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Forward:
    """Compute the tokens [T] of a step, whose ids rank 0 broadcasts; the fields are of its `AttentionBatch`.

    Key scores are missing: each rank would have those of its own heads only.
    """

    positions: npt.NDArray[np.int64]
    block_size: int
    slot_blocks: npt.NDArray[np.int64]  # [G, T], of each cache group
    slot_offsets: npt.NDArray[np.int64]
    num_cached_tokens: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int32]  # [G, S, max_blocks]
    skipped_keys: SkippedKeys | None
    key_selection: KeySelection | None
    state_numbers: npt.NDArray[np.int64] | None = None  # as of `StepStates`; None: no layer is recurrent
    num_state_tokens: npt.NDArray[np.int64] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Logits:
    """Compute this rank's part of the logits of hidden states [R, hidden], which rank 0 broadcasts."""

    num_rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class WholeStep:
    """Compute a step, and the logits of some of its tokens, by `StepGraphs`, as rank 0 does."""

    step: Forward
    logit_rows: npt.NDArray[np.int64] | None  # [R] of these tokens; None: of all


@dataclasses.dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy KV blocks [N, 2] (from, to) of a cache group."""

    copies: npt.NDArray[np.int32]
    group: int


@dataclasses.dataclass(frozen=True, slots=True)
class CopyStates:
    """Copy states of recurrent layers [N, 2] (from, to), see `StateCache.copy`."""

    copies: npt.NDArray[np.int32]
    at_once: bool


ToRank = (
    RankStart
    | AllocateCaches
    | Reserve
    | CompileOnly
    | Forward
    | Logits
    | WholeStep
    | CopyBlocks
    | CopyStates
)


@dataclasses.dataclass(frozen=True, slots=True)
class RankAlive:
    """The rank's process runs; sent every `HEARTBEAT_INTERVAL` seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankConnecting:
    """The rank looks for the others now."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankReady:
    """The rank has its shard of the weights, or the KV cache that it was to have."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankFailed:
    """The rank has met an error, and its process ends.

    `is_consequence` says that it only noticed that another rank had stopped taking part.
    """

    reason: str
    is_consequence: bool


FromRank = RankAlive | RankConnecting | RankReady | RankFailed


class Channel:
    """One end of the socket between rank 0 and another rank. Several threads may send, and one receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the socket's descriptor, readable when a message has come or the other end is gone."""
        return self._socket.fileno()

    def send(self, message: ToRank | FromRank) -> None:
        """Send a message.

        Raises:
            OSError: the other end is gone, or takes nothing any more.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """Wait for a message and return it.

        Raises:
            EOFError: the other end is gone.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return pickle.loads(self._read(length))

    def set_send_timeout(self, seconds: float) -> None:
        """Let `send` fail if the other end takes nothing for so long."""
        seconds_and_micros = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds_and_micros)

    def end(self) -> None:
        """Let every wait for messages, at both ends, end."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end is gone already

    def close(self) -> None:
        """Release the descriptor."""
        self._socket.close()

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except ConnectionError:
                count = 0
            if not count:
                raise EOFError
            view = view[count:]
        return data
