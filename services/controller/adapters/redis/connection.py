"""How the controller talks to Redis: a client for each temperament.

Writes are never retried: redis-py cannot know whether a lost reply's command was applied, and
would apply it twice. Blocking reads have their own pools, whose socket time-out lies above BLOCK;
those of the loops are not those of the streams, so that followers can never silence a loop.
"""

import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import structlog
from pydantic import ValidationError
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    InvalidResponse,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.contract.redis.redis_address import with_advice
from services.contract.redis.redis_keys import LONGEST_TEXT, without_secret
from services.contract.redis.tls_files import following_files
from services.controller.adapters.redis.script_parts import checked
from services.controller.domain.errors import RecordTooLongError, StoreUnavailableError

MAX_BLOCK_S: Final = 20.0
MAX_STREAMS: Final = 64
_ANSWER_S: Final = 5.0
TELEMETRY_ANSWER_S: Final = 1.0
"""Where telemetry has a server of its own, what is decided waits no longer for it."""
# Requests beyond these wait for a connection instead of failing.
_CONNECTIONS: Final = 64
# One to read on, and room for one that a cancelled read has not given back yet.
_LOOP_CONNECTIONS: Final = 4
_READ_RETRIES: Final = 1
_READ_BACKOFF_S: Final = 0.05


_MEMORY: Final = "raise its maxmemory, or delete jobs that have ended"
_REPLICA: Final = "it is a replica: point MESHLOOM_REDIS_URL at the primary, or make it one"
_ACL: Final = "its ACL does not let this user do that: see `python -m services.controller.acl`"
_TYPE: Final = "a key has the wrong type: rename it, or delete it"
_WAIT: Final = "it is busy and will answer again"
_REFUSALS: Final[Mapping[type[ResponseError], str]] = {
    OutOfMemoryError: _MEMORY,
    NoPermissionError: _ACL,
    ReadOnlyError: _REPLICA,
    MasterDownError: _REPLICA,
}
_REFUSAL_CODES: Final = {
    "OOM": _MEMORY,
    "NOPERM": _ACL,
    "ACL failure in script": _ACL,
    "The user executing the script can't": _ACL,  # as Redis 6 says it
    "EXEC without MULTI": _ACL,  # redis-py passes over the refusal of MULTI
    "READONLY": _REPLICA,
    "MASTERDOWN": _REPLICA,
    "MISCONF": "it cannot save: free its disk; its log says what failed",
    "NOREPLICAS": "too few replicas follow it: see min-replicas-to-write",
    "LOADING": _WAIT,
    "BUSY": _WAIT,
    "UNBLOCKED": _WAIT,
}
# Of an error within a pipeline redis-py says which command it was of, and then what Redis said: as it is,
# or as a tuple. Of a transaction that it does not begin Redis says first that it discards it. Redis 6 says
# first where in which script it refuses.
_BEGINS: Final = (
    r"(?:^|caused error: (?:\([\"'])?|discarded because of: )"
    r"(?:Error running script \(call to \w+\): @user_script:\d+: )?(?:@user_script: \d+: -?)?"
)
_REFUSAL_CODE: Final = re.compile(rf"{_BEGINS}({'|'.join(_REFUSAL_CODES)})\b")
# Of another type, or no number where one is counted.
_MISTYPED: Final = re.compile(
    rf"{_BEGINS}(?:WRONGTYPE\b|(?:ERR )?(?:hash )?value is not an integer)"
)
_UNREADABLE_KEPT: Final = 1_000
_LONGEST_WORD: Final = 2_000
_LONGEST_EXCERPT: Final = 200
_LAST_MS: Final = 1 << 53  # as a score holds whole numbers
_log = structlog.get_logger()
T = TypeVar("T")


