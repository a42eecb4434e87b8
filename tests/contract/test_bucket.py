"""A bucket's objects, on a real server: what the client promises to those that commit there."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.contract.storage.bucket import Bucket, NoConditionalWritesError
from services.contract.storage.storage_address import BucketAddress, storage_address
from services.contract.system.durable import StorageAwayError, node_condition
from tests.s3_server import BUCKET, Fault, S3Server, s3_server

PART = 5 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def bucket(
    server: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield Bucket(BucketAddress(BUCKET, request.node.name), PART)
    server.repair()


def test_of_two_writers_of_one_name_one_is_refused(bucket: Bucket) -> None:
    outcomes: list[object] = []

    def write(content: bytes) -> None:
        try:
            bucket.create("job/chain/00000001.json", content)
        except FileExistsError:
            outcomes.append("refused")
        else:
            outcomes.append(content)

    threads = [threading.Thread(target=write, args=(b"%d" % n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("refused") == 5
    assert bucket.read("job/chain/00000001.json")[0] in outcomes


def test_a_write_whose_answer_is_lost_is_refused_when_it_is_repeated(
    bucket: Bucket, server: S3Server
) -> None:
    bucket.prove_conditional_writes()
    server.fail(Fault(methods=("PUT",), code="", status=500, times=1))
    with pytest.raises(FileExistsError):
        bucket.create("record", b"one")
    assert bucket.read("record")[0] == b"one"


def test_a_server_that_ignores_the_condition_commits_nothing(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Bucket._put

    def unconditional(self: Bucket, name: str, content: bytes, *, only_new: bool = False) -> str:
        return put(self, name, content, only_new=only_new and False)

    monkeypatch.setattr(Bucket, "_put", unconditional)
    with pytest.raises(NoConditionalWritesError, match="ignores If-None-Match"):
        bucket.create("record", b"one")
    with pytest.raises(FileNotFoundError):
        bucket.read("record")


def test_an_upload_that_is_refused_halfway_goes_on_behind_the_parts_that_are_there(
    bucket: Bucket, server: S3Server, tmp_path: Path
) -> None:
    path = tmp_path / "shard"
    content = bytes(range(256)) * (PART // 256 * 2 + 100)
    path.write_bytes(content)
    sent: list[int] = []

    def part_begins() -> None:
        sent.append(1)

    server.fail(Fault(methods=("PUT",), after=1))
    with pytest.raises(StorageAwayError, match="SlowDown"):
        bucket.upload("shard", path, part_begins)
    assert bucket.folders("") == {"shard"}  # unfinished: found, so that it can be removed
    with pytest.raises(FileNotFoundError):
        bucket.size("shard")
    server.repair()
    sent.clear()
    bucket.upload("shard", path, part_begins)
    assert len(sent) == 2  # of three parts
    assert b"".join(bucket.parts("shard")) == content
    assert b"".join(bucket.parts("shard", PART - 5, PART + 5)) == content[PART - 5 : PART + 5]
    bucket.upload("again", path)
    assert bucket.size("again") == len(content)


def test_a_file_that_changed_is_uploaded_from_its_beginning(
    bucket: Bucket, server: S3Server, tmp_path: Path
) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(2 * PART))
    server.fail(Fault(methods=("PUT",), after=1))
    with pytest.raises(StorageAwayError):
        bucket.upload("shard", path)
    server.repair()
    path.write_bytes(b"x" * (2 * PART + 1))
    bucket.upload("shard", path)
    assert set(b"".join(bucket.parts("shard"))) == {ord("x")}


@pytest.mark.parametrize("size", [PART, 2 * PART + 1])
def test_a_file_that_changed_since_it_was_checked_is_no_object(
    bucket: Bucket, server: S3Server, tmp_path: Path, size: int
) -> None:
    """A rank may write into its shard between its agent's look and the upload, and set its time back."""
    path = tmp_path / "shard"
    path.write_bytes(bytes(size))
    checked, about = hashlib.sha256(bytes(size)).hexdigest(), path.stat()

    def change() -> None:
        with path.open("r+b") as file:
            file.seek(size - 1)
            file.write(b"x")
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))

    with pytest.raises(OSError, match=f"has changed since it was checked: .*, not {checked}"):
        bucket.upload("shard", path, change, size, checked)
    with pytest.raises(FileNotFoundError):
        bucket.size("shard")
    assert not [key for key in server.unfinished() if key.startswith(bucket.address.prefix + "/")]
    path.write_bytes(bytes(size))
    bucket.upload("shard", path, sha256=checked)
    assert bucket.size("shard") == size


