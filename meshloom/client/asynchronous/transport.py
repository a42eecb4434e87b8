"""Requests to one controller: retries, errors, ETags and streams."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Final, Self, cast

import httpx
from httpx_sse import ServerSentEvent, aconnect_sse
from pydantic import ValidationError
from tenacity import AsyncRetrying

from meshloom.client.answers import (
    ERRORS_FROM,
    IS_DOWNLOAD,
    NOTHING_PACKED,
    STREAM_MEDIA_TYPE,
    AnswerCache,
    BodyMeter,
    Parameters,
    View,
    authorization,
    cache_key,
    is_header_value,
    is_unchanged,
    media_type_of,
    retry_options,
    take_as_it_comes,
)
from meshloom.client.downloads import PartialFile
from meshloom.client.errors import (
    ClientError,
    RefusedError,
    UnreachableError,
    refusal,
    unreachable,
    unreadable,
    unusable,
)
from services.contract.words.problems import Problem

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0
_STORE_IS_AWAY: Final = "store_unavailable"
_CONTENT: Final = frozenset({httpx.codes.OK, httpx.codes.PARTIAL_CONTENT})


class _BoundedStream(httpx.AsyncByteStream):
    """A body that ends with an error where it is longer than any controller's."""

    def __init__(self, response: httpx.Response) -> None:
        self._stream = cast("httpx.AsyncByteStream", response.stream)
        self._meter = BodyMeter(response)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield self._meter.count(part)

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _bound(response: httpx.Response) -> None:
    take_as_it_comes(response)
    is_download = response.request.extensions.get(IS_DOWNLOAD) and response.status_code in _CONTENT
    if not is_download:
        response.stream = _BoundedStream(response)


