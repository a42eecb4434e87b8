"""What an agent takes from a rank's pipe, whatever the rank writes to it."""

import asyncio
import contextlib
import fcntl
import gc
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contract.messages.rank_pipe import (
    LINE_BYTES,
    RankEvaluated,
    RankFailed,
    RankFinished,
    RankMessage,
    RankMetrics,
    RankReady,
)
from services.contract.system.mask import NOTHING_MASKED, Mask
from services.contract.system.pipe_end import PipeEnd
from services.contract.words.bounds import ERROR_CHARACTERS, TRACEBACK_CHARACTERS
from services.contract.words.ids import checkpoint_id, new_trace_id
from services.worker.agent.gangs.rank_reports import fact_of
from services.worker.agent.gangs.state import GangState
from services.worker.agent.ranks import rank_link
from services.worker.agent.ranks.rank_link import RankLink
from tests.agent.conftest import JOB, NODE


@pytest.fixture(autouse=True)
def never_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes long, however busy the machine is; but where a test says what does."""
    monkeypatch.setattr(rank_link, "LONG_S", math.inf)
    monkeypatch.setattr(RankLink, "_of_all", rank_link._Share())


FINISHED = b'{"kind":"rank_finished","step":3,"drained":false}\n'


@dataclass
class Heard:
    """A link, the rank's end of its pipe, and all that came through."""

    messages: list[RankMessage] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    mask: Mask = NOTHING_MASKED

    def __post_init__(self) -> None:
        ours, self._theirs = PipeEnd.pair()
        self.link = RankLink(ours, self.messages.append, self.faults.append, self.mask)
        self.link.listen()
        os.set_blocking(self._theirs.writing, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._theirs.close()

    def write(self, content: bytes | memoryview) -> int:
        """As the rank does: what the pipe takes now."""
        return os.write(self._theirs.writing, content)

    def say(self, content: bytes) -> None:
        """Write all of it, the agent hearing as often as the pipe is full."""
        left = memoryview(content)
        while left and not self.link.closed:
            try:
                left = left[self.write(left) :]
            except BlockingIOError:
                self._hear()
        for _ in range(2 + len(content) // 4096):
            self._hear()

    def _hear(self) -> None:
        self.link.look()
        self.link.hear()


def heard(content: bytes, mask: Mask = NOTHING_MASKED) -> Heard:
    """What becomes of one writing of a rank."""

    async def run() -> Heard:
        heard = Heard(mask=mask)
        with heard:
            heard.say(content)
        heard.link.close()
        return heard

    return asyncio.run(run())


def line(**message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def vote(**changes: object) -> bytes:
    shard = {"rank": 0, "name": "r", "bytes": 1, "sha256": "0" * 64} | changes
    name = checkpoint_id(JOB, 3, 1)
    return line(kind="rank_vote", checkpoint_id=name, step=3, shard=shard)


def test_numbers_that_have_the_digits_of_a_secret_stay_numbers_and_texts_are_masked() -> None:
    told = line(
        kind="rank_evaluated",
        step=12345678,
        loss=0.123456789,
        tokens=9,
        metrics={"of 12345678": 1e9 + 12345678.0},
    )
    result = heard(told, Mask({"PIN": "12345678"}))
    assert result.faults == []
    (message,) = result.messages
    assert isinstance(message, RankEvaluated)
    assert (message.step, message.loss) == (12345678, 0.123456789)
    assert message.metrics == {"of [secret PIN]": 1_012_345_678.0}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n", "is not a message"),
        (b"not json\n", "is not a message: Invalid JSON"),
        (b"\xff\xfe\xc0\n", "is not a message"),
        (b"[" * 100_000 + b"\n", "is not a message"),
        (
            b'{"kind":"rank_finished","step":' + b"9" * 10_000 + b',"drained":true}\n',
            "is not a mess",
        ),
        (line(kind="rank_seized"), "is not a message"),
        (line(kind="rank_finished", step="x", drained=[]), "rank_finished/step"),
        (line(kind="rank_evaluated", step=-1, loss=1, tokens=1), "rank_evaluated/step"),
        (line(kind="rank_evaluated", step=1, loss=1, tokens=0), "rank_evaluated/tokens"),
        (vote(bytes=2**80), "rank_vote/shard/bytes"),
        (vote(name="../../other"), "rank_vote/shard/name"),
        (vote(name="x" * 300), "rank_vote/shard/name"),
        (
            line(kind="rank_ready", units=[], groups=["g" * 65], parameters=1, data_digest=""),
            "rank_ready/groups/0",
        ),
        (
            line(kind="rank_ready", units=[], groups=["g"] * 9, parameters=1, data_digest=""),
            "rank_ready/groups",
        ),
        (b"x" * (LINE_BYTES + 1), f"a line of more than {LINE_BYTES} bytes"),
        (b"x" * (2 * LINE_BYTES) + b"\n", f"a line of more than {LINE_BYTES} bytes"),
    ],
)
def test_what_is_no_message_is_one_fault_that_names_it_and_nothing_more_is_heard(
    content: bytes, words: str
) -> None:
    result = heard(FINISHED + content + FINISHED)
    (fault,) = result.faults
    assert words in fault
    assert len(fault) < 400
    assert len(result.messages) == 1


@given(st.one_of(st.binary(max_size=2_000), st.lists(st.binary(max_size=50)).map(b"\n".join)))
def test_whatever_bytes_come_they_are_a_fault_or_wait_for_their_end(content: bytes) -> None:
    result = heard(content)
    assert result.messages == []
    assert len(result.faults) == (b"\n" in content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)


@given(
    kind=st.sampled_from(
        ["rank_ready", "rank_vote", "rank_evaluated", "rank_failed", "rank_finished", "x"]
    ),
    fields=st.dictionaries(
        st.sampled_from(
            ["step", "loss", "tokens", "baselines", "units", "groups", "error", "traceback",
             "drained", "shard", "checkpoint_id", "parameters", "data_digest", "error_types"]
        ),
        JSON,
    ),
)  # fmt: skip
def test_whatever_json_comes_is_a_bounded_message_or_a_fault(
    kind: str, fields: dict[str, object]
) -> None:
    result = heard(line(**(fields | {"kind": kind})))
    assert len(result.messages) + len(result.faults) == 1
    for message in result.messages:
        assert len(message.model_dump_json()) < LINE_BYTES


TRACE = new_trace_id(1_700_000_000_000, bytes(10))
SHARD = {"rank": 0, "name": "rank-00000.bin", "bytes": 1, "sha256": "0" * 64}
NAMED = {"checkpoint_id": checkpoint_id(JOB, 1, 1), "step": 1}


@pytest.mark.parametrize("number", [-1, 0, 2**63 - 1, 2**63, pytest.param(10**300, id="long")])
@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [
        ("rank_checkpoint_began", NAMED, "step"),
        ("rank_checkpoint_waits", NAMED | {"condition": "full"}, "step"),
        ("rank_vote", NAMED | {"shard": SHARD}, "step"),
        ("rank_evaluated", {"step": 1, "loss": 1.0, "tokens": 1}, "step"),
        ("rank_evaluated", {"step": 1, "loss": 1.0, "tokens": 1}, "tokens"),
        ("rank_epoch_broken", {}, "epoch"),
        *(
            ("rank_traced", {"trace_id": TRACE, "bytes": 1, "first_step": 1, "last_step": 1}, name)
            for name in ("bytes", "first_step", "last_step")
        ),
    ],
)
def test_a_number_that_no_fact_holds_is_a_fault_of_the_rank(
    kind: str, fields: dict[str, object], name: str, number: int
) -> None:
    result = heard(line(**(fields | {"kind": kind, name: number})))
    assert len(result.messages) + len(result.faults) == 1
    for message in result.messages:
        assert not isinstance(message, RankReady | RankMetrics | RankFailed | RankFinished)
        said = fact_of(GangState(job_id=JOB, fence=1, node_id=NODE, ranks={}), 0, message)
        assert getattr(said, name) == number


