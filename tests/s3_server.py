"""An object store for tests: moto's S3 server in a process of its own, with faults that a test chooses.

``python -m tests.s3_server`` listens on a free port and writes its number as the first line on stdout. moto
compares and writes in two steps, so requests are answered one at a time here: then ``If-None-Match: *``
lets one of two writers through, as the interface promises. Buckets lie in memory, and end with the process.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import boto3
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from services.local.children import die_with_parent
from tests.parts import ROOT

ENVIRONMENT: Final = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "none",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKET: Final = "checkpoints"
_CONTROL: Final = "/.faults"
_Start = Callable[..., Any]
_Write = Callable[[bytes], object]


@dataclass(frozen=True)
class Fault:
    """What the server answers instead, to requests of these methods whose path or query has ``within`` in it.

    ``code`` "": it carries the request out and loses the answer. ``after``: so many requests are answered
    well first; ``times``: then so many are not; None: all. ``says``: this text instead, with the status, as a proxy
    does that knows nothing of objects. ``keeps``: so many bytes of the true answer's body and these of its headers.
    """

    methods: tuple[str, ...] = ("GET", "HEAD", "PUT", "POST", "DELETE")
    within: str = ""
    code: str = "SlowDown"
    status: int = 503
    after: int = 0
    times: int | None = None
    says: str | None = None
    keeps: int | None = None
    headers: tuple[str, ...] = ()


class _Faulty:
    """The application, one request at a time."""

    def __init__(self) -> None:
        self._app = create_backend_app("s3")
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._met = 0

    def __call__(self, environ: dict[str, Any], start: _Start) -> Iterable[bytes]:
        with self._lock:
            if environ["PATH_INFO"] == _CONTROL:
                chosen = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
                self._fault, self._met = (None if chosen is None else Fault(**chosen)), 0
                start("200 OK", [])
                return [b""]
            if not self._is_met(environ):
                return list(self._app(environ, start))
            assert self._fault is not None
            return self._answer_amiss(self._fault, environ, start)

    def _answer_amiss(
        self, fault: Fault, environ: dict[str, Any], start: _Start
    ) -> Iterable[bytes]:
        if fault.keeps is not None:

            def begin(status: str, headers: list[tuple[str, str]], *_: object) -> _Write:
                start(status, [one for one in headers if one[0].lower() in fault.headers])
                return lambda _: None

            return [b"".join(self._app(environ, begin))[: fault.keeps]]
        if fault.says is not None:
            start(f"{fault.status} Fault", [("Content-Type", "text/html")])
            return [fault.says.encode()]
        if not fault.code:
            list(self._app(environ, _unheard))
        start(f"{fault.status} Fault", [("Content-Type", "application/xml")])
        code = fault.code or "InternalError"
        return [f"<Error><Code>{code}</Code><Message>chosen</Message></Error>".encode()]

    def _is_met(self, environ: dict[str, Any]) -> bool:
        fault = self._fault
        if fault is None or environ["REQUEST_METHOD"] not in fault.methods:
            return False
        if fault.within not in f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}":
            return False
        self._met += 1
        return fault.after < self._met <= fault.after + (fault.times or sys.maxsize)


def _unheard(*_: object) -> _Write:
    """Takes an answer that is lost on its way."""
    return lambda _: None


class _Silent(MotoRequestHandler):
    def log(self, type: str, message: str, *args: object) -> None:  # noqa: A002 werkzeug's name
        """Nothing."""


@dataclass(frozen=True)
class S3Server:
    """A server that runs, with an empty bucket.

    Attributes:
        url: Its endpoint.
        environment: Variables with which a client finds it.
    """

    url: str
    environment: dict[str, str]
    _client: Any
    _process: "subprocess.Popen[bytes]"

    def fail(self, fault: Fault) -> None:
        """Answer so from now on, until ``repair``."""
        self._order(asdict(fault))

    def repair(self) -> None:
        """Answer as a store does."""
        self._order(None)

    def freeze(self) -> None:
        """Answer nothing, and refuse no connection, from now on."""
        self._process.send_signal(signal.SIGSTOP)

    def client(self) -> Any:  # noqa: ANN401 the tests' own, without types of its answers
        """A client of its own, for what a test looks at or damages."""
        return self._client

    def keys(self, prefix: str = "") -> list[str]:
        """All objects of the bucket."""
        pages = (
            self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        )
        return [one["Key"] for page in pages for one in page.get("Contents", ())]

    def unfinished(self) -> list[str]:
        """The keys of multipart uploads that are not finished."""
        answer = self.client().list_multipart_uploads(Bucket=BUCKET)
        return [one["Key"] for one in answer.get("Uploads", ())]

    def _order(self, fault: object) -> None:
        request = urllib.request.Request(  # noqa: S310 the tests' own server
            self.url + _CONTROL, data=json.dumps(fault).encode(), method="PUT"
        )
        urllib.request.urlopen(request, timeout=60).close()  # noqa: S310 the same


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server with an empty bucket, as long as the block lasts."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.s3_server"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,  # noqa: PLW1509 prctl is one call and takes no lock
    )
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        # One for all looks: making a client takes as long as a hundred requests.
        client = boto3.session.Session(
            aws_access_key_id=ENVIRONMENT["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
            region_name=ENVIRONMENT["AWS_REGION"],
        ).client("s3", endpoint_url=url)
        client.create_bucket(Bucket=BUCKET)
        server = S3Server(url, {**ENVIRONMENT, "AWS_ENDPOINT_URL_S3": url}, client, process)
        yield server
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    """Serve until killed."""
    server = make_server("127.0.0.1", 0, _Faulty(), threaded=True, request_handler=_Silent)
    print(server.port, flush=True)  # noqa: T201 whoever started it reads it
    server.serve_forever()


if __name__ == "__main__":
    main()
