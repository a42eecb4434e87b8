"""How often a token may ask."""

import pytest

from services.controller.api import rates
from services.controller.api.guard import AccessPolicy
from services.controller.domain.access.rate import Bucket, Rate, take
from tests.controller.conftest import BOOTSTRAP, ControlPlane, open_plane
from tests.controller.credentials import bearer, make, refusal

pytestmark = pytest.mark.redis


def test_a_bucket_holds_its_burst_and_fills_at_its_rate() -> None:
    rate = Rate(per_s=2, burst=3)
    bucket: Bucket | None = None
    waits = []
    for now_ms in (0, 0, 0, 0, 400, 500, 500, 10_000, 10_000, 10_000, 10_000):
        bucket, wait_ms = take(bucket, rate, now_ms)
        waits.append(wait_ms)
    assert waits == [0, 0, 0, 500, 100, 0, 500, 0, 0, 0, 500]


def test_a_clock_that_goes_back_fills_no_bucket() -> None:
    rate = Rate(per_s=1, burst=1)
    bucket, _ = take(None, rate, 1_000_000)
    waits = []
    for now_ms in (0, 500, 1000):
        bucket, wait_ms = take(bucket, rate, now_ms)
        waits.append(wait_ms)
    assert waits == [1000, 500, 0]


def test_each_token_has_its_own_rate_at_each_controller(redis_url: str) -> None:
    slow = AccessPolicy(token=BOOTSTRAP, rate=Rate(per_s=0.001, burst=3))
    with (
        open_plane(redis_url, slow, leads=False) as one,
        open_plane(redis_url, slow, leads=False) as two,
    ):
        alice, bob = make(one, "viewer", "alice"), make(one, "viewer", "bob")
        for plane in (one, two):
            answers = [plane.client.get("/v1/jobs", headers=alice) for _ in range(4)]
            assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
            assert refusal(answers[3]) == (429, "rate_limited")
            assert 990 <= int(answers[3].headers["retry-after"]) <= 1000
        assert one.client.get("/v1/jobs", headers=bob).status_code == 200
        assert one.client.get("/v1/jobs", headers=bearer(BOOTSTRAP)).status_code == 200
        assert one.client.get("/healthz").status_code == 200


def test_a_request_within_its_rate_writes_nothing_to_redis(guarded: ControlPlane) -> None:
    alice = make(guarded, "viewer")
    before = guarded.redis.info("commandstats")
    assert guarded.client.get("/v1/capacity", headers=alice).status_code == 200
    after = guarded.redis.info("commandstats")
    writes = ("cmdstat_hset", "cmdstat_set", "cmdstat_pexpire", "cmdstat_xadd")
    assert [before.get(name) for name in writes] == [after.get(name) for name in writes]


def test_buckets_that_are_full_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 0
    monkeypatch.setattr(rates, "now_ms", lambda: moment)
    monkeypatch.setattr(rates, "_KEPT", 2)
    buckets = rates.Buckets(Rate(per_s=1, burst=2))
    for name in ("a", "b"):
        assert [buckets.take(name) for _ in range(3)] == [0, 0, 1000]
    moment = 1999
    assert [buckets.take(name) for name in ("b", "c", "a")] == [0, 0, 0]
    assert set(buckets._buckets) == {"a", "b", "c"}
    moment = 2000 + 1999
    assert buckets.take("d") == 0
    assert set(buckets._buckets) == {"d"}