@pytest.mark.parametrize("mask", [NOTHING_MASKED, Mask({"PIN": "trace_id"})])
def test_in_a_line_of_very_many_lists_no_garbage_is_looked_for(mask: Mask) -> None:
    """It took an agent's loop three quarters of the seconds that such a line takes."""
    lists = json.loads(",".join(["[" * 150 + "]" * 150] * 3_000).join("[]"))
    told = line(kind="rank_traced", trace_id=lists)
    before = gc.get_stats()[0]["collections"]
    assert len(heard(told, mask).faults) == 1
    assert gc.get_stats()[0]["collections"] - before < 100  # it was 600 and more


def test_texts_are_cut_with_a_mark_and_of_many_names_few_are_kept() -> None:
    (failed,) = heard(
        line(kind="rank_failed", error="e" * 10**5, traceback="t" * 10**5, step=1,
             error_types=["x" * 999] * 99)
    ).messages  # fmt: skip
    assert isinstance(failed, RankFailed)
    assert len(failed.error) <= ERROR_CHARACTERS
    assert "characters cut" in failed.error
    assert len(failed.traceback) <= TRACEBACK_CHARACTERS
    assert (len(failed.error_types), max(map(len, failed.error_types))) == (32, 256)
    (ready,) = heard(
        line(kind="rank_ready", units=["u" * 999], groups=[], parameters=1, data_digest="")
    ).messages
    assert isinstance(ready, RankReady)
    assert "characters cut" in ready.units[0]


