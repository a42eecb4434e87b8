"""Archives of code: the same for the same files, and hostile ones are refused before anything is written."""

import contextlib
import gzip
import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies

from services.contract.jobs import code_archives
from services.contract.jobs.code_archives import (
    CodeArchiveError,
    Contents,
    digest_of,
    examine,
    hides_ours,
    is_unpacked,
    pack,
    unpack,
)
from services.contract.jobs.specs import JobSpec

FILES = [("pkg/model.py", b"WIDTH = 3\n", False), ("train.sh", b"#!/bin/sh\n", True)]
Header = Callable[[tarfile.TarInfo], None]


def tar(*members: tuple[str, Header | bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    """An archive of any members: of plain content, or of headers as they are made."""
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w:gz", format=form) as made:
        for name, what in members:
            header = tarfile.TarInfo(name)
            if isinstance(what, bytes):
                header.size = len(what)
                made.addfile(header, io.BytesIO(what))
            else:
                what(header)
                made.addfile(header)
    return text.getvalue()


def link(kind: bytes, target: str = "/etc/passwd") -> Header:
    def make(header: tarfile.TarInfo) -> None:
        header.type, header.linkname = kind, target

    return make


def of_kind(kind: bytes) -> Header:
    return link(kind, "")


def raw(*blocks: bytes) -> bytes:
    """What no library writes: blocks of a tar, as they are."""
    return gzip.compress(
        b"".join(block.ljust(-(-len(block) // 512) * 512, b"\0") for block in blocks)
    )


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    made = tarfile.TarInfo(name)
    made.size, made.type = size, kind
    return made.tobuf(tarfile.GNU_FORMAT)


def with_size(block: bytes, field: bytes) -> bytes:
    """The header with another size field, its checksum right."""
    changed = block[:124] + field + block[136:148] + b" " * 8 + block[156:]
    return changed[:148] + b"%06o\0 " % sum(changed) + changed[156:]


HOSTILE: dict[str, tuple[bytes, str]] = {
    "absolute": (tar(("/etc/cron.d/x", b"x")), "not a plain path"),
    "above": (tar(("../x.py", b"x")), "not a plain path"),
    "above, hidden": (tar(("a/../../x.py", b"x")), "not a plain path"),
    "above, behind a dot": (tar(("./../x.py", b"x")), "not a plain path"),
    "empty part": (tar(("a//x.py", b"x")), "not a plain path"),
    "backslash": (tar(("..\\x.py", b"x")), "backslash"),
    "line break": (tar(("a\nb.py", b"x")), "control character"),
    "terminal": (tar(("a\x1b[2Jb.py", b"x")), "control character"),
    "no text": (tar(("a\udcff.py", b"x")), "control character"),
    "symlink": (tar(("a", link(tarfile.SYMTYPE)), ("a/x.py", b"x")), "symbolic link"),
    "hard link": (tar(("a", link(tarfile.LNKTYPE))), "hard link"),
    "character device": (tar(("a", of_kind(tarfile.CHRTYPE))), "device"),
    "block device": (tar(("a", of_kind(tarfile.BLKTYPE))), "device"),
    "named pipe": (tar(("a", of_kind(tarfile.FIFOTYPE))), "named pipe"),
    "unknown kind": (tar(("a", of_kind(b"Z"))), "unknown kind"),
    "sparse": (raw(header("a", kind=tarfile.GNUTYPE_SPARSE), bytes(1024)), "unknown kind"),
    "twice": (tar(("a.py", b"1"), ("a.py", b"2")), "twice"),
    "twice, with a dot": (tar(("a.py", b"1"), ("./a.py", b"2")), "twice"),
    "file and folder": (tar(("a/b.py", b"1"), ("a", b"2")), "twice"),
    "folder and file": (tar(("a", b"1"), ("a/b.py", b"2")), "below the file"),
    "case": (tar(("Model.py", b"1"), ("model.py", b"2")), "differ only in case"),
    "case of a folder": (tar(("Pkg/a.py", b"1"), ("pkg/b.py", b"2")), "differ only in case"),
    "accents": (tar(("e\u0301.py", b"1"), ("\u00e9.py", b"2")), "encoding of letters"),
    "long name": (tar((f"{'a' * 300}.py", b"x")), "too long"),
    "long path": (tar(("/".join(["a" * 60] * 20), b"x")), "too long"),
    "many folders": (tar(("a/" * 40 + "x.py", b"x")), "folders"),
    "long header": (tar(("a" * 100_000, b"x"), form=tarfile.PAX_FORMAT), "header of more"),
    "many digits": (raw(header("x", 900, tarfile.XHDTYPE), b"9" * 900, header("a")), "100 digits"),
    "ours": (tar(("services/__init__.py", b"")), "Meshloom's own package services"),
    "our module": (tar(("fsdp_core.py", b"")), "Meshloom's own package fsdp_core"),
    "our folder": (tar(("meshloom", of_kind(tarfile.DIRTYPE))), "own package meshloom"),
    "negative size": (raw(with_size(header("a"), b"\xff" * 11 + b"\x00")), "negative|damaged"),
    "larger than it is": (raw(header("a", size=10**6), b"x"), "damaged"),
    "bomb, as it says": (raw(header("a", size=1 << 40)), "more than 256 MiB"),
    "something behind": (raw(header("a"), bytes(1024), b"x" * 600), "follows its last member"),
    "no gzip": (b"import os\n", "not a gzipped tar"),
    "no tar": (gzip.compress(b"import os\n" * 100), "not a gzipped tar"),
    "nothing": (gzip.compress(b""), "not a gzipped tar"),
    "empty": (gzip.compress(bytes(10_240)), "no file|not a gzipped tar"),
    "cut": (pack(FILES)[:-20], "damaged"),
    "another gzip behind it": (pack(FILES) + gzip.compress(b""), "something follows its gzip"),
    "zeros behind it": (pack(FILES) + bytes(100_000), "something follows its gzip"),
    "wrong checksum": (pack(FILES)[:-8] + bytes(8), "damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    body, why = HOSTILE[name]
    folder = tmp_path / "below" / "code"
    folder.parent.mkdir()
    with pytest.raises(CodeArchiveError, match=why) as refused:
        unpack(body, folder)
    assert list(tmp_path.rglob("*")) == [folder.parent]
    assert str(refused.value).isprintable()
    with pytest.raises(CodeArchiveError, match=why):
        examine(body)


def test_what_unpacks_to_more_than_it_says_is_stopped_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = 0
    plainly = code_archives._Metered.read

    def counted(self: code_archives._Metered, size: int) -> bytes:
        nonlocal read
        piece = plainly(self, size)
        read += len(piece)
        return piece

    monkeypatch.setattr(code_archives._Metered, "read", counted)
    endless_header = raw(
        header("././@LongLink", 1 << 30, tarfile.GNUTYPE_LONGNAME), bytes(64 << 20)
    )
    trailing = gzip.compress(header("a") + bytes(64 << 20))
    for body in (endless_header, trailing):
        read = 0
        with pytest.raises(CodeArchiveError):
            examine(body)
        assert read < 2 << 20


def test_digits_are_many_in_headers_alone() -> None:
    assert examine(pack([("digits.txt", b"9" * 5_000, False), ("b.py", b"", False)])).files == 2


def test_members_and_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_archives, "MOST_MEMBERS", 10)
    assert examine(pack([(f"{n}.py", b"", False) for n in range(10)])) == Contents(10, 0)
    with pytest.raises(CodeArchiveError, match="more than 10 members"):
        examine(pack([(f"{n}.py", b"", False) for n in range(11)]))
    assert examine(pack([("/".join("abcdefghij") + "/k.py", b"", False)])).files == 1
    with pytest.raises(CodeArchiveError, match="more than 10 folders"):
        examine(pack([("/".join("abcdefghijk") + "/l.py", b"", False)]))
    monkeypatch.setattr(code_archives, "_READ_WITHIN_S", -1.0)
    with pytest.raises(CodeArchiveError, match="cannot be read within"):
        examine(pack(FILES))


def test_what_is_packed_unpacks_to_the_same_for_everybody_to_read_and_nobody_to_write(
    tmp_path: Path,
) -> None:
    body, folder = pack(FILES), tmp_path / "code"
    assert examine(body) == Contents(2, 20)
    unpack(body, folder)
    assert is_unpacked(body, folder)
    assert {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in folder.rglob("*")
    } == {"pkg": 0o555, "pkg/model.py": 0o444, "train.sh": 0o555}
    assert (folder / "pkg/model.py").read_bytes() == b"WIDTH = 3\n"
    with pytest.raises(FileExistsError):
        unpack(body, folder)


def test_the_same_files_make_the_same_archive_in_whatever_order_they_come() -> None:
    assert pack(reversed(FILES)) == pack(FILES)
    assert digest_of(pack(FILES)) != digest_of(pack(FILES[:1]))
    with gzip.open(io.BytesIO(pack(FILES))) as text, tarfile.open(fileobj=text) as made:
        owners = {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in made}
    assert owners == {(0, 0, 0, "", "")}


def test_archives_as_other_tools_make_them_are_taken(tmp_path: Path) -> None:
    folder = of_kind(tarfile.DIRTYPE)
    body = tar((".", folder), ("./pkg", folder), ("./pkg/a.py", b"1"), form=tarfile.PAX_FORMAT)
    unpack(body, tmp_path / "code")
    assert (tmp_path / "code/pkg/a.py").read_bytes() == b"1"
    assert is_unpacked(body, tmp_path / "code")


def replaced(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": lambda f: (f / "pkg/model.py").unlink(),
    "changed": lambda f: (f / "pkg/model.py").write_bytes(b"WIDTH = 4\n"),
    "longer": lambda f: (f / "pkg/model.py").write_bytes(b"WIDTH = 3\n\n"),
    "more": lambda f: (f / "pkg/torch.py").write_bytes(b""),
    "empty folder": lambda f: (f / "pkg/inner").mkdir(),
    "link": lambda f: replaced(f / "train.sh", lambda p: p.symlink_to("pkg/model.py")),
    "pipe": lambda f: replaced(f / "train.sh", os.mkfifo),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_whatever_was_changed_below_an_unpacked_archive_is_noticed(
    tmp_path: Path, name: str
) -> None:
    body, folder = pack(FILES), tmp_path / "code"
    unpack(body, folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o700)
    assert is_unpacked(body, folder)
    DAMAGE[name](folder)
    assert not is_unpacked(body, folder)


NAMES = strategies.text(strategies.characters(codec="utf-8"), min_size=1, max_size=12)
PATHS = strategies.lists(NAMES, min_size=1, max_size=4).map("/".join)


@hypothesis.settings(max_examples=100)
@hypothesis.given(paths=strategies.lists(PATHS, min_size=1, max_size=6))
def test_whatever_members_are_called_all_stay_below_the_folder(
    tmp_path_factory: pytest.TempPathFactory, paths: list[str]
) -> None:
    body = tar(*((path, path.encode()) for path in paths), form=tarfile.PAX_FORMAT)
    parent = tmp_path_factory.mktemp("any")
    try:
        unpack(body, parent / "code")
    except CodeArchiveError:
        assert list(parent.iterdir()) == []
        return
    assert is_unpacked(body, parent / "code")
    files = [path for path in (parent / "code").rglob("*") if path.is_file()]
    assert sorted(path.read_text() for path in files) == sorted(paths)
    assert list(parent.iterdir()) == [parent / "code"]


@hypothesis.settings(max_examples=150)
@hypothesis.given(
    places=strategies.lists(strategies.integers(0, 5 * 512 - 1), min_size=1, max_size=6),
    values=strategies.binary(min_size=6, max_size=6),
)
def test_whatever_a_header_says_it_is_judged_or_refused(places: list[int], values: bytes) -> None:
    """Nothing but ``CodeArchiveError`` comes out, whichever bytes of a tar are changed."""
    text = bytearray(gzip.decompress(pack([("é" * 40, b"1", False), ("b/c.py", b"2", True)])))
    for place, value in zip(places, values, strict=False):
        text[place] = value
    for start in (0, 1024, 2048):  # with a right checksum, or tarfile would look no further
        block = text[start : start + 148] + b" " * 8 + text[start + 156 : start + 512]
        text[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    with contextlib.suppress(CodeArchiveError):
        assert examine(gzip.compress(bytes(text), 1)).files > 0


def test_only_what_could_be_imported_in_place_of_ours_has_a_reserved_name() -> None:
    assert [
        hides_ours(path, is_folder=False)
        for path in ("services.py", "services.cpython-311.so", "meshloom/x.txt")
    ] == ["services", "services", "meshloom"]
    for path in ("services.yaml", "services", "lib/services/x.py", "my_services.py"):
        assert hides_ours(path, is_folder=False) is None


def test_a_spec_names_code_by_its_digest_and_without_it_is_as_before() -> None:
    spec = {"model": {"factory": "m:M"}, "data": {"factory": "d:D"}, "train": {"steps": 1}}
    assert JobSpec.model_validate(spec).code is None
    digest = digest_of(pack(FILES))
    assert JobSpec.model_validate({**spec, "code": digest}).code == digest
    for wrong in ("sha256:abc", digest.upper(), digest.removeprefix("sha256:"), f"{digest}\n"):
        with pytest.raises(ValueError, match="code"):
            JobSpec.model_validate({**spec, "code": wrong})
