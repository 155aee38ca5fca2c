"""The server's own certificate: what `serve` can be told of it, and the file in which HAProxy wants it.

HAProxy ends TLS on the HTTP port; routers, workers and Redis know nothing of this.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from decodefleet.worker.config import Frozen


class UnusableCertificate(ValueError):
    """The files cannot be read, or do not belong together."""


class TlsOptions(Frozen):
    ssl_certfile: Path | None = Field(
        None, description="certificate in PEM form, with its chain; HTTPS is spoken then, and no HTTP"
    )
    ssl_keyfile: Path | None = Field(None, description="the certificate's private key, in PEM form")

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile are given together")
        return self

    @property
    def enabled(self) -> bool:
        return self.ssl_certfile is not None

    def pem(self) -> bytes | None:
        """Certificate, chain and key in one, or None without TLS. Raises UnusableCertificate."""
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            return None
        try:
            # an empty password, so that an encrypted key fails instead of asking
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.ssl_certfile, self.ssl_keyfile, password=""
            )
            return self.ssl_certfile.read_bytes().rstrip() + b"\n" + self.ssl_keyfile.read_bytes()
        except OSError as error:
            # of which ssl.SSLError is one
            names = f"{self.ssl_certfile} and {self.ssl_keyfile}"
            raise UnusableCertificate(f"{names}: {error.strerror or error}") from error


def write_private(file: Path, content: bytes) -> None:
    """Readable by us alone from the first byte on."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as output:
        output.write(content)
