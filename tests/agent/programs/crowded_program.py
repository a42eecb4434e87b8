"""A trainer of whose node the warm process may start no more processes, as where ranks took all of them."""

import os
import resource

from rank_program import train  # type: ignore[import-not-found]  # beside it on the user path

__all__ = ["train"]


def _take_all() -> None:
    if os.getuid() == 0:
        os.setresuid(*[65534] * 3)  # whom the limit binds
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


os.register_at_fork(after_in_child=_take_all)
