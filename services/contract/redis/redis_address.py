"""Where Redis is and how it is trusted, as one URL."""

from pathlib import Path
from urllib.parse import SplitResult, quote, urlencode, urlsplit, urlunsplit

from redis.asyncio import ConnectionPool
from redis.exceptions import RedisError

_TLS = "rediss"
_SCHEMES = ("redis://", "rediss://", "unix://")
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"


def redis_address(
    url: str,
    *,
    password: str | None = None,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
) -> str:
    """``url`` with the password and the files of TLS in it, as redis-py reads them.

    Args:
        url: ``rediss://[user[:password]@]host[:port]/[db]`` for TLS; others take no files.
        password: The user's, of any characters; None: it stands in ``url``, if there is one.
        ca: Certificates of the authorities that may have signed the server's; None: the system's.
        cert: This process's own certificate, where the server wants one.
        key: Its key; None: it stands in ``cert``.

    Raises:
        ValueError: It is no URL of Redis, or has options that redis-py does not take; there are files, and it is none of TLS; or a key without a certificate;
            or ``password`` is given and the URL has one, too. It repeats nothing of ``url``, which may have a password.
    """
    parts = parts_of(url)
    if password is not None:
        parts = _with_password(parts, password)
        url = urlunsplit(parts)
    files = {"ssl_ca_certs": ca, "ssl_certfile": cert, "ssl_keyfile": key}
    given = {name: str(path) for name, path in files.items() if path is not None}
    if not given:
        return url
    if parts.scheme != _TLS:
        raise ValueError("MESHLOOM_REDIS_URL: TLS files are set; the URL must begin with rediss://")
    if key is not None and cert is None:
        raise ValueError("MESHLOOM_REDIS_KEY: a key needs its certificate: set MESHLOOM_REDIS_CERT")
    query = "&".join(part for part in (parts.query, urlencode(given)) if part)
    return urlunsplit(parts._replace(query=query))


def parts_of(url: str) -> SplitResult:
    """The parts of a URL of Redis.

    Raises:
        ValueError: It is none, or has options that redis-py does not take. Nothing of it is repeated: it may have a password.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ValueError(
            "the URL of Redis has no valid host and port; in a password that it has, write / as %2F and : as %3A, or "
            "set MESHLOOM_REDIS_PASSWORD"
        ) from None
    if not url.startswith(_SCHEMES):  # redis-py takes no other case
        raise ValueError("the URL of Redis must begin with redis://, rediss:// or unix://")
    _check_options(url)
    return parts


def with_advice(error: str) -> str:
    """What a connection to Redis failed with, and what to do where its certificate is not trusted."""
    if _UNTRUSTED not in error:
        return error
    return (
        f"{error.rstrip('.')}; set MESHLOOM_REDIS_CA to the file of the authority that signed Redis's certificate, and "
        "name Redis in MESHLOOM_REDIS_URL as the certificate does"
    )


def _check_options(url: str) -> None:
    try:
        # Some are looked at with the first connection; nothing is connected to yet.
        ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]  # redis-py's
    except (AttributeError, TypeError, ValueError, RedisError):
        raise ValueError(
            "what follows the ? in the URL of Redis are no options that redis-py takes there; those of TLS need "
            "rediss://, and a ? in a password is written as %3F"
        ) from None


def _with_password(parts: SplitResult, password: str) -> SplitResult:
    if parts.password is not None:
        raise ValueError(
            "MESHLOOM_REDIS_URL has a password, and MESHLOOM_REDIS_PASSWORD or its file is set, too: "
            "leave one of them out"
        )
    host = parts.netloc.rpartition("@")[2]
    user = f"{parts.username or ''}:{quote(password, safe='')}"
    return parts._replace(netloc=f"{user}@{host}")
