"""What a node lets jobs have: entry points and secrets; and where secrets must not turn up."""

import base64
import contextlib
import faulthandler
import json
import os
import sys
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis

from services.contract.jobs.entry_points import EntryPoints
from services.contract.jobs.specs import JobSpec
from services.contract.messages.facts import LaunchRefused, NodeJoined
from services.contract.messages.rank_pipe import RANK_MESSAGE, RankFailed
from services.contract.system import mask as mask_module
from services.contract.system.mask import Mask
from services.controller.api.guard import AccessPolicy
from services.worker.agent.ranks.admission import Admission, NotAdmittedError
from services.worker.agent.telemetry.log_tail import LogTail
from services.worker.rank.process.seat import DEFAULT_TRAINER
from tests.agent.conftest import PROGRAMS, Controller, StartAgent, launch
from tests.controller.conftest import job_body, open_plane
from tests.waiting import until

SECRET = 'pa"ss/wörd & 1234\\5678'  # noqa: S105 a test's


def spec(factory: str = "decoder", **args: object) -> JobSpec:
    return JobSpec.model_validate(job_body(model={"factory": factory, "args": args}))


def admission(folder: Path | None, *prefixes: str) -> Admission:
    return Admission(EntryPoints(prefixes), folder, ())


def test_secrets_come_from_the_folder_by_name_alone(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "HUB").write_text("value-of-hub\n")
    (folder / "SHORT").write_text("1234567")
    (folder / "LONG").write_text("x" * 65_537)
    (folder / "BYTES").write_bytes(b"\xff" * 9)
    (folder / "FOLDER").mkdir()
    os.mkfifo(folder / "PIPE")
    (folder / "LINK").symlink_to("HUB")
    (tmp_path / "outside").write_text("not to be had")
    rules, net = admission(folder, "models"), "models:Net"
    two = spec(net, a={"secret": "HUB"}, b=[{"secret": "HUB"}])
    assert rules.admit(two) == {"HUB": "value-of-hub"}
    assert rules.admit(spec(net, a={"secret": "LINK"})) == {"LINK": "value-of-hub"}
    assert rules.admit(spec(net, a={"secret": "../outside"})) == {}  # that is no reference
    metrics = {"metrics": {"wandb": {"api_key": {"secret": "HUB"}}}}
    tracked = JobSpec.model_validate(spec().model_dump() | metrics)
    assert rules.admit(tracked) == {"HUB": "value-of-hub"}
    for name in ("SHORT", "LONG", "BYTES", "FOLDER", "PIPE", "ABSENT"):
        with pytest.raises(NotAdmittedError, match=f"secret {name}"):
            rules.admit(spec(net, a={"secret": name}))
    with pytest.raises(NotAdmittedError, match="MESHLOOM_SECRETS_DIR"):
        admission(None, "models").admit(spec(net, a={"secret": "HUB"}))


@pytest.mark.parametrize("allowed", [EntryPoints(), EntryPoints(())])
def test_built_ins_are_given_no_secret_on_the_node_either(
    tmp_path: Path, allowed: EntryPoints
) -> None:
    """Of a job that was submitted before the controller refused it, or that another node says it has found."""
    (tmp_path / "HUB").write_text("value-of-hub")
    overrides = {"architectures": [{"secret": "HUB"}]}
    with pytest.raises(NotAdmittedError, match=r"model\.args: hf_causal_lm takes no secret"):
        Admission(allowed, tmp_path, ()).admit(spec("hf_causal_lm", overrides=overrides))


def test_entry_points_are_checked_again_on_the_node(tmp_path: Path) -> None:
    rules = admission(tmp_path, "models")
    assert rules.admit(spec("models.net:Tiny")) == {}
    with pytest.raises(NotAdmittedError, match=r"model\.factory: os:system"):
        rules.admit(spec("os:system"))


