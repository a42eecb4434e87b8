"""Uploaded code, tokens and the audit trail, in Redis and in memory."""

import asyncio
import os
from typing import Any

import pytest

from services.contract.api.access import Scope, TokenRequest
from services.contract.jobs.code_archives import digest_of, hex_of
from services.contract.redis import redis_keys as keys
from services.contract.system import long_work
from services.contract.words.ids import new_token_id
from services.controller.domain.access.code import CodeLimits
from services.controller.domain.access.token import Token
from services.controller.domain.errors import DeposedError, StateConflictError
from services.controller.ports.access import AuditRecord
from services.controller.ports.jobs import Actor
from services.controller.ports.machines import Entry
from services.controller.use_cases import access
from tests.controller.stores.worlds import OutsideRedis, World, uploaded

pytestmark = [pytest.mark.anyio, pytest.mark.redis]


async def test_code_is_kept_whole_and_once(world: World) -> None:
    body, codes = os.urandom(keys.CODE_PART_BYTES * 5 + 7), world.ports.codes
    kept = uploaded(body)
    assert await codes.get(kept.digest) is None
    assert not await codes.use(kept.digest)
    assert await codes.keep(kept, body, CodeLimits()) == "new"
    assert await codes.keep(uploaded(body, "bob"), body, CodeLimits()) == "known"
    assert await codes.get(kept.digest) == kept
    if isinstance(world.outside, OutsideRedis):
        redis = world.outside.redis
        name = keys.code(hex_of(kept.digest))
        assert redis.keys("ml:code:*") == [name]  # no draft is left
        assert redis.ttl(name) == -1
        assert redis.hget(name, keys.CODE_PARTS) == "6"
        ask: Any = redis.execute_command
        parts = [ask("HGET", name, n, NEVER_DECODE=True) for n in range(6)]
        assert b"".join(parts) == body


async def test_code_is_forgotten_once_and_gives_its_room_back(world: World) -> None:
    codes, epoch = world.ports.codes, await world.ports.leadership.take("one")
    assert epoch is not None
    bodies = [os.urandom(5_000_000) for _ in range(4)]
    tight = CodeLimits(store_bytes=41 << 20)  # a share has room for two
    assert await codes.keep(uploaded(bodies[0]), bodies[0], tight) == "new"
    assert await codes.keep(uploaded(bodies[1]), bodies[1], tight) == "new"
    assert await codes.keep(uploaded(bodies[2]), bodies[2], tight) == "share"
    assert await codes.keep(uploaded(bodies[2], "bob"), bodies[2], tight) == "new"
    fourth = uploaded(bodies[3], "carol")
    assert await codes.keep(fourth, bodies[3], CodeLimits(store_bytes=15_100_000)) == "full"
    assert await codes.get(fourth.digest) is None
    first, later = digest_of(bodies[0]), await world.ports.clock.now_ms() + 60_000
    assert not await codes.forget(first, 1, epoch)  # it was used since
    assert len(await codes.unused(later)) == 3
    with pytest.raises(DeposedError):
        await codes.forget(first, later, epoch + 1)
    assert await codes.forget(first, later, epoch)
    assert not await codes.use(first)
    assert first not in await codes.unused(later)
    assert await codes.keep(uploaded(bodies[2]), bodies[2], tight) == "known"
    assert await codes.keep(uploaded(bodies[3]), bodies[3], tight) == "new"


async def test_what_others_do_and_refusals_push_nothing_of_operators_out_of_the_trail(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "AUDIT_KEPT", 100)
    audit = world.ports.audit

    def entry(number: int, scope: Scope, status: int = 200) -> AuditRecord:
        return AuditRecord(
            actor="any",
            scope=scope,
            request_id=f"{scope}-{number}",
            method="POST",
            path="/v1/jobs",
            status=status,
        )

    await audit.append(entry(0, Scope.OPERATOR))
    for number in range(250):
        await audit.append(entry(number, Scope.SUBMITTER))
        await audit.append(entry(number, Scope.OPERATOR, status=409))
    whole = await audit.newest(None, 1_000)
    assert '"operator-0"' in whole[-1].body
    assert '"status":200' in whole[-1].body
    assert [each.place for each in whole] == sorted({e.place for e in whole}, reverse=True)
    pages: list[Entry] = []
    while page := await audit.newest(pages[-1].id if pages else None, 7):
        pages += page
    assert pages == whole


async def test_tokens_that_have_expired_make_room_for_further_ones(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "MOST_TOKENS", 3)
    tokens, actor = world.ports.tokens, Actor("bootstrap")
    wanted = TokenRequest(subject="ci", scope=Scope.VIEWER, expires_in_s=1_000)

    for number in range(3):
        expires_ms = None if number == 1 else 1
        assert await tokens.put(_token(number, expires_ms), 3)
    assert not await tokens.put(_token(3), 3)
    first = await access.create_token(world.ports, wanted, actor)
    second = await access.create_token(world.ports, wanted, actor)
    kept = [_token(1).id, first.id, second.id]
    assert [token.id for token in await tokens.every()] == sorted(kept)
    with pytest.raises(StateConflictError, match="revoke some first") as refused:
        await access.create_token(world.ports, wanted, actor)
    assert refused.value.code == "too_many_tokens"
    await access.revoke_token(world.ports, first.id)
    await access.create_token(world.ports, wanted, actor)


async def test_others_have_their_turn_while_tokens_are_listed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_work, "_TURN_S", -1.0)  # as if each took that long
    for number in range(100):
        await world.ports.tokens.put(_token(number), 100)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(other())
    listed = await access.list_tokens(world.ports)
    others.cancel()
    assert len(listed.items) == 100
    assert turns >= 100


def _token(number: int, expires_ms: int | None = None) -> Token:
    return Token(
        id=new_token_id(number, bytes(10)),
        subject="ci",
        scope=Scope.VIEWER,
        digest="0" * 64,
        created_ms=number,
        created_by="bootstrap",
        expires_ms=expires_ms,
    )