class Unreadable:
    """Records that this version cannot read. Each costs itself alone, and is logged once."""

    def __init__(self) -> None:
        self._known: dict[str, object] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Keys, with the field or the entry where a key holds several records."""
        return tuple(self._known)

    def read(self, name: str, parse: Callable[[str], T], text: str) -> T | None:
        """The record ``text`` of this name; None if ``parse`` raises ValidationError."""
        try:
            value = parse(text)
        except ValidationError as error:
            self.note(name, hash(text), error)
            return None
        self.forget(name)
        return value

    def note(self, name: str, content: object, error: BaseException | None) -> None:
        """It cannot be read; said once for the same ``content``, for loops come by each second."""
        name = without_secret(name)
        if name not in self._known or self._known[name] != content:
            _log.error("record_unreadable", key=name, error=str(error)[:_LONGEST_WORD])
        self._known.pop(name, None)
        self._known[name] = content
        if len(self._known) > _UNREADABLE_KEPT:
            del self._known[next(iter(self._known))]

    def read_all(self, key: str, parse: Callable[[str], T], texts: Iterable[str]) -> list[T]:
        """What can be read of the records in one key.

        Those that cannot are named together, and logged once: there may be hundreds of thousands.
        """
        found: list[T] = []
        fault: ValueError | None = None
        for text in texts:
            try:
                found.append(parse(text))
            except ValueError as error:
                fault = fault or error
        if fault is not None:
            self.note_some_of(key, fault)
        return found

    def note_some_of(self, key: str, error: ValueError) -> None:
        """Some records in one key cannot be read, the others can."""
        self.note(f"{key} (some records)", None, error)

    def note_type(self, key: str) -> None:
        """The key is not of the type that it should be."""
        self.note(key, _TYPE, TypeError(f"{without_secret(key)}: {_TYPE}"))

    def of_their_type(self, names: Iterable[str], rows: Iterable[Any]) -> list[Any]:
        """The answers of a pipeline, one a key; None for a key of another type than it should be.

        Raises:
            ResponseError: Redis refused for another reason.
        """
        found = []
        for name, row in zip(names, rows, strict=True):
            is_other = is_mistyped(row)
            if is_other:
                self.note_type(name)
            elif isinstance(row, Exception):
                raise row
            else:
                self.forget(name)
            found.append(None if is_other else row)
        return found

    def forget(self, name: str) -> None:
        """It was read, or is there no more."""
        self._known.pop(without_secret(name), None)

    def forget_key(self, key: str) -> None:
        """The key is there no more."""
        shown = without_secret(key)
        for name in [name for name in self._known if name.partition(" ")[0] == shown]:
            del self._known[name]


class _BoundedScript(AsyncScript):
    """A script that sends no text that Redis does not take: it would end the connection without a reason.

    Its caller would take that for an absence, and write the same again for ever.
    """

    async def __call__(
        self,
        keys: Sequence[Any] | None = None,
        args: Iterable[Any] | None = None,
        client: Any = None,  # noqa: ANN401 as redis-py has it
    ) -> Any:  # noqa: ANN401 an answer of Redis
        sent = list(args or ())
        for text in sent:
            if isinstance(text, str) and _is_too_long(text):
                raise RecordTooLongError(
                    f"what is to be written has a text of {len(text)} characters, and Redis takes up to "
                    f"{LONGEST_TEXT} bytes: {text[:_LONGEST_EXCERPT]!r}"
                )
        return await super().__call__(keys=keys, args=sent, client=client)


def _is_too_long(text: str) -> bool:
    # A character has at most four bytes: most texts are not encoded to be measured.
    return len(text) * 4 > LONGEST_TEXT and len(text.encode()) > LONGEST_TEXT


@dataclass(frozen=True)
class RedisClients:
    """The clients: for what answers at once, and for what waits until something comes.

    ``unreadable``: what all that read by these clients could not read.
    """

    reads: Redis
    writes: Redis
    facts: Redis
    wakes: Redis
    streams: Redis
    unreadable: Unreadable = field(default_factory=Unreadable)

    def script(self, text: str) -> AsyncScript:
        """A script that writes all that it is to write, or nothing.

        Called, it raises RecordTooLongError where Redis takes none of it.
        """
        return _BoundedScript(self.writes, checked(text))

    @contextlib.contextmanager
    def answering(self, *names: str) -> Iterator[None]:
        """As ``answering``, for keys without which nothing can be told: one of another type is named.

        Raises:
            StoreUnavailableError: Redis does not answer, refuses, or one of these has another type.
        """
        try:
            with answering():
                yield
        except StoreUnavailableError as error:
            if is_mistyped(error.__cause__):
                for name in names:
                    self.unreadable.note_type(name)
                shown = " or ".join(map(without_secret, names))
                raise StoreUnavailableError(f"{shown}: {error}") from error.__cause__
            raise
        for name in names:
            self.unreadable.forget(name)


@contextlib.asynccontextmanager
async def connected(
    url: str,
    max_streams: int = MAX_STREAMS,
    *,
    answer_s: float = _ANSWER_S,
    unreadable: Unreadable | None = None,
) -> AsyncIterator[RedisClients]:
    """Clients for ``url`` until the block ends. They connect when they are first used.

    Args:
        url: Of the Redis.
        max_streams: How many may follow logs at a time.
        answer_s: Within so long it answers, or counts as away.
        unreadable: Where records that cannot be read are noted; None: in one of its own.
    """
    once = Retry(NoBackoff(), 0)
    again = Retry(ConstantBackoff(_READ_BACKOFF_S), _READ_RETRIES)

    def client(connections: int, retry: Retry, patience_s: float) -> Redis:
        pool: BlockingConnectionPool = BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            timeout=_ANSWER_S,
            retry=retry,
            socket_timeout=patience_s,
            socket_connect_timeout=answer_s,
            decode_responses=True,
            # Agents may write any bytes. Raised while reading, their fault would end every term.
            encoding_errors="replace",
        )
        return following_files(Redis.from_pool(pool))

    clients = RedisClients(
        reads=client(_CONNECTIONS, again, answer_s),
        writes=client(_CONNECTIONS, once, answer_s),
        facts=client(_LOOP_CONNECTIONS, once, MAX_BLOCK_S + _ANSWER_S),
        wakes=client(_LOOP_CONNECTIONS, once, MAX_BLOCK_S + _ANSWER_S),
        streams=client(max_streams, once, MAX_BLOCK_S + _ANSWER_S),
        unreadable=Unreadable() if unreadable is None else unreadable,
    )
    everyone = (clients.reads, clients.writes, clients.facts, clients.wakes, clients.streams)
    try:
        yield clients
    finally:
        for one in everyone:
            await one.aclose()


async def answer_behind(
    client: Redis, blocking: Sequence[Any], wait_s: float, behind: Sequence[Any]
) -> Any:  # noqa: ANN401 as redis-py
    """What the command ``behind`` a blocking one answers, which comes once that one has ended.

    Nothing is read of what the blocking one answers, were it an error: agents make some entries as long as they like,
    and whoever waits would have the controller hold all of it.

    Args:
        client: Of the server.
        blocking: It ends after ``wait_s`` at the latest.
        wait_s: See ``blocking``.
        behind: Asked for a number.

    Raises:
        RedisError: Redis does not answer, or refuses ``behind``.
    """
    pool: Any = client.connection_pool
    connection = await pool.get_connection()
    try:
        commands = [("CLIENT", "REPLY", "SKIP"), blocking, behind]
        await connection.send_packed_command(connection.pack_commands(commands))
        # A server that becomes a replica means to close the connection of whoever waits behind an answer, and never does.
        answer = await connection.read_response(timeout=wait_s + _ANSWER_S)
        if answer is None:
            await connection.disconnect()
    except ResponseError:
        # Whichever of them was refused: nobody else is to get the other answers.
        await connection.disconnect()
        raise
    finally:
        await pool.release(connection)
    if answer is None:
        raise RedisTimeoutError(f"no answer within {_ANSWER_S:g} s of the end of a wait")
    return answer


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Redis's absence, its refusal of all work of a kind, and a key of another type, in words of the ports.

    Other errors of Redis (such as a script that fails) are defects of ours: they pass, and are logged
    by whoever meets them.
    """
    try:
        yield
    except ResponseError as error:
        advice = _advice(error)
        if advice is None:
            raise
        said = without_secret(str(error))
        raise StoreUnavailableError(f"Redis refuses: {said}; {advice}") from error
    except (RedisConnectionError, RedisTimeoutError, InvalidResponse, OSError) as error:
        # What is not Redis's protocol is an answer of what stands in its place or before it: a proxy, say.
        raise StoreUnavailableError(
            "Redis does not answer; the controller's log says why", with_advice(str(error))
        ) from error


def is_mistyped(answer: object) -> bool:
    """Whether Redis says that a key has another type, or a value that should be a number is none."""
    return isinstance(answer, ResponseError) and _MISTYPED.search(str(answer)) is not None


def raise_refusal(answers: Iterable[object]) -> None:
    """Raise the first error among the answers of a pipeline that is not about a key's type; see ``answering``."""
    for answer in answers:
        if isinstance(answer, Exception) and not is_mistyped(answer):
            raise answer


def to_ms(score: float) -> int:
    """The moment that a sorted set keeps; a score may be infinite, too."""
    return int(min(max(score, 0), _LAST_MS))


def _advice(error: ResponseError) -> str | None:
    if is_mistyped(error):
        return _TYPE
    for kind, advice in _REFUSALS.items():
        if isinstance(error, kind):
            return advice
    # What redis-py knows by no class of its own; in a pipeline it names the command before it.
    found = _REFUSAL_CODE.search(str(error))
    return None if found is None else _REFUSAL_CODES[found.group(1)]
