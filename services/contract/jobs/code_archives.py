"""Archives of uploaded code: made the same everywhere, judged before a byte of them is written.

An archive is a gzipped tar of plain files and folders, named by its SHA-256. Whoever reads one judges
it again by the same rules: the command line before it is sent, the controller before it is kept, the
agent before it is unpacked. It is read as a stream, one member at a time, with a bound on what may come
before the next one is known, so that neither a bomb nor a forged header takes more than that.
"""

import gzip
import hashlib
import io
import os
import re
import stat
import tarfile
import time
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Final, cast

from pydantic import StringConstraints

from services.contract.system.gzip_text import GzipText

CodeDigest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
"""``sha256:`` and 64 hexadecimal digits: of the archive's bytes as they are uploaded."""

DEFAULT_CODE_MIB: Final = 16
MOST_CODE_MIB: Final = 256
DEFAULT_CODE_STORE_MIB: Final = 1_024
MOST_UNPACKED_BYTES: Final = 256 << 20
MOST_MEMBERS: Final = 20_000
RESERVED_NAMES: Final = ("services", "fsdp_core", "meshloom")
"""Our own packages: an import of these names never finds anything of users."""

_MOST_PATH_BYTES: Final = 1_024
_MOST_NAME_BYTES: Final = 255
MOST_FOLDERS: Final = 32
# A header with its extensions: a path, times, labels.
_HEADER_BYTES: Final = 4_096
# tarfile looks for numbers in a time that grows with the square of their digits, and meanwhile no other
# thread of the process runs.
_MANY_DIGITS: Final = re.compile(rb"[0-9]{100}")
_READ_WITHIN_S: Final = 30.0
_PIECE: Final = 1 << 20
_INFLATED_BYTES: Final = 64 << 10
_MODULE_SUFFIXES: Final = (".py", ".pyc", ".so")
_TAKEN: Final = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE})
_PREFIX: Final = "sha256:"
_NAMED: Final = 60
_KINDS: Final = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
}


class CodeArchiveError(ValueError):
    """The archive is none that is taken; the text says what of it, and what to do."""


@dataclass(frozen=True)
class Contents:
    """What an archive holds: so many files, of so many bytes together."""

    files: int
    unpacked_bytes: int


@dataclass(frozen=True)
class Member:
    """A file or folder of an archive that may be unpacked. ``path`` is relative, with slashes."""

    path: str
    is_folder: bool
    size: int
    is_executable: bool


def digest_of(body: bytes) -> str:
    """The name of an archive with these bytes."""
    return f"{_PREFIX}{hashlib.sha256(body).hexdigest()}"


def hex_of(digest: str) -> str:
    """The 64 digits of a ``CodeDigest``: part of names of keys and folders."""
    return digest.removeprefix(_PREFIX)


def digest_of_hex(digits: str) -> str:
    """The ``CodeDigest`` with these digits."""
    return f"{_PREFIX}{digits}"


def pack(files: Iterable[tuple[str, bytes, bool]]) -> bytes:
    """An archive of these files: the same bytes for the same files, whenever and by whomever.

    Args:
        files: Path relative to the archive's root, content, and whether it is executable.
    """
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, compresslevel=6, mtime=0) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path, content, is_executable in sorted(files):
            header = tarfile.TarInfo(path)
            header.size = len(content)
            header.mode = 0o755 if is_executable else 0o644
            tar.addfile(header, io.BytesIO(content))
    return packed.getvalue()


def examine(body: bytes) -> Contents:
    """Judge an archive; nothing of it is written.

    Raises:
        CodeArchiveError: It is damaged, too large once unpacked, or not safe to unpack.
    """
    files = unpacked = 0
    for member, _ in _members(body):
        files += not member.is_folder
        unpacked += member.size
    if not files:
        raise CodeArchiveError("the archive holds no file")
    return Contents(files, unpacked)


def unpack(body: bytes, folder: Path) -> None:
    """Unpack an archive into ``folder``, which is made, for everybody to read and nobody to write.

    The whole archive is judged before the first file is written.

    Raises:
        CodeArchiveError: See ``examine``.
        FileExistsError: The folder is there.
        OSError: The disk refuses.
    """
    examine(body)
    folder.mkdir(mode=0o700)
    folders = {folder}
    for member, content in _members(body):
        place = folder / member.path
        parent = place if member.is_folder else place.parent
        while parent not in folders:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folders.add(parent)
            parent = parent.parent
        if content is not None:
            _write(place, content, 0o555 if member.is_executable else 0o444)
    for made in folders:
        made.chmod(0o555)


