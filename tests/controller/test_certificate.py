"""The certificate of HTTPS: what is no certificate is refused, and a renewed one is served by the same process."""

import asyncio
import ssl
from pathlib import Path

import pytest
import trustme

from services.controller.api.certificate import CertificateError, ServerCertificate
from services.controller.settings import Settings


def issued(authority: trustme.CA, folder: Path) -> tuple[Path, Path]:
    """A certificate and its key, written there."""
    made = authority.issue_cert("localhost")
    cert, key = folder / "cert.pem", folder / "key.pem"
    made.cert_chain_pems[0].write_to_path(cert)
    made.private_key_pem.write_to_path(key)
    return cert, key


async def shown(certificate: ServerCertificate, authority: trustme.CA) -> bytes:
    """The certificate that a client is shown."""
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=certificate.context
    )
    async with server:
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trusting, server_hostname="localhost"
        )
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
    assert isinstance(found, bytes)
    return found


@pytest.mark.anyio
async def test_a_renewed_certificate_is_shown_and_one_that_does_not_fit_its_key_is_not(
    tmp_path: Path,
) -> None:
    authority = trustme.CA()
    certificate = ServerCertificate(*issued(authority, tmp_path))
    first = await shown(certificate, authority)
    certificate.renew()
    assert await shown(certificate, authority) == first
    _, key = issued(authority, tmp_path)
    fitting = key.read_bytes()
    key.write_bytes(authority.issue_cert("localhost").private_key_pem.bytes())
    certificate.renew()
    assert await shown(certificate, authority) == first
    key.write_bytes(fitting)
    certificate.renew()
    assert await shown(certificate, authority) != first


def test_files_that_are_no_certificate_are_refused_by_their_names(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    with pytest.raises(CertificateError, match=r"cert.pem.*No such file"):
        ServerCertificate(cert, key)
    issued(trustme.CA(), tmp_path)
    key.write_text("none")
    with pytest.raises(CertificateError, match=r"cert.pem with .*key.pem cannot serve"):
        ServerCertificate(cert, key)


def test_a_key_without_its_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set MESHLOOM_TLS_CERT"):
        Settings(redis_url="redis://x", tls_key=tmp_path / "key.pem")