def test_an_upload_that_goes_on_is_compared_with_the_digest_of_all_parts(
    bucket: Bucket, server: S3Server, tmp_path: Path
) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(range(256)) * (PART // 128) + b"x")
    checked = hashlib.sha256(path.read_bytes()).hexdigest()
    server.fail(Fault(methods=("PUT",), after=1))
    with pytest.raises(StorageAwayError):
        bucket.upload("shard", path, sha256=checked)
    server.repair()
    sent: list[int] = []
    bucket.upload("shard", path, lambda: sent.append(1), sha256=checked)
    assert len(sent) == 2
    assert b"".join(bucket.parts("shard")) == path.read_bytes()


def test_what_was_finished_by_a_request_whose_answer_was_lost_is_there(
    bucket: Bucket, server: S3Server, tmp_path: Path
) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(PART + 1))
    # The first POST begins the upload, the second one ends it.
    server.fail(Fault(methods=("POST",), code="", status=500, after=1, times=1))
    bucket.upload("shard", path)
    assert bucket.size("shard") == PART + 1


def test_of_two_uploads_of_one_file_at_once_each_is_done(bucket: Bucket, tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"x" * (PART + 1))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    both = threading.Barrier(2, timeout=60)

    def meet() -> None:
        both.wait()

    def upload() -> None:
        bucket.upload("shard", path, meet, sha256=digest)

    with ThreadPoolExecutor(2) as pool:
        uploads = [pool.submit(upload) for _ in range(2)]
        for each in uploads:
            each.result()
    assert bucket.size("shard") == PART + 1


def test_a_folder_goes_with_its_unfinished_uploads_and_no_other(
    bucket: Bucket, server: S3Server, tmp_path: Path
) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(PART + 1))
    server.fail(Fault(methods=("PUT",), within="torn"))
    with pytest.raises(StorageAwayError):
        bucket.upload("job/1/torn", path)
    server.repair()
    bucket.replace("job/1/whole", b"x")
    bucket.replace("job/10/whole", b"x")
    bucket.remove("job/1")
    assert bucket.folders("job") == {"10"}
    assert server.unfinished() == []


@pytest.mark.parametrize(
    ("status", "code"), [(503, "SlowDown"), (403, "AccessDenied"), (500, "InternalError")]
)
def test_a_refusal_is_a_condition_that_names_the_bucket_and_the_answer(
    bucket: Bucket, server: S3Server, status: int, code: str
) -> None:
    server.fail(Fault(code=code, status=status))
    with pytest.raises(StorageAwayError) as raised:
        bucket.read("record")
    condition = node_condition(raised.value, "node-1")
    assert condition == (
        f"s3://{BUCKET}/{bucket.address.prefix} answers {code} (HTTP {status}) to GetObject "
        "(seen from node-1)"
    )


_PAGE = "<html><body>Please log in"
_NO_ANSWERS = {
    "a page": Fault(status=200, says=_PAGE),
    "nothing": Fault(status=200, says=""),
    "no headers": Fault(keeps=1 << 30),
    "a length alone": Fault(keeps=1 << 30, headers=("content-length",)),
    "a proxy whose server is away": Fault(status=404, says="404 page not found"),
    "a proxy that says nothing": Fault(status=404, says=""),
}


@pytest.mark.parametrize("fault", _NO_ANSWERS.values(), ids=_NO_ANSWERS)
@pytest.mark.parametrize("what", ["names", "read", "size", "create", "replace", "upload", "parts"])
def test_what_is_no_answer_of_an_object_store_is_a_condition(
    bucket: Bucket, server: S3Server, tmp_path: Path, fault: Fault, what: str
) -> None:
    bucket.replace("folder/record", b"one")
    bucket.prove_conditional_writes()
    path = tmp_path / "shard"
    path.write_bytes(bytes(PART + 1))
    do: dict[str, Callable[[], object]] = {
        "names": lambda: bucket.names("folder"),
        "read": lambda: bucket.read("folder/record"),
        "size": lambda: bucket.size("folder/record"),
        "create": lambda: bucket.create("folder/new", b"two"),
        "replace": lambda: bucket.replace("folder/record", b"two"),
        "upload": lambda: bucket.upload("shard", path),
        "parts": lambda: list(bucket.parts("folder/record")),
    }
    server.fail(fault)
    if what == "names" and fault.keeps is not None:
        assert bucket.names("folder").keys() == {"record"}  # all that counts is in the body
        return
    with pytest.raises(StorageAwayError):
        do[what]()


