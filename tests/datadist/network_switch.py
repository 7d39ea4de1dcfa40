"""An Ethernet switch in user space, between network interfaces of this machine, that a test can make bad.

The kernel's own emulation of bad networks (netem) is a module that many machines lack. This one decides by a
seed which frames are lost, and can act after so many bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import random
import select
import socket
import struct
import threading
import time
from array import array
from collections.abc import Sequence
from typing import Literal

Action = Literal["silence", "silence behind it", "reset"]

FORWARDED = (b"\x08\x00", b"\x08\x06")  # IPv4, ARP
BURST = 64  # frames that are taken from a port at a time
BUFFER_BYTES = 1 << 23

SIOCETHTOOL = 0x8946
OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)  # ETHTOOL_STXCSUM, _STSO, _SGSO, _SGRO
SO_RCVBUFFORCE = 33
PACKET_IGNORE_OUTGOING = 23
ETH_P_ALL = 3


class Switch:
    """Forwards frames between ports while it is open; addresses are learned.

    Attributes:
        delay: seconds that each frame is kept.
        loss: part of the frames that is dropped.
        limit_reached: what `act_after` set has happened.

    Args:
        ports: names of interfaces; their peers must send whole frames (`send_whole_frames`).
        seed: of what is lost.
    """

    def __init__(self, ports: Sequence[str], seed: int = 0) -> None:
        self.delay = 0.0
        self.loss = 0.0
        self.limit_reached = threading.Event()
        self._ports = [_packet_socket(port) for port in ports]
        self._choose = random.Random(seed)
        self._changed = threading.Lock()
        self._is_silent = False
        self._limit: tuple[int, int, Action] | None = None
        self._learned: dict[bytes, int] = {}
        self._kept: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()
        self._wake, self._wake_end = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)
        self._thread.start()

    def silence(self) -> None:
        """Drop every frame until `release`."""
        with self._changed:
            self._is_silent = True

    def release(self) -> None:
        """Forward everything again, at once and without loss."""
        with self._changed:
            self._is_silent = False
            self._limit = None
            self.delay = self.loss = 0.0

    def act_after(self, num_bytes: int, port: int, action: Action) -> None:
        """Act when so many bytes have come from a port over TCP, and one more segment comes.

        Either fall silent, before or behind this segment, or end its connection with resets for both ends.
        """
        with self._changed:
            self.limit_reached.clear()
            self._limit = num_bytes, port, action

    def close(self) -> None:
        self._wake_end.send(b"x")
        self._thread.join()
        for one in (*self._ports, self._wake, self._wake_end):
            one.close()

    def _run(self) -> None:
        poll = select.poll()
        ports = {port.fileno(): number for number, port in enumerate(self._ports)}
        for descriptor in (*ports, self._wake.fileno()):
            poll.register(descriptor, select.POLLIN)
        while True:
            wait = None if not self._kept else max(0.0, self._kept[0][0] - time.monotonic()) * 1e3
            for descriptor, _ in poll.poll(wait):
                if descriptor not in ports:
                    return
                self._take(ports[descriptor])
            while self._kept and self._kept[0][0] <= time.monotonic():
                _, _, number, frame = heapq.heappop(self._kept)
                self._forward(number, frame)

    def _take(self, number: int) -> None:
        for _ in range(BURST):
            try:
                frame = self._ports[number].recv(1 << 16)
            except OSError:  # there is none, or the interface is down
                return
            if frame[12:14] in FORWARDED:
                self._learned[frame[6:12]] = number
                self._judge(number, frame)

    def _judge(self, number: int, frame: bytes) -> None:
        with self._changed:
            frames = self._after_limit(number, frame)
            if self._choose.random() < self.loss:
                return
        for source, one in frames:
            if self.delay:
                due = time.monotonic() + self.delay
                heapq.heappush(self._kept, (due, next(self._order), source, one))
            else:
                self._forward(source, one)

    def _after_limit(self, number: int, frame: bytes) -> list[tuple[int, bytes]]:
        """Return what comes of a frame, each with the port that it seems to come from."""
        if self._is_silent:
            return []
        num_bytes = _num_data_bytes(frame)
        if self._limit is None or self._limit[1] != number or not num_bytes:
            return [(number, frame)]
        num_left, _, action = self._limit
        if num_left > 0:
            self._limit = num_left - num_bytes, number, action
            return [(number, frame)]
        self._limit = None
        self.limit_reached.set()
        if action == "reset":
            onwards, back = resets(frame)
            return [(number, onwards), (self._learned.get(frame[:6], number), back)]
        self._is_silent = True
        return [(number, frame)] if action == "silence behind it" else []

    def _forward(self, source: int, frame: bytes) -> None:
        target = self._learned.get(frame[:6])
        for number, port in enumerate(self._ports):
            if number == target or (target is None and number != source):
                with contextlib.suppress(OSError):  # the interface is down, or its queue is full
                    port.send(frame)


def send_whole_frames(interface: str) -> None:
    """Have the kernel compute checksums and cut segments: no device does it behind a user-space switch."""
    with socket.socket() as control:
        for command in OFFLOADS:
            value = array("I", [command, 0])
            request = struct.pack("16sP16x", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(control, SIOCETHTOOL, request)


def resets(frame: bytes) -> tuple[bytes, bytes]:
    """Return the frames that reset a connection, in place of one of its frames: onwards, and back."""
    header, addresses, ports = frame[:14], (frame[26:30], frame[30:34]), (frame[34:36], frame[36:38])
    sequence, acknowledged = frame[38:42], frame[42:46]
    onwards = header + _reset(*addresses, *ports, sequence, acknowledged)
    reversed_header = header[6:12] + header[:6] + header[12:]
    back = reversed_header + _reset(*addresses[::-1], *ports[::-1], acknowledged, sequence)
    return onwards, back


def _num_data_bytes(frame: bytes) -> int:
    """Return how many bytes a frame carries for TCP, in an IPv4 packet without options."""
    if frame[12:15] != b"\x08\x00\x45" or frame[23] != socket.IPPROTO_TCP:
        return 0
    return int.from_bytes(frame[16:18], "big") - 20 - (frame[46] >> 4) * 4


def _reset(
    source: bytes,
    target: bytes,
    source_port: bytes,
    target_port: bytes,
    sequence: bytes,
    acknowledged: bytes,
) -> bytes:
    """Return an IPv4 packet with an RST+ACK segment."""
    length = struct.pack(">H", 20)
    segment = source_port + target_port + sequence + acknowledged + b"\x50\x14" + bytes(6)
    checksum = _checksum(source + target + b"\x00\x06" + length + segment)
    segment = segment[:16] + checksum + segment[18:]
    packet = b"\x45\x00" + struct.pack(">H", 40) + bytes(4) + b"\x40\x06\x00\x00" + source + target
    return packet[:10] + _checksum(packet) + packet[12:] + segment


def _checksum(data: bytes) -> bytes:
    """Return the checksum of the Internet protocols (RFC 1071) of an even number of bytes."""
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack(">H", ~total & 0xFFFF)


def _packet_socket(interface: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    port.setsockopt(263, PACKET_IGNORE_OUTGOING, 1)  # SOL_PACKET
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    port.bind((interface, 0))
    port.setblocking(False)
    return port