def is_unpacked(body: bytes, folder: Path) -> bool:
    """Whether ``folder`` holds what ``unpack`` puts there: nothing else, nothing less.

    Raises:
        CodeArchiveError: See ``examine``.
    """
    expected: set[str] = set()
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            return False
        for member, content in _members(body):
            expected.update(_line(member.path))
            place = folder / member.path
            mode = place.lstat().st_mode
            if content is None and not stat.S_ISDIR(mode):
                return False
            if content is not None and not (stat.S_ISREG(mode) and _equals(place, content)):
                return False
        found = {
            os.path.relpath(os.path.join(where, name), folder)  # noqa: PTH118 a hundred times faster
            for where, folders, names in os.walk(folder)
            for name in (*folders, *names)
        }
    except OSError:
        return False
    return found == expected


def hides_ours(path: str, *, is_folder: bool) -> str | None:
    """The package of ours that a folder or module of this path would have to hide; None if none.

    Args:
        path: Relative to a folder that is imported from.
        is_folder: Whether that is a folder itself.
    """
    top, slash, _ = path.partition("/")
    if slash or is_folder:
        return top if top in RESERVED_NAMES else None
    stem = top.partition(".")[0]
    return stem if stem in RESERVED_NAMES and top.endswith(_MODULE_SUFFIXES) else None


def _members(body: bytes) -> Iterator[tuple[Member, IO[bytes] | None]]:
    """Each member once it is judged, with its content while it is the last one that was asked for.

    Raises:
        CodeArchiveError: A member is none that is taken; those before it were handed out.
    """
    source = _Metered(body)
    judge = _Judge()
    try:
        # Block by block, so that a header that goes on too long is noticed before it is read.
        stream = cast("IO[bytes]", source)  # of which tarfile reads alone
        with tarfile.open(fileobj=stream, mode="r|", bufsize=tarfile.BLOCKSIZE) as tar:
            while (header := tar.next()) is not None:
                member = judge.judged(header)
                source.allow(member.size if member is not None else 0)
                if member is not None:
                    yield member, None if member.is_folder else tar.extractfile(header)
                # It keeps all headers for people who look one up.
                tar.members.clear()  # type: ignore[attr-defined] # typeshed leaves it out
        source.end()
    except (CodeArchiveError, GeneratorExit):
        raise
    except Exception as error:  # a forged header makes tarfile raise whatever it meets
        raise CodeArchiveError(
            f"this is not a gzipped tar archive, or it is damaged ({type(error).__name__}: {error})"
        ) from error