def test_an_evaluation_is_kept_without_the_baselines_that_are_no_numbers_or_too_many() -> None:
    baselines = {"bigram": float("nan"), "unigram": 2.5} | {f"b{n}" * 200: 1.0 for n in range(999)}
    said = RankEvaluated(step=3, loss=1.5, tokens=10, baselines=baselines)
    assert list(said.baselines)[:2] == ["unigram", said_name(said)]
    assert len(said.baselines) == 8
    assert max(map(len, said.baselines)) <= 256
    raw = b'{"kind":"rank_evaluated","step":3,"loss":1.5,"tokens":10,"baselines":{"a":NaN,"b":2}}'
    (evaluated,) = heard(raw + b"\n").messages
    assert isinstance(evaluated, RankEvaluated)
    assert (evaluated.loss, evaluated.baselines) == (1.5, {"b": 2.0})


def said_name(said: RankEvaluated) -> str:
    return next(name for name in said.baselines if "characters cut" in name)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rank_link, "time", clock)
    monkeypatch.setattr(RankLink, "_of_all", rank_link._Share())
    return clock


def in_loop(course: Callable[[Heard], None]) -> None:
    async def run() -> None:
        heard = Heard()
        with heard:
            course(heard)
        heard.link.close()

    asyncio.run(run())


def fill(heard: Heard) -> None:
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        while True:
            heard.write(FINISHED)


def test_however_fast_a_rank_writes_valid_lines_few_are_heard_and_it_is_at_no_fault(
    clock: Clock,
) -> None:
    def course(heard: Heard) -> None:
        taken = []
        for _ in range(200):
            clock.now += 0.1
            heard.link.look()
            before = len(heard.messages)
            for _ in range(100):
                fill(heard)
                heard.link.hear()
            taken.append(len(heard.messages) - before)
        assert heard.faults == []
        assert taken[0] < 3_000, "a burst is heard at once"
        assert max(taken[2:]) < 400, "of a flood a few lines a look"
        assert 0 < sum(taken[100:]) < 10 * 64 + 400, "and 64 a second over a while"
        assert len(heard.link._unread) < 16_384

    in_loop(course)


