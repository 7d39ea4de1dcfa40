"""Machines of their own on this one: network namespaces that a switch in user space joins.

Each has one interface, `eth0`, whose link can be cut: then what is sent fails. When the switch falls silent,
it is lost without an error. It takes root and `ip`; `why_not_permitted` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from network_switch import Switch, send_whole_frames

NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000
BUFFER_SIZES = "4096 65536 131072"  # least, initial, most: so that little of a transfer is on the way

_numbers = itertools.count()


class Machine:
    """A network namespace.

    Attributes:
        namespace: its name.
        address: of its interface.
        port: its number at the switch.
    """

    def __init__(self, namespace: str, address: str, port: int) -> None:
        self.namespace = namespace
        self.address = address
        self.port = port

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs another in the namespace."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def cut(self) -> None:
        """Take the link down."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def restore(self) -> None:
        """Take the link up again."""
        _ip("-n", self.namespace, "link", "set", "eth0", "up")


class Network:
    """Machines, by the names that they were given, and the switch between them."""

    def __init__(self, machines: dict[str, Machine], switch: Switch) -> None:
        self.machines = machines
        self.switch = switch


def why_not_permitted() -> str | None:
    """Return why namespaces cannot be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip (iproute2)"
    name = _namespace("probe")
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {error.stderr.strip()}"
    _remove(name)
    return None


@contextlib.contextmanager
def network_of(*names: str, seed: int = 0) -> Iterator[Network]:
    """Make a network of machines; it is removed at the end, or by the next one if this process is killed."""
    _remove_leftovers()
    with contextlib.ExitStack() as stack:
        machines, ports = {}, []
        for number, name in enumerate(names):
            machine = Machine(_namespace(name), f"10.83.0.{number + 1}", number)
            ports.append(f"q{os.getpid()}s{next(_numbers)}")
            stack.callback(_remove, machine.namespace)
            stack.callback(_remove_interface, ports[-1])
            _set_up(machine, ports[-1])
            machines[name] = machine
        switch = Switch(ports, seed)
        stack.callback(switch.close)
        yield Network(machines, switch)


def enter(namespace: str) -> None:
    """Let this thread, and those that it starts from now on, be in a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (NAMESPACES / namespace).open() as opened:
        if libc.setns(opened.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


def _set_up(machine: Machine, port: str) -> None:
    """Make a namespace and its interface, which has the other end of a cable to `port`."""
    name, interface = machine.namespace, port.replace("s", "m")
    _ip("netns", "add", name)
    _ip("link", "add", port, "type", "veth", "peer", "name", interface)
    send_whole_frames(interface)
    _ip("link", "set", interface, "netns", name, "name", "eth0")
    _ip("-n", name, "address", "add", f"{machine.address}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "link", "set", "eth0", "up")
    _ip("link", "set", port, "up")
    limit = f"for limit in tcp_rmem tcp_wmem; do echo {BUFFER_SIZES} > /proc/sys/net/ipv4/$limit; done"
    _run(machine.command(["sh", "-c", limit]))


def _namespace(name: str) -> str:
    return f"quire-{os.getpid()}-{name}"


def _remove(namespace: str) -> None:
    """Remove a namespace, and with it its interface at both ends, if it is there."""
    if (NAMESPACES / namespace).exists():
        _ip("netns", "delete", namespace)


def _remove_interface(port: str) -> None:
    """Remove an interface and the other end of its cable, if it is there."""
    if Path("/sys/class/net", port).exists():
        _ip("link", "delete", port)


def _remove_leftovers() -> None:
    """Remove the namespaces of processes that are gone."""
    for path in NAMESPACES.glob("quire-*-*"):
        if not Path("/proc", path.name.split("-")[1]).exists():
            _remove(path.name)


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
