"""TLS: real handshakes, wrong files, and certificates that change while the server runs."""

import asyncio
import dataclasses
import os
import shutil
import socket
import ssl

import httpx
import openai
import pytest
from live_server import served

from certificates import certificate
from quire.config import EdgeConfig
from quire.errors import ConfigError
from quire.server.http.listening import listener
from quire.server.http.tls import ServerCertificate


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two certificates, and one whose key is encrypted."""
    folder = tmp_path_factory.mktemp("certificates")
    return {
        "first": certificate(folder, "first"),
        "second": certificate(folder, "second"),
        "locked": certificate(folder, "locked", key_password="secret"),
    }


@pytest.fixture
def edge(made, tmp_path):
    """TLS with files that a test may change."""
    install(made["first"], tmp_path)
    return EdgeConfig(ssl_certfile=str(tmp_path / "cert.pem"), ssl_keyfile=str(tmp_path / "key.pem"))


def install(files, folder):
    """Put a certificate and its key into place, as a renewal does."""
    for source, name in [(files.key, "key.pem"), (files.certificate, "cert.pem")]:
        shutil.copy(source, folder / "new")
        os.replace(folder / "new", folder / name)


def trusting(*files):
    context = ssl.create_default_context()
    for one in files:
        context.load_verify_locations(one.certificate)
    return context


def name_shown(listens, made):
    """Return whose certificate a new connection is shown."""
    port = listens.socket.getsockname()[1]
    context = trusting(*made.values())
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        return secure.getpeercert()["subject"][0][0][1]


def test_clients_speak_tls_and_nothing_else(app, edge, made):
    with listener("127.0.0.1", 0, edge) as listens, served(app, listens) as url:
        assert url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=trusting(made["first"])) as http:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0)
            stream = client.completions.create(model="fake", prompt="Hi", max_tokens=3, stream=True)
            assert "".join(event.choices[0].text for event in stream) == "the"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health", verify=trusting(made["second"]))
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"{url.replace('https', 'http')}/health")
        assert listens.tls.minimum_version is ssl.TLSVersion.TLSv1_2


def test_clients_have_to_present_a_certificate(app, made):
    mine = made["second"]
    files = made["first"]
    edge = EdgeConfig(ssl_certfile=files.certificate, ssl_keyfile=files.key, ssl_ca_certs=mine.certificate)
    with listener("127.0.0.1", 0, edge) as listens, served(app, listens) as url:
        stranger = trusting(files)
        with pytest.raises(
            (httpx.ReadError, httpx.RemoteProtocolError), match=r"CERTIFICATE_REQUIRED|disconnect"
        ):
            httpx.get(f"{url}/health", verify=stranger)
        known = trusting(files)
        known.load_cert_chain(mine.certificate, mine.key)
        assert httpx.get(f"{url}/health", verify=known).status_code == 200


def test_a_renewed_certificate_is_shown_to_new_connections(app, edge, made, tmp_path, caplog):
    with listener("127.0.0.1", 0, edge) as listens, served(app, listens):
        assert name_shown(listens, made) == "first"
        listens.certificate.reload_if_changed()
        assert name_shown(listens, made) == "first"
        install(made["second"], tmp_path)
        assert name_shown(listens, made) == "first"
        listens.certificate.reload_if_changed()
        assert name_shown(listens, made) == "second"
        (tmp_path / "cert.pem").write_text("half a certif")
        listens.certificate.reload_if_changed()
        shutil.copy(made["first"].certificate, tmp_path / "cert.pem")
        listens.certificate.reload_if_changed()
        (tmp_path / "cert.pem").unlink()
        listens.certificate.reload_if_changed()
        listens.certificate.reload_if_changed()  # says so once
        assert name_shown(listens, made) == "second"
    assert [record.message.split("; ")[-1] for record in caplog.records] == [
        "the previous certificate stays in use"
    ] * 3
    assert "the key does not match the certificate" in caplog.text


async def test_changes_are_noticed(app, edge, made, tmp_path):
    loads = asyncio.Queue()
    loop = asyncio.get_running_loop()
    with listener("127.0.0.1", 0, edge) as listens, served(app, listens):
        own = listens.certificate
        reload = own.reload_if_changed
        own.reload_if_changed = lambda: (reload(), loop.call_soon_threadsafe(loads.put_nowait, None))
        watching = asyncio.create_task(own.watch(0.0))
        install(made["second"], tmp_path)
        while name_shown(listens, made) != "second":
            await loads.get()
        watching.cancel()


@pytest.mark.parametrize(
    ("certfile", "keyfile", "message"),
    [
        ("first.pem", "second.key", r"first\.pem' with the key in '.*second\.key' .*does not match"),
        ("first.pem", "", r"must be a certificate and a private key as PEM"),
        ("first.key", "first.key", r"must be a certificate and a private key as PEM"),
        ("nowhere.pem", "first.key", r"EdgeConfig\.ssl_certfile '.*nowhere\.pem' cannot be read"),
        ("first.pem", "nowhere.key", r"EdgeConfig\.ssl_keyfile '.*nowhere\.key' cannot be read"),
        ("locked.pem", "locked.key", r"locked\.key' \(EdgeConfig\.ssl_keyfile\) is encrypted"),
    ],
)
def test_wrong_files_are_named(made, certfile, keyfile, message):
    folder = os.path.dirname(made["first"].key)
    named = EdgeConfig(
        ssl_certfile=f"{folder}/{certfile}", ssl_keyfile=f"{folder}/{keyfile}" if keyfile else ""
    )
    with pytest.raises(ConfigError, match=message):
        ServerCertificate(named)


def test_wrong_roots_are_named(edge, made):
    named = dataclasses.replace(edge, ssl_ca_certs=made["first"].key)
    with pytest.raises(ConfigError, match=r"EdgeConfig\.ssl_ca_certs '.*first\.key' cannot be used"):
        ServerCertificate(named)


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_ca_certs"])
def test_what_belongs_to_a_certificate_is_not_given_without(name):
    with pytest.raises(ConfigError, match=rf"EdgeConfig\.{name} is given without EdgeConfig\.ssl_certfile"):
        EdgeConfig(**{name: "a.pem"})
