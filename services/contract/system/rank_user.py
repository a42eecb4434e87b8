"""The system user of ranks, where their agent runs as root: who it is, and how to become it."""

import ctypes
import os
import pwd
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38


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
            OSError: The disk refuses, or this process may not.
        """
        if folder.stat().st_uid == self.uid:
            return
        for place, folders, files in os.walk(folder, topdown=False):
            for name in (*folders, *files):
                os.chown(Path(place, name), self.uid, self.gid, follow_symlinks=False)
        os.chown(folder, self.uid, self.gid)

    def become(self) -> None:
        """Make this process, with all of its threads, one of this user's for good.

        No program that it starts can gain rights again. What the kernel forgets with the old user is
        set again by the caller: the signal at its parent's end.

        Raises:
            OSError: This process may not.
        """
        groups = os.getgrouplist(self.name, self.gid)
        os.setgroups(groups)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        # The kernel hides a process that has changed its user even from itself.
        prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        own = {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}
        os.environ.update(own)  # noqa: TID251 written, for user code and its children