class AsyncTransport:
    """A connection to one controller. Every request may be repeated without doing it twice.

    Args:
        base_url: The controller's root, such as ``http://127.0.0.1:8400``.
        token: The bearer token, where the controller wants one.
        timeout_s: Seconds for which nothing of an answer may come.
        patience_s: Seconds for which a controller that does not answer, or that asks to wait
            (429, 503), is asked again.

    Raises:
        ClientError: The address, the token, or what the environment says of proxies and certificates cannot be used.

    Methods raise ``UnreachableError`` if nobody answers, and ``RefusedError`` with the problem if
    the controller refuses.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        *,
        timeout_s: float = 15.0,
        patience_s: float = 1.0,
    ) -> None:
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        headers = authorization(token) | NOTHING_PACKED
        try:
            self._http = httpx.AsyncClient(
                base_url=base_url,
                headers=headers,
                timeout=timeout_s,
                event_hooks={"response": [_bound]},
            )
        except (httpx.InvalidURL, ImportError, OSError, ValueError) as error:
            raise unusable(base_url, error) from error
        self._cache = AnswerCache()

    async def __aenter__(self) -> Self:
        """The connection itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._http.aclose()

    @property
    def base_url(self) -> str:
        """The controller's root."""
        return str(self._http.base_url).rstrip("/")

    async def get(self, path: str, view: type[View], params: Parameters | None = None) -> View:
        """The answer of a GET; one that did not change is not sent and parsed again."""
        asked = {name: value for name, value in (params or {}).items() if value is not None}
        key = cache_key(path, asked, view)
        response = await self.request("GET", path, params=asked, headers=self._cache.condition(key))
        return self._cache.read(key, response, view)

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:  # noqa: ANN401 passed through to httpx
        """An answer; what is neither one nor 304, where that was asked for, is raised."""
        response = await self.send(method, path, **options)
        if not response.is_success and not is_unchanged(response):
            raise refusal(response)
        return response

    async def send(
        self,
        method: str,
        path: str,
        *,
        patience_s: float | None = None,
        read_timeout_s: float | None = None,
        **options: Any,  # noqa: ANN401 passed through to httpx
    ) -> httpx.Response:
        """An answer, whatever its status."""
        patience = self._patience_s if patience_s is None else patience_s
        if read_timeout_s is not None:
            options["timeout"] = self._long_timeout(read_timeout_s)
        retrying = AsyncRetrying(**retry_options(patience))
        try:
            return await retrying(self._http.request, method, path, **options)
        except httpx.RequestError as error:
            raise unreachable(self.base_url, error) from error
        except httpx.InvalidURL as error:  # a name in it has a control character
            raise ClientError(f"{path!r} is no resource of a controller: {error}") from error
        except UnicodeEncodeError:
            raise
        except UnicodeError as error:  # of a host's name
            raise unusable(self.base_url, error) from error

    async def fetch(self, path: str, file: PartialFile) -> None:
        """Download a file, or what is missing of it.

        A broken download goes on where it broke off, once the controller is back, as long as each
        try brings some bytes.

        Raises:
            UnreachableError: Two tries in a row brought nothing, or no controller answers.
            DownloadError: It is longer or shorter than was promised.
        """
        while not file.is_complete:
            before = file.size
            try:
                await self._fetch_some(path, file)
            except httpx.TransportError as error:
                if file.size == before:
                    raise UnreachableError(f"the download of {path} broke off: {error}") from error
                await self.request("GET", "/version")
            else:
                file.refuse_standstill(before)

    async def _fetch_some(self, path: str, file: PartialFile) -> None:
        timeout = self._long_timeout(60.0)
        async with self._http.stream(
            "GET",
            path,
            headers=file.headers(),
            timeout=timeout,
            extensions={IS_DOWNLOAD: True},
        ) as response:
            if response.status_code not in _CONTENT:
                await response.aread()
                raise refusal(response)
            target = file.begin(resumed=response.status_code == httpx.codes.PARTIAL_CONTENT)
            async for part in response.aiter_raw():
                target.append(part)

    async def follow(
        self,
        path: str,
        view: type[View],
        params: Mapping[str, str | int | list[str]],
        last_id: str | None = None,
    ) -> AsyncIterator[View]:
        """What a stream of events tells, until it ends.

        A broken stream goes on behind the last entry, once the controller and its store are back.

        Args:
            path: The stream's.
            view: What each entry is.
            params: Filters.
            last_id: Begin behind this entry.
        """
        poll_s = _FIRST_PAUSE_S
        while True:
            try:
                async for event in self._events(path, last_id, params):
                    last_id = event.id if is_header_value(event.id) else last_id
                    if event.event == "end":
                        return
                    if event.data:
                        poll_s = _FIRST_PAUSE_S
                        yield view.model_validate_json(event.data)
            except httpx.TransportError:
                # It waits, with back-off, until the controller is back.
                await self.request("GET", "/version")
            except RefusedError as error:
                if error.problem.code != _STORE_IS_AWAY:
                    raise
                await self.request("GET", "/readyz")
            except ValidationError as error:
                raise unreadable(f"{self.base_url}{path} told", view.__name__, error) from error
            # A proxy may end every stream at once.
            await asyncio.sleep(poll_s)
            poll_s = min(poll_s * 2, _LONGEST_PAUSE_S)

    async def _events(
        self, path: str, last_id: str | None, params: Mapping[str, str | int | list[str]]
    ) -> AsyncIterator[ServerSentEvent]:
        async with aconnect_sse(
            self._http,
            "GET",
            path,
            params=params,
            headers={"Last-Event-ID": last_id} if last_id else {},
            timeout=self._long_timeout(60.0),
        ) as source:
            if source.response.status_code >= ERRORS_FROM:
                await source.response.aread()
                raise refusal(source.response)
            if (media_type := media_type_of(source.response)) != STREAM_MEDIA_TYPE:
                # Asked again, whatever is there would answer the same, as often as it is asked.
                raise UnreachableError(
                    f"{self.base_url}{path} answered {source.response.status_code} with {media_type or 'no type'}, "
                    "which is no stream of events; set MESHLOOM_URL to a controller's address"
                )
            async for event in source.aiter_sse():
                if event.event == "refused":
                    raise RefusedError(Problem.model_validate_json(event.data))
                yield event

    def _long_timeout(self, read_s: float) -> httpx.Timeout:
        return httpx.Timeout(self._timeout_s, read=read_s, write=max(read_s, self._timeout_s))
