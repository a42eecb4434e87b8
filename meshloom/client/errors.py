"""What a client raises, each with one text that says what to do.

::

    ClientError
     +- UnreachableError    no controller answers at the URL
     +- RefusedError        the controller answered with a problem (RFC 9457)
     +- WaitTimeoutError    the job did not end in time; also a TimeoutError
     +- DownloadError       a file that came is not the one that was promised
"""

from typing import Final, Self

import httpx
from pydantic import ValidationError

from services.contract.api.fault_words import in_words
from services.contract.words.control_characters import harmless
from services.contract.words.problems import Problem, listed


class ClientError(Exception):
    """A request, or what was made of its answer, failed.

    Its text shows control characters as escapes: Python writes it to a terminal where nobody catches it, and ranks
    of others may have chosen some of its words; ``RefusedError.problem`` has these as they are.
    """

    def __str__(self) -> str:
        return harmless(super().__str__())


class UnreachableError(ClientError):
    """No controller answers at the URL."""


def unreachable(base_url: str, error: httpx.RequestError) -> UnreachableError:
    """The error for a request that nothing answered, with what to do."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return UnreachableError(
            f"the certificate of {base_url} is not trusted ({error}); set SSL_CERT_FILE to the file "
            "of the authority that signed it, and connect by a name that the certificate has"
        )
    return UnreachableError(
        f"no controller answers at {base_url} ({error}); start one with `make up`, "
        "or set MESHLOOM_URL"
    )


def unusable(base_url: str, error: Exception) -> ClientError:
    """The error for a connection that cannot be tried."""
    return ClientError(
        f"{base_url!r} cannot be connected to ({error}); look at MESHLOOM_URL, and at HTTP_PROXY, HTTPS_PROXY, "
        "ALL_PROXY, NO_PROXY, SSL_CERT_FILE and SSL_CERT_DIR"
    )


def unreadable(said: str, view: str, error: ValidationError) -> ClientError:
    """The error for what a controller said that this version has no ``view`` for."""
    fault = error.errors(include_url=False)[0]
    place = ".".join(map(str, fault["loc"])) or "the whole"
    return ClientError(
        f"{said} what this version of Meshloom cannot read as {view} ({place}: {in_words(fault)}); "
        "use the controller's version, and look whether MESHLOOM_URL is its address"
    )


class RefusedError(ClientError):
    """The controller refused the request.

    Attributes:
        problem: Its answer: ``code`` is stable, ``errors`` has each fault with its JSON pointer.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(listed(problem.errors) or problem.detail or problem.title)
        self.problem = problem

    def __reduce__(self) -> tuple[type[Self], tuple[Problem]]:
        # By default it is made again of its text, which fails: a pool of processes waits for it for ever.
        return type(self), (self.problem,)


class WaitTimeoutError(ClientError, TimeoutError):
    """The job did not reach a resting state within ``timeout_s``. It goes on."""


class DownloadError(ClientError):
    """A file that was downloaded does not have the promised digest, or cannot be had."""


_REFUSALS: Final = range(400, 600)


def refusal(response: httpx.Response) -> RefusedError | UnreachableError:
    """The error for an answer that is none to the request, and whose body was read."""
    said = f"{response.url} answered {response.status_code} {response.reason_phrase}"
    if response.status_code not in _REFUSALS:
        return UnreachableError(f"{said}; set MESHLOOM_URL to the address of a controller")
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        problem = Problem(
            type="about:blank",
            title=response.reason_phrase,
            status=response.status_code,
            code="unknown",
            detail=said,
        )
    return RefusedError(problem)
