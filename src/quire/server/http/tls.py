"""TLS: the server's certificate and key, checked at startup and reloaded when they change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Iterator

from quire.config import EdgeConfig
from quire.errors import ConfigError

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 10.0
"""Interval of checks for changed files, in seconds."""

_FileStamp = tuple[int, int, int] | None  # inode, size, modification time; None: no access


class ServerCertificate:
    """A certificate with its key, in the TLS context of new connections.

    Args:
        config: configuration with `ssl_certfile`.

    Raises:
        ConfigError: a file is unreadable or invalid, or the key does not match the certificate.
    """

    def __init__(self, config: EdgeConfig) -> None:
        self._certfile = config.ssl_certfile
        self._keyfile = config.ssl_keyfile or config.ssl_certfile
        self._stamps = self._current_stamps()
        self.context = _new_context()
        self._load()
        if config.ssl_ca_certs:
            _require_client_certificates(self.context, config.ssl_ca_certs)

    def reload_if_changed(self) -> None:
        """Reload the files if they have changed; if they are invalid, log that and keep the old ones."""
        stamps = self._current_stamps()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self._load()
        except ConfigError as error:
            logger.warning("%s; the previous certificate stays in use", error)
        else:
            logger.info("the certificate %s was reloaded", self._certfile)

    async def watch(self, interval: float = CHECK_INTERVAL) -> None:
        """Reload the files whenever they change; never returns.

        Args:
            interval: seconds between checks.
        """
        while True:
            await asyncio.sleep(interval)
            await asyncio.to_thread(self.reload_if_changed)  # files may be on a slow disk

    def _load(self) -> None:
        """Load the files into the context, which is unchanged if they are invalid."""
        certificate = _content("ssl_certfile", self._certfile)
        key = _content("ssl_keyfile", self._keyfile)
        try:
            with _in_memory(certificate) as certfile, _in_memory(key) as keyfile:
                for context in (_new_context(), self.context):
                    context.load_cert_chain(certfile, keyfile, password=self._refuse_encrypted)
        except ssl.SSLError as error:
            raise ConfigError(
                f"EdgeConfig.ssl_certfile {self._certfile!r} with the key in {self._keyfile!r} "
                f"(EdgeConfig.ssl_keyfile) cannot be used: {_reason(error)}"
            ) from None

    def _refuse_encrypted(self) -> str:
        raise ConfigError(
            f"the key in {self._keyfile!r} (EdgeConfig.ssl_keyfile) is encrypted, which is not supported; "
            "decrypt it, for example with 'openssl pkey'"
        )

    def _current_stamps(self) -> tuple[_FileStamp, _FileStamp]:
        return _stamp(self._certfile), _stamp(self._keyfile)


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _require_client_certificates(context: ssl.SSLContext, path: str) -> None:
    text = _content("ssl_ca_certs", path).decode("ascii", "replace")
    try:
        context.load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"EdgeConfig.ssl_ca_certs {path!r} cannot be used: {error}") from None
    context.verify_mode = ssl.CERT_REQUIRED


def _reason(error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key does not match the certificate"
    return f"they must be a certificate and a private key as PEM ({error})"


def _content(name: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"EdgeConfig.{name} {path!r} cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Give content a path, so that the loaded bytes are the checked ones."""
    descriptor = os.memfd_create("tls")
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _stamp(path: str) -> _FileStamp:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
