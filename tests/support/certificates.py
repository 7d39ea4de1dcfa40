"""Certificates for tests, made by the openssl command."""

import dataclasses
import subprocess


@dataclasses.dataclass(frozen=True)
class CertificateFiles:
    certificate: str
    key: str


def certificate(folder, name, *, key_password=None):
    """Make a certificate for localhost and 127.0.0.1 that is its own root."""
    files = CertificateFiles(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
    protection = ["-passout", f"pass:{key_password}"] if key_password else ["-nodes"]
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-keyout", files.key, "-out", files.certificate, "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", *protection),
        ],
        check=True,
        capture_output=True,
    )
    return files
