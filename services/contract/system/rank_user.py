"""The system user of ranks, where their agent runs as root: who it is, and how to become it."""

import ctypes
import errno
import os
import platform
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from services.contract.system.durable import own_folder

_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38
_KEYCTL_JOIN_SESSION_KEYRING: Final = 1
# keyctl(2), which the C library does not have.
_KEYCTL: Final[Mapping[str, int]] = MappingProxyType(
    {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271, "s390x": 280}
)


class NoSuchUserError(ValueError):
    """The system has no user of this name."""


@dataclass(frozen=True)
class RankUser:
    """A system user that is not root.

    Attributes:
        name: Of the user.
        uid: Its number.
        gid: Of its first group.
        home: Its folder.
    """

    name: str
    uid: int
    gid: int
    home: str

    @classmethod
    def named(cls, name: str) -> Self:
        """The user of this name.

        Raises:
            NoSuchUserError: There is none, or it is root.
        """
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise NoSuchUserError(f"the system has no user {name!r}") from None
        if entry.pw_uid == 0:
            raise NoSuchUserError(f"{name!r} is root; name a user that owns nothing else")
        return cls(name, entry.pw_uid, entry.pw_gid, entry.pw_dir)

    def take_over(self, folder: Path) -> None:
        """Make this user the owner of a folder and of all in it, unless it is the folder's already.

        Only what was there before the user could write there is handed over: later it might be a link
        that leads elsewhere.

        Raises:
            OSError: The disk refuses, or this process may not; or it is a link of another user.
        """
        with own_folder(folder) as top:
            if os.fstat(top).st_uid == self.uid:
                return
            # Not by paths: where agents of other users share the storage, their ranks may change what lies there.
            for _, folders, files, place in os.fwalk(".", topdown=False, dir_fd=top):
                for name in (*folders, *files):
                    os.chown(name, self.uid, self.gid, dir_fd=place, follow_symlinks=False)
            os.fchown(top, self.uid, self.gid)

    def become(self) -> None:
        """Make this process, with all of its threads, one of this user's for good; see also `forgo_rights`.

        What the kernel forgets with the old user is set again by the caller: the signal at its parent's end.
        A working directory that the user cannot reach by its path is left for ``/``: it would open what lies
        behind folders that are closed to the user.

        Raises:
            OSError: This process may not.
        """
        groups = os.getgrouplist(self.name, self.gid)
        os.setgroups(groups)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)
        # The kernel hides a process that has changed its user even from itself.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        own = {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}
        os.environ.update(own)  # noqa: TID251 written, for user code and its children
        try:
            os.chdir(Path.cwd())
        except OSError:
            os.chdir("/")


def forgo_rights() -> None:
    """Let no program that this process starts gain rights, and join a session keyring of the process's own.

    Whoever has root's session keyring may use root's keys as any user. To be called before
    `RankUser.become`, by a process of one thread: a thread that is there already keeps root's keyring, and
    may gain rights.

    Raises:
        OSError: The kernel refuses a keyring; not where it has no keys, or none for this process (seccomp).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    number = _KEYCTL.get(platform.machine())
    if number is None or libc.syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None) >= 0:
        return
    if (error := ctypes.get_errno()) not in {errno.ENOSYS, errno.EPERM}:
        raise OSError(error, f"no session keyring of its own: {os.strerror(error)}")
