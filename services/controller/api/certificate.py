"""The certificate with which the controller serves HTTPS, and its renewal while it serves."""

import ssl
from pathlib import Path
from typing import Final

import structlog

_log: Final = structlog.get_logger()

_Version = tuple[tuple[int, int], ...]


class CertificateError(Exception):
    """The files are no certificate with its key; the message says which files, and why."""


class ServerCertificate:
    """What connections from now on are shown.

    Args:
        cert: The certificate, and those that lead to its authority, as PEM.
        key: Its key; None: it is in the same file.

    Attributes:
        context: Of all connections; a renewal changes what the next ones are shown.

    Raises:
        CertificateError: They cannot be read, or do not belong together.
    """

    def __init__(self, cert: Path, key: Path | None) -> None:
        self._cert = cert
        self._key = key
        self._version = self._found()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load()

    def renew(self) -> None:
        """Take the files again if they have changed; while they do not fit, the former ones serve."""
        found = self._found()
        if found == self._version:
            return
        self._version = found
        try:
            self._load()
        except CertificateError as error:
            _log.warning("certificate_not_renewed", why=str(error))
        else:
            _log.info("certificate_renewed", file=str(self._cert))

    def _load(self) -> None:
        # Into an empty context first: a key that does not fit must not leave the serving one without any.
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._cert, self._key)
            self.context.load_cert_chain(self._cert, self._key)
        except OSError as error:  # ssl.SSLError is one
            files = f"{self._cert}" if self._key is None else f"{self._cert} with {self._key}"
            raise CertificateError(
                f"{files} cannot serve as certificate and key: {error.strerror or error}"
            ) from error

    def _found(self) -> _Version:
        found = []
        for path in (self._cert, self._key or self._cert):
            try:
                status = path.stat()
            except OSError:
                found.append((0, 0))
            else:
                found.append((status.st_mtime_ns, status.st_ino))
        return tuple(found)