def test_a_folder_whose_name_leads_elsewhere_is_none(bucket: Bucket, server: S3Server) -> None:
    """A server that does not divide names at each slash; a backup would have been written beside its folder."""
    named = (f"<Prefix>{bucket.address.prefix}/job/{n}/</Prefix>" for n in ("../../x", "..", "a"))
    told = "".join(f"<CommonPrefixes>{name}</CommonPrefixes>" for name in named)
    listing = f"<ListBucketResult><IsTruncated>false</IsTruncated>{told}</ListBucketResult>"
    server.fail(Fault(methods=("GET",), within="list-type=2", status=200, says=listing))
    assert bucket.folders("job") == {"a"}


def test_nothing_is_removed_that_does_not_lie_where_it_was_asked_for(
    bucket: Bucket, server: S3Server
) -> None:
    """A server that lists whatever it has; the removal of one checkpoint would have removed all."""
    for name in ("job/shards/a/x", "job/shards/b/x", "job/chain/1"):
        bucket.replace(name, b"x")
    keys = (f"{bucket.address.prefix}/job/{n}" for n in ("shards/a/x", "shards/b/x", "chain/1"))
    told = "".join(f"<Contents><Key>{key}</Key></Contents>" for key in keys)
    listing = f"<ListBucketResult><IsTruncated>false</IsTruncated>{told}</ListBucketResult>"
    server.fail(Fault(methods=("GET",), within="list-type=2", status=200, says=listing))
    bucket.remove("job/shards/a")
    server.repair()
    assert not bucket.names("job/shards/a")
    assert set(bucket.names("job/shards/b")) == {"x"}
    assert set(bucket.names("job/chain")) == {"1"}


def test_a_record_that_breaks_off_is_not_taken_for_whole(bucket: Bucket, server: S3Server) -> None:
    bucket.replace("record", b"0123456789")
    server.fail(Fault(methods=("GET",), keeps=4, headers=("content-length", "etag")))
    with pytest.raises(StorageAwayError, match="4 of 10 bytes"):
        bucket.read("record")


def test_an_upload_of_which_the_server_lost_a_part_begins_again(
    bucket: Bucket, server: S3Server, tmp_path: Path
) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"x" * (PART + 1))
    # The first POST begins the upload, the second one ends it.
    server.fail(Fault(methods=("POST",), code="InvalidPart", status=400, after=1, times=1))
    with pytest.raises(StorageAwayError, match="InvalidPart"):
        bucket.upload("shard", path)
    sent: list[int] = []
    bucket.upload("shard", path, lambda: sent.append(1))
    assert len(sent) == 2
    assert bucket.size("shard") == PART + 1
    assert not [key for key in server.unfinished() if key.startswith(bucket.address.prefix + "/")]


def test_why_a_server_is_away_names_no_password_of_its_address(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://ada:a-password@127.0.0.1:9/")
    with pytest.raises(StorageAwayError, match=r"http://127\.0\.0\.1:9/") as told:
        bucket.read("record")
    assert "a-password" not in str(told.value)


@pytest.mark.parametrize(
    "endpoint",
    ["http://ada:a-password@a b/", "ada:a-password@127.0.0.1:9"],
    ids=["odd host", "no scheme"],
)
def test_why_an_address_is_none_names_no_password_of_it(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    with pytest.raises(StorageAwayError, match="Invalid endpoint") as told:
        bucket.read("record")
    assert "a-password" not in str(told.value)


def test_a_server_that_is_away_is_a_condition_too(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    with pytest.raises(StorageAwayError, match="does not answer"):
        bucket.names("")


@pytest.mark.parametrize("text", ["s3://", "s3://UPPER/x", "s3://bucket/a//b", "s3://bucket/../x"])
def test_what_names_no_place_in_a_bucket_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="names no place in a bucket"):
        storage_address(text)


def test_an_address_is_read_and_written_alike() -> None:
    for text in ("s3://bucket", "s3://my.bucket-1/a/b_c"):
        assert str(storage_address(text)) == text
    assert storage_address("/folder") == "/folder"
