"""What clients keep of answers, and when a request is made again."""

from collections import OrderedDict
from typing import Any, Final, TypedDict, TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from tenacity import (
    RetryCallState,
    retry_if_exception_type,
    retry_if_result,
    stop_after_delay,
    wait_random_exponential,
)

from meshloom.client.errors import ClientError, UnreachableError, unreadable

View = TypeVar("View", bound=BaseModel)
Parameters = dict[str, Any]

NOT_MODIFIED: Final = 304
ERRORS_FROM: Final = 400
STREAM_MEDIA_TYPE: Final = "text/event-stream"
MOST_ANSWER_BYTES: Final = 1 << 28
"""As much as a controller keeps of answers that are not read; of a stream: between two entries."""
IS_DOWNLOAD: Final = "meshloom_download"
"""The extension of a request for a file, which is bounded by the size that was promised."""
NOTHING_PACKED: Final = {"Accept-Encoding": "identity"}
_LATER: Final = frozenset({429, 503})
_MOST_KEPT: Final = 64


def is_unchanged(response: httpx.Response) -> bool:
    """Whether it says that what the client has is still so."""
    was_asked = "If-None-Match" in response.request.headers
    return response.status_code == NOT_MODIFIED and was_asked


def media_type_of(response: httpx.Response) -> str:
    """What it says that its content is, without parameters."""
    media_type, _, _ = response.headers.get("Content-Type", "").partition(";")
    return str(media_type).strip().lower()


def parsed(response: httpx.Response, view: type[View]) -> View:
    """What an answer holds.

    Raises:
        UnreachableError: It is no JSON, so whatever answered is no controller.
        ClientError: It is JSON that this version cannot read.
    """
    try:
        return view.model_validate_json(response.content)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        said = f"{response.url} answered {response.status_code} with"
        if fault["type"] == "json_invalid":
            raise UnreachableError(
                f"{said} {media_type_of(response) or 'no type'}, which is no JSON; set MESHLOOM_URL to the "
                "address of a controller"
            ) from error
        raise unreadable(said, view.__name__, error) from error


def take_as_it_comes(response: httpx.Response) -> None:
    """Have a body read in UTF-8 and as it is: packed, which nobody asked for, it may unpack to any size."""
    if "Content-Encoding" in response.headers:
        del response.headers["Content-Encoding"]
    response.encoding = "utf-8"


def is_header_value(text: str) -> bool:
    """Whether a header can carry a text; of what a controller sends it can carry all."""
    return bool(text) and text.isascii() and text.isprintable() and not text.endswith(" ")


def authorization(token: str | None) -> dict[str, str]:
    """The header that shows the token.

    Raises:
        ClientError: No header can carry it; what errors of HTTP say of one would show it.
    """
    if not token:
        return {}
    if not is_header_value(token):
        raise ClientError(
            "the token ends with a blank, or has characters that no HTTP header can carry: look at MESHLOOM_TOKEN"
        )
    return {"Authorization": f"Bearer {token}"}


class BodyMeter:
    """Counts what an answer brings.

    Args:
        response: Of which nothing was read yet.
    """

    def __init__(self, response: httpx.Response) -> None:
        self._url = response.url
        self._is_stream = media_type_of(response) == STREAM_MEDIA_TYPE
        self._size = 0

    def count(self, part: bytes) -> bytes:
        """The part itself.

        Raises:
            UnreachableError: With it, more came than any controller sends.
        """
        is_next_entry = self._is_stream and b"\n\n" in part
        self._size = len(part) if is_next_entry else self._size + len(part)
        if self._size > MOST_ANSWER_BYTES:
            raise UnreachableError(
                f"{self._url} answered with more than {MOST_ANSWER_BYTES >> 20} MiB, which no controller does; "
                "set MESHLOOM_URL to a controller's address"
            )
        return part


class RetryOptions(TypedDict):
    """The arguments that ``Retrying`` and ``AsyncRetrying`` have in common."""

    retry: Any
    wait: Any
    stop: Any
    retry_error_callback: Any


def retry_options(patience_s: float) -> RetryOptions:
    """Retry, with back-off and jitter, a request without an answer or with 429 or 503.

    Args:
        patience_s: Seconds, counted from the first try. 0: one try.
    """
    return RetryOptions(
        retry=retry_if_exception_type(httpx.TransportError) | retry_if_result(_asks_to_wait),
        wait=wait_random_exponential(multiplier=0.1, max=2),
        stop=stop_after_delay(patience_s),
        retry_error_callback=_last_outcome,
    )


def _asks_to_wait(response: httpx.Response) -> bool:
    return response.status_code in _LATER


def _last_outcome(state: RetryCallState) -> httpx.Response:
    if state.outcome is None:
        raise RuntimeError("a request was given up before it was made")
    response: httpx.Response = state.outcome.result()
    return response


class AnswerCache:
    """The newest answers with their ETags: who polls parses nothing that did not change."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[str, BaseModel]] = OrderedDict()

    def condition(self, key: str) -> dict[str, str]:
        """The header that asks only for what differs from the answer kept."""
        known = self._kept.get(key)
        return {"If-None-Match": known[0]} if known else {}

    def read(self, key: str, response: httpx.Response, view: type[View]) -> View:
        """The answer, from the response or (304) as it was kept."""
        if response.status_code == NOT_MODIFIED:
            self._kept.move_to_end(key)
            kept = self._kept[key][1]
            if isinstance(kept, view):
                return kept
            raise TypeError(f"{key} was read as {type(kept).__name__} before")
        answer = parsed(response, view)
        tag = response.headers.get("ETag", "")
        if is_header_value(tag):
            self._kept[key] = (tag, answer)
            self._kept.move_to_end(key)
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return answer


def cache_key(path: str, params: Parameters, view: type[BaseModel]) -> str:
    """The name of an answer in a cache."""
    return f"{view.__name__} {path}?{sorted(params.items())}"