@pytest.mark.parametrize("line_s", [0.4, 3.0])
def test_after_a_line_that_took_long_no_rank_is_heard_for_as_long(
    line_s: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dozen ranks with a megabyte each would keep the loop from renewing the node's lease, on a busy machine most."""
    monkeypatch.setattr(rank_link, "LONG_S", 0.05)

    def course(slow: Heard, other: Heard) -> None:
        for each in (slow, other):
            each.write(FINISHED)
            each.link.hear()
        assert (len(slow.messages), len(other.messages)) == (1, 0)
        for later_s, messages in ((0.75 * line_s, 0), (0.5 * line_s, 1)):
            clock.now += later_s
            other.link.look()
            other.link.hear()
            assert len(other.messages) == messages

    beside_a_slow_one(clock, line_s, course)


def test_many_lines_that_take_a_hundredth_of_a_second_each_are_as_one_that_takes_long(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 ranks that write them the loop heard in each of its rounds as long as a beat may take."""
    monkeypatch.setattr(rank_link, "LONG_S", 0.05)

    def course(slow: Heard, other: Heard) -> None:
        other.write(FINISHED)
        for _ in range(100):
            slow.write(FINISHED)
            slow.link.hear()
        assert len(slow.messages) == 5
        other.link.hear()
        assert other.messages == []
        clock.now += 0.1
        other.link.look()
        other.link.hear()
        assert len(other.messages) == 1
        for _ in range(1_000):
            clock.now += 0.1
            slow.link.look()
            slow.write(FINISHED)
            for _ in range(10):
                slow.link.hear()
        assert 0.05 < len(slow.messages) * 0.012 / clock.now < 0.12

    beside_a_slow_one(clock, 0.012, course)


def test_ranks_whose_lines_take_long_do_not_keep_others_from_being_heard(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_link, "LONG_S", 0.05)

    def course(slow: Heard, other: Heard) -> None:
        written = {slow.link: 0, other.link: 0}
        for _ in range(100):
            clock.now += 0.1
            for each in (slow, other):
                each.link.look()
            for each in (slow, other):  # in the order in which they were started
                if len(each.messages) == written[each.link]:
                    written[each.link] += 1
                    each.write(FINISHED)
                each.link.hear()
        assert 7 < len(slow.messages) < 30, "what it had saved up, and a sixteenth of the time"
        assert len(other.messages) > 70

    beside_a_slow_one(clock, 0.07, course)


def beside_a_slow_one(clock: Clock, line_s: float, course: Callable[[Heard, Heard], None]) -> None:
    """Run ``course`` with a link of whose lines each takes so long, and another."""

    class Slow(Mask):
        def message(self, line: bytes) -> bytes:
            clock.now += line_s
            return line

    async def run() -> None:
        with Heard(mask=Slow({})) as slow, Heard() as other:
            course(slow, other)
            for each in (slow, other):
                each.link.close()

    asyncio.run(run())


def test_a_paused_pipe_is_not_read_and_goes_on_afterwards(clock: Clock) -> None:
    def course(heard: Heard) -> None:
        heard.link.look(pauses=True)
        fill(heard)
        heard.link.hear()
        clock.now += 60.0
        heard.link.look(pauses=True)
        heard.link.hear()
        assert heard.messages == []
        heard.link.look()
        heard.link.hear()
        assert heard.messages

    in_loop(course)


def test_a_rank_that_was_not_heard_for_long_is_heard_in_full_and_is_at_no_fault(
    clock: Clock,
) -> None:
    def course(heard: Heard) -> None:
        for _ in range(200):
            fill(heard)
            clock.now += 60.0  # the agent was stopped meanwhile
            heard.link.look()
            for _ in range(100):
                heard.link.hear()
        assert heard.faults == []
        assert len(heard.messages) > 200 * 100

    in_loop(course)


def test_of_a_dead_rank_all_is_heard_that_was_there_and_nothing_that_is_written_since(
    clock: Clock,
) -> None:
    def course(heard: Heard) -> None:
        sent = 0

        def goes_on(message: RankMessage) -> None:
            assert message.kind == "rank_finished"
            heard.messages.append(message)
            heard.write(FINISHED)  # as a process that the rank left behind does

        heard.link._on_message = goes_on
        for _ in range(100):
            sent += heard.write(FINISHED)
        heard.link.hear_rest()
        assert len(heard.messages) == sent // len(FINISHED)
        assert clock.now == 0

    in_loop(course)


def test_of_a_dead_rank_that_made_its_pipe_longer_no_more_is_heard_at_once_than_of_others(
    clock: Clock,
) -> None:
    def course(heard: Heard) -> None:
        assert clock.now == 0
        fcntl.fcntl(heard._theirs.writing, fcntl.F_SETPIPE_SZ, 1 << 20)
        fill(heard)
        heard.link.hear_rest()
        assert len(heard.messages) <= 16 * os.sysconf("SC_PAGE_SIZE") // len(FINISHED)
        assert heard.faults == []

    in_loop(course)
