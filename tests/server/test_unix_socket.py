"""A Unix socket belongs to one server at a time, and goes with it."""

import os
import socket
import stat

import pytest

from quire.errors import ConfigError
from quire.server.http.unix_socket import MAX_PATH_LENGTH, unix_socket


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # paths of Unix sockets are short
    return "quire.sock"


def listen_once(path):
    """Leave a socket at `path` of which nobody takes connections any more."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
        dead.listen()


@pytest.mark.parametrize(("access", "mode"), [("owner", 0o600), ("group", 0o660), ("all", 0o666)])
def test_only_those_may_connect_who_are_named_and_nothing_is_left(path, access, mode):
    with unix_socket(path, access) as bound:
        assert bound.getsockname() == path
        assert stat.S_IMODE(os.lstat(path).st_mode) == mode
    assert os.listdir() == []


def test_a_dead_servers_socket_is_replaced(path):
    listen_once(path)
    with unix_socket(path, "owner") as bound:
        bound.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


@pytest.mark.parametrize("listens_already", [False, True])
def test_a_live_servers_socket_is_not(path, listens_already):
    with unix_socket(path, "owner") as bound:
        if listens_already:
            bound.listen()
        with pytest.raises(ConfigError, match=r"another server listens on EdgeConfig\.uds 'quire\.sock'"):
            unix_socket(path, "owner").__enter__()
        bound.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


@pytest.mark.parametrize("backlog", [0, 8])
def test_nor_is_that_of_another_program(path, backlog):
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as waiting:
        other.bind(path)
        other.listen(backlog)
        waiting.connect(path)
        with pytest.raises(ConfigError, match="another server listens"):
            unix_socket(path, "owner").__enter__()
        assert os.listdir() == [path]


def test_what_is_no_socket_stays(path):
    with open(path, "w") as file:
        file.write("precious")
    with pytest.raises(ConfigError, match="not a socket; choose another path"):
        unix_socket(path, "owner").__enter__()
    with open(path) as file:
        assert file.read() == "precious"


def test_a_file_that_took_its_place_stays(path):
    with unix_socket(path, "owner"):
        os.unlink(path)
        listen_once(path)
    assert os.listdir() == [path]


@pytest.mark.parametrize(
    ("unusable", "message"),
    [
        ("x" * (MAX_PATH_LENGTH + 1), "has 108 bytes, .* at most 107"),
        ("nowhere/quire.sock", r"cannot listen on the Unix socket 'nowhere/quire\.sock' \(.*No such file"),
    ],
)
def test_paths_that_cannot_be(path, unusable, message):
    with pytest.raises(ConfigError, match=message):
        unix_socket(unusable, "owner").__enter__()
    assert os.listdir() == []