def test_servers_of_trackers_are_checked_again_on_the_node(tmp_path: Path) -> None:
    tracked = spec().model_dump() | {"metrics": {"mlflow": {"tracking_uri": "https://a.example/"}}}
    job = JobSpec.model_validate(tracked)
    allowing = EntryPoints(("models",), trackers=("https://a.example",))
    assert Admission(allowing, tmp_path, ()).admit(job) == {}
    assert Admission(EntryPoints(), tmp_path, ()).admit(job) == {}
    with pytest.raises(
        NotAdmittedError, match=r"metrics\.mlflow\.tracking_uri: .*MESHLOOM_TRACKER"
    ):
        admission(tmp_path, "models").admit(job)


def test_a_mask_covers_the_ways_in_which_values_are_written(tmp_path: Path) -> None:
    mask = Mask({"HUB": SECRET, "KEY": "-----BEGIN-----\nsecond-line\nx"})
    failed = RankFailed(error=f"no {SECRET!r}", traceback=f"x\n{SECRET}\nsecond-line", step=1)
    written = failed.model_dump_json().encode()
    for masked in (mask.line(written), mask.message(written)):
        read = RANK_MESSAGE.validate_json(masked)
        assert isinstance(read, RankFailed)
        assert read.error == "no '[secret HUB]'"
        assert read.traceback == "x\n[secret HUB]\n[secret KEY]"
    path = tmp_path / "log"
    filler = "y" * 3_995
    path.write_text(f"{SECRET} and \x1b[1mx\n{filler}{SECRET}\n-----BEGIN-----\nx\n")
    texts = [line.text for line in LogTail(path, mask).read(100)]
    assert texts[0] == "[secret HUB] and x"
    assert "pa" not in texts[1]
    assert texts[2:] == ["[secret KEY]", "x"]


def test_a_mask_covers_what_urls_base64_and_bytes_make_of_a_value() -> None:
    value = "p/a ss?wörd~12"
    mask = Mask({"HUB": value})
    forms = [urllib.parse.quote(value), urllib.parse.quote_plus(value), f"{value!r}"]
    forms += [repr(value.encode()), json.dumps(repr(value.encode()))]
    forms += [
        encode(f"{user}{value}@host".encode()).decode()
        for user in ("", "u", "us", "user:")
        for encode in (base64.b64encode, base64.urlsafe_b64encode)
    ]
    for form in forms:
        assert "[secret HUB]" in mask.text(f"a {form} b"), form


@pytest.mark.parametrize(
    "value", ["it's-a-naïve-key", 'it is "a" naïve key', 'it\'s a "naïve" key']
)
@pytest.mark.parametrize("beside", ["", "'", '"'])
def test_a_mask_covers_a_value_within_a_text_with_other_quotes(value: str, beside: str) -> None:
    """What ``repr`` escapes depends on what stands beside the value, such as the quotes of a message."""
    mask = Mask({"KEY": value})
    text = f"no {beside}{value}{beside}"
    for written in (repr(text), repr(ValueError(text)), ascii([text]), repr(text.encode())):
        for said in (written, json.dumps(written)):
            assert "key" not in mask.text(said)
            assert "[secret KEY]" in mask.text(said)


@pytest.mark.parametrize("value", ["a\\naïve-'key'", "a\tnaive-'key'"])
def test_a_mask_covers_a_value_as_the_stacks_of_python_write_it(tmp_path: Path, value: str) -> None:
    """They escape letters beyond ASCII, and what cannot be seen, which no other form of a value does."""
    with (tmp_path / "stacks").open("w+") as stacks:
        code = compile("write(stacks)", value, "exec")
        exec(code, {"write": faulthandler.dump_traceback, "stacks": stacks})  # noqa: S102 ours
        stacks.seek(0)
        said = stacks.read()
    masked = Mask({"KEY": value}).text(said)
    assert "ve-'key'" in said
    assert "ve-'key'" not in masked
    assert '"[secret KEY]", line 1 in <module>' in masked


@pytest.mark.timeout(60)
def test_a_secret_of_thousands_of_lines_does_not_keep_the_agent() -> None:
    """It masks a megabyte of what a rank says in its loop, as often as a rank says one."""
    lines = [f"{number:07x}{number:x}" for number in range(1, 7_000)]
    secret = "\n".join(lines)
    mask = Mask({"BUNDLE": secret})
    said = b'{"kind": "rank_failed", "error": "%s"}' % (b"y" * (1 << 20))
    for _ in range(8):
        assert mask.message(said) == said
    written = f"{secret} and {json.dumps(secret)} {lines[17]}"
    assert mask.text(written) == '[secret BUNDLE] and "[secret BUNDLE]" [secret BUNDLE]'