class _Metered:
    """What a gzipped text holds, no more of it than was allowed for the next member."""

    def __init__(self, body: bytes) -> None:
        self._gzip = GzipText(io.BytesIO(body), len(body))
        self._text = io.BufferedReader(self._gzip, _INFLATED_BYTES)
        self._read = 0
        self._allowed = 0
        self._header_at = 0
        self._over_at = time.monotonic() + _READ_WITHIN_S
        self.allow(0)

    def allow(self, content_bytes: int) -> None:
        """So much content may come, and the next header.

        Raises:
            CodeArchiveError: The archive took too long.
        """
        self._allowed = self._read + content_bytes + _HEADER_BYTES
        self._header_at = self._read + -(-content_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if time.monotonic() > self._over_at:
            raise CodeArchiveError(f"the archive cannot be read within {_READ_WITHIN_S:g} s")

    def read(self, size: int) -> bytes:
        """Read up to ``size`` bytes.

        Raises:
            CodeArchiveError: They are more than was allowed, or a header that is not to be read.
        """
        piece = self._text.read(size)
        if self._read >= self._header_at and _MANY_DIGITS.search(piece):
            raise CodeArchiveError("the archive has a header with a number of 100 digits or more")
        self._read += len(piece)
        if self._read > self._allowed:
            raise CodeArchiveError(
                f"the archive has a header of more than {_HEADER_BYTES >> 10} KiB, or more content "
                "than its headers say"
            )
        return piece

    def end(self) -> None:
        """See that nothing but padding follows, and nothing behind the gzip, whose checksum is compared with it.

        Raises:
            CodeArchiveError: Something does.
        """
        self._allowed = self._read + _PIECE
        while piece := self.read(_HEADER_BYTES):
            if piece.strip(b"\0"):
                raise CodeArchiveError("the archive is damaged: something follows its last member")
        if self._gzip.is_followed():
            raise CodeArchiveError("the archive is damaged: something follows its gzip")


class _Judge:
    """What was seen of an archive, and what may follow."""

    def __init__(self) -> None:
        self._count = 0
        self._bytes = 0
        self._spelled: dict[str, str] = {}
        self._files: set[str] = set()
        self._folders: set[str] = set()
        self._listed: set[str] = set()

    def judged(self, header: tarfile.TarInfo) -> Member | None:
        """The member, if it may be unpacked; None for the root itself.

        Raises:
            CodeArchiveError: It may not.
        """
        self._count += 1
        if self._count > MOST_MEMBERS:
            raise CodeArchiveError(
                f"the archive has more than {MOST_MEMBERS} members; leave out what no job needs "
                "(list it in .gitignore)"
            )
        is_folder = header.type == tarfile.DIRTYPE
        shown = _shown(header.name)
        if header.issparse() or header.type not in _TAKEN:
            kind = _KINDS.get(header.type, "of an unknown kind")
            raise CodeArchiveError(f"{shown} is {kind}: an archive holds plain files and folders")
        if header.size < 0:
            raise CodeArchiveError(f"{shown} has a negative size")
        path = header.name.removeprefix("./")
        if is_folder and path in {".", ""}:
            return None
        _refuse_path(path, shown)
        size = 0 if is_folder else header.size
        self._bytes += size
        if self._bytes > MOST_UNPACKED_BYTES:
            raise CodeArchiveError(
                f"the archive holds more than {MOST_UNPACKED_BYTES >> 20} MiB; leave out data and "
                "checkpoints (list them in .gitignore)"
            )
        self._refuse_clashes(path, shown, is_folder=is_folder)
        hidden = hides_ours(path, is_folder=is_folder)
        if hidden is not None:
            raise CodeArchiveError(
                f"{shown} would be hidden by Meshloom's own package {hidden}; rename it"
            )
        return Member(path, is_folder, size, bool(header.mode & 0o100))

    def _refuse_clashes(self, path: str, shown: str, *, is_folder: bool) -> None:
        """Refuse a path that is, for some file system, that of another member."""
        *above, itself = _line(path)
        for folder in above:
            self._spell(folder, shown)
            if folder in self._files:
                raise CodeArchiveError(f"{shown} lies below the file {_shown(folder)}")
        self._folders.update(above)
        # They cost no member: a packed kilobyte can name thousands.
        if len(self._folders) > MOST_MEMBERS:
            raise CodeArchiveError(
                f"the archive has more than {MOST_MEMBERS} folders; leave out what no job needs "
                "(list it in .gitignore)"
            )
        if itself in self._listed or (not is_folder and itself in self._folders):
            raise CodeArchiveError(f"{shown} is in the archive twice")
        self._spell(itself, shown)
        self._listed.add(itself)
        (self._folders if is_folder else self._files).add(itself)

    def _spell(self, path: str, shown: str) -> None:
        same = unicodedata.normalize("NFC", path).casefold()
        known = self._spelled.setdefault(same, path)
        if known != path:
            raise CodeArchiveError(
                f"{shown} and {_shown(known)} differ only in case or in the encoding of letters; "
                "rename one of them"
            )


def _refuse_path(path: str, shown: str) -> None:
    """Refuse what leads elsewhere, or what some file system or terminal takes for something else.

    Raises:
        CodeArchiveError: It does.
    """
    parts = path.split("/")
    if any(part in {"", ".", ".."} for part in parts):
        raise CodeArchiveError(f"{shown} is not a plain path below the archive's root")
    if "\\" in path or any(unicodedata.category(letter) in {"Cc", "Cs"} for letter in path):
        raise CodeArchiveError(f"{shown} has a backslash or a control character in its name")
    sizes = [len(part.encode()) for part in parts]
    if max(sizes) > _MOST_NAME_BYTES or sum(sizes) + len(sizes) > _MOST_PATH_BYTES:
        raise CodeArchiveError(
            f"{shown} is too long: a name has up to {_MOST_NAME_BYTES} bytes, a path up to "
            f"{_MOST_PATH_BYTES}"
        )
    if len(parts) > MOST_FOLDERS:
        raise CodeArchiveError(f"{shown} lies in more than {MOST_FOLDERS} folders")


def _line(path: str) -> list[str]:
    """A path's folders from the top, then the path itself."""
    parts = path.split("/")
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def _shown(name: str) -> str:
    """A member's name in a sentence, cut, with escapes for what cannot be shown."""
    return ascii(name if len(name) <= _NAMED else f"{name[: _NAMED // 2]}…{name[-_NAMED // 2 :]}")


def _write(place: Path, content: IO[bytes], mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(place, flags, 0o600), "wb") as file:  # noqa: PTH123 a descriptor, not a path
        while piece := content.read(_PIECE):
            file.write(piece)
        os.fchmod(file.fileno(), mode)


def _equals(place: Path, content: IO[bytes]) -> bool:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(place, flags), "rb") as file:  # noqa: PTH123 a descriptor, not a path
        while piece := content.read(_PIECE):
            if file.read(len(piece)) != piece:
                return False
        return not file.read(1)