@contextlib.contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Of Python's functions and generators, and of those in C, that are called within."""
    calls = Counter[str]()
    sys.setprofile(lambda _frame, event, _said: calls.update([event]))
    try:
        yield calls
    finally:
        sys.setprofile(None)


def test_a_line_that_seems_to_be_cut_everywhere_does_not_keep_the_agent() -> None:
    """It looks before each cut for the beginning of a secret, of which a rank may write as many as it likes."""
    body = "\n".join(base64.b64encode(bytes(range(at, at + 48))).decode() for at in range(26))
    mask = Mask({"KEY": f"-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----"})
    with counted_calls() as calls:
        masked = mask.text(f"{'-' * 1_000}Thread 0x" * 300)
    assert "[secret KEY]Thread 0x" in masked
    assert calls["c_call"] < 200_000  # it was 900 000


def test_a_text_of_a_deep_message_takes_no_step_for_each_level_above_it() -> None:
    nested = "[" * 190 + ",".join(['""'] * 3_000) + "]" * 190
    said = f'{{"kind": {json.dumps(SECRET)}, "of no message": {nested}}}'.encode()
    with counted_calls() as calls:
        masked = Mask({"HUB": SECRET}).message(said)
    assert masked.startswith(b'{"kind":"[secret HUB]","of no message":[')
    assert calls["call"] < 20_000  # it was half a million


def test_no_half_of_a_secret_is_shown_in_a_deep_stack_of_a_job_with_a_long_one() -> None:
    """Of each path faulthandler shows 500 letters; a long secret may begin anywhere in as many thousand before a cut."""
    token = bytes(range(32)).hex()
    path = f"https://host.example/{'module/' * 63}?token={token}"[:500]
    half = path.partition("=")[2]
    frames = "".join(f'  File "{path}...", line {line} in walk\n' for line in range(99))
    mask = Mask({"HUB": token, "KEY": "".join(f"{number:08x}" for number in range(300))})
    assert half in frames
    assert half not in mask.text(frames)


def test_a_message_of_very_many_texts_is_masked_at_once() -> None:
    """Its agent does so in its loop, and looks for hundreds of forms."""

    class Counted(Mask):
        texts = 0

        def text(self, text: str) -> str:
            self.texts += 1
            return super().text(text)

    mask = Counted({"HUB": SECRET})
    said = {"kind": [SECRET, "", "\0"], SECRET: {"a": [None, f"<{SECRET}>", 1.5]}, "b": ["c"] * 999}
    masked = json.loads(mask.message(json.dumps(said).encode()))
    kept = {"kind": ["[secret HUB]", "", "\0"], "b": ["c"] * 999}
    assert masked == kept | {"[secret HUB]": {"a": [None, "<[secret HUB]>", 1.5]}}
    assert mask.texts == 2


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("ABC"),
        # None overlaps with itself: then it counts from where one begins to look.
        st.text('ab"ä/\n ', min_size=8, max_size=40).map(lambda text: f"q{text}"),
    ),
    st.data(),
)
def test_many_forms_are_masked_as_few_are(secrets: dict[str, str], data: st.DataObject) -> None:
    some = st.sampled_from([*secrets.values(), *map(json.dumps, secrets.values()), "a", " "])
    text = "".join(data.draw(st.lists(some, max_size=9)))
    few = Mask(secrets)
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(mask_module, "_MOST_ONE_BY_ONE", 0)
        many = Mask(secrets)
    assert many.text(text) == few.text(text)


def test_of_secrets_that_overlap_nothing_is_left() -> None:
    mask = Mask({"ONE": "abcdefgh-ijk", "TWO": "ijk-lmnopqrstuv", "PART": "lmnopqrst"})
    assert mask.text("<abcdefgh-ijk-lmnopqrstuv>") == "<[secret TWO]>"
    assert mask.text("lmnopqrst abcdefgh-ijk") == "[secret PART] [secret ONE]"


@pytest.mark.redis
def test_a_command_that_names_what_the_node_does_not_allow_is_refused(
    start_agent: StartAgent, controller: Controller
) -> None:
    controller.open_job()
    start_agent(MESHLOOM_FACTORY_PREFIXES="rank_program")
    controller.fact(NodeJoined)
    controller.send(launch().model_copy(update={"spec": spec("os:system", command="true")}))
    assert "os:system" in controller.fact(LaunchRefused).reason


@pytest.mark.system
@pytest.mark.ranks
@pytest.mark.redis
def test_a_secret_reaches_the_rank_and_turns_up_nowhere_else(
    start_agent: StartAgent, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "HUB").write_text(SECRET)
    model = {
        "factory": "secretive_model:build",
        "args": {"credential": {"secret": "HUB"}, "report": str(tmp_path / "report")},
    }
    with open_plane(redis_url, AccessPolicy()) as plane:
        agent = start_agent(
            MESHLOOM_TRAINER=DEFAULT_TRAINER,
            MESHLOOM_SECRETS_DIR=str(folder),
            MESHLOOM_USER_PATH=str(PROGRAMS),
            MESHLOOM_TOKEN="the-operators-own",  # noqa: S106 a test's
            MESHLOOM_RANK_ENV="MY_FLAG",
            MY_FLAG="kept",
            MY_OTHER_FLAG="dropped",
            AWS_SECRET_ACCESS_KEY="dropped",  # noqa: S106 a test's
        )
        job_id = plane.submit(model=model, resources={"ranks": 1}, faults={"max_restarts": 0})
        until(lambda: plane.job(job_id)["state"] == "FAILED", timeout_s=120)
        logs = plane.get(f"/v1/jobs/{job_id}/logs")
        answers = json.dumps(
            [
                plane.job(job_id),
                plane.get(f"/v1/jobs/{job_id}/attempts"),
                plane.get(f"/v1/jobs/{job_id}/events"),
                logs,
                plane.get("/v1/audit"),
                plane.get("/v1/nodes"),
            ],
            ensure_ascii=False,
        )
    (report,) = tmp_path.glob("report-*")
    told = json.loads(report.read_text())
    assert told["credential"] == SECRET
    assert_scrubbed(told["environment"])
    lines = [line["text"] for line in logs["items"]]
    for expected in (
        "using [secret HUB]",
        "GET https://host/?key=[secret HUB]",
        '{"credential": "[secret HUB]"}',
        "'[secret HUB]'",
    ):
        assert expected in lines
    assert "the hub refused [secret HUB]" in answers
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        stored = "\n".join(_dump(redis, str(key)) for key in redis.scan_iter("*"))
    assert '{"secret":"HUB"}' in stored
    assert f"{'x' * 90}[secret HUB]xxx" in stored
    assert SECRET[3:7] not in stored
    agent.stop()
    files = [path for path in agent.home.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o077 for path in (agent.home, *files)} == {0}
    kept = "".join(p.read_text() for p in files if p.suffix in {".json", ".log"})
    assert "using [secret HUB]" in kept
    for place in (stored, answers, agent.log.read_text(), capsys.readouterr().out, kept):
        for form in _telling(SECRET):
            assert form not in place


def assert_scrubbed(environment: dict[str, str]) -> None:
    """It has what computing needs, what the operator named, and one mark of ours."""
    assert environment["MY_FLAG"] == "kept"
    assert "PATH" in environment
    assert "MY_OTHER_FLAG" not in environment
    assert "AWS_SECRET_ACCESS_KEY" not in environment
    assert [name for name in environment if name.startswith("MESHLOOM_")] == ["MESHLOOM_NODE_MARK"]
    assert not any("redis" in value for value in environment.values())


def _telling(value: str) -> list[str]:
    return [value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]]


def _dump(redis: Redis, key: str) -> str:
    match redis.type(key):
        case "hash":
            return str(redis.hgetall(key))
        case "stream":
            return "\n".join(str(fields) for _, fields in redis.xrange(key))  # type: ignore[union-attr] # sync
        case "string":
            return str(redis.get(key))
        case "set":
            return str(redis.smembers(key))
        case other:
            assert other == "zset"
            return str(redis.zrange(key, 0, -1))
