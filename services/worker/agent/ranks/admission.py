"""What this node lets a job have: the factories and trackers that it may name, and the secrets that it refers to.

The controller has refused the same before. This looks again, for a command that reached the inbox
by another way, and because only the node has the secrets.
"""

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.contract.jobs.entry_points import (
    EntryPoints,
    factories_of,
    is_entry_point,
    trackers_of,
)
from services.contract.jobs.secret_references import references
from services.contract.jobs.specs import JobSpec
from services.contract.system.mask import MIN_SECRET_CHARACTERS

_MAX_SECRET_BYTES: Final = 65_536


class NotAdmittedError(Exception):
    """This node does not take the job; the text says why, and no secret."""


@dataclass(frozen=True)
class Admission:
    """The node's rules.

    ``factories``: what specs may name. ``secrets``: a folder with a file a secret; None: there are
    none. ``data_roots``: below which built-in data sources read; ``private``: what of these holds other jobs' files.
    """

    factories: EntryPoints
    secrets: Path | None
    data_roots: tuple[Path, ...]
    private: tuple[Path, ...] = ()

    def admit(self, spec: JobSpec) -> Mapping[str, str]:
        """The secrets that the job refers to, by name.

        Raises:
            NotAdmittedError: It names or brings what it may not, or a secret is not here.
        """
        names: set[str] = set()
        if spec.code is not None and not self.factories.take_uploads:
            raise NotAdmittedError(
                "code: uploaded code is disabled on this node (MESHLOOM_UPLOADED_CODE)"
            )
        for field, used in factories_of(spec):
            if not self.factories.allows_of(spec, used.factory):
                raise NotAdmittedError(
                    f"{field}.factory: {used.factory} is not among MESHLOOM_FACTORY_PREFIXES of "
                    "this node"
                )
            named = set(references(used.args))
            if named and not is_entry_point(used.factory):
                raise NotAdmittedError(f"{field}.args: {used.factory} takes no secret")
            names |= named
        if spec.entrypoint is not None and not self.factories.allows_script_of(spec):
            raise NotAdmittedError(
                f"entrypoint: {spec.entrypoint.what} is not among MESHLOOM_FACTORY_PREFIXES of this "
                "node"
            )
        for field, server in trackers_of(spec):
            if not self.factories.allows_tracker_of(spec, server):
                raise NotAdmittedError(
                    f"{field}: this server is not among MESHLOOM_TRACKER_SERVERS of this node"
                )
        if spec.metrics is not None:
            names.update(references(spec.metrics.model_dump()))
        return {name: self._secret(name) for name in sorted(names)}

    def _secret(self, name: str) -> str:
        if self.secrets is None:
            raise NotAdmittedError(
                f"the job needs the secret {name}: set MESHLOOM_SECRETS_DIR on this node"
            )
        try:
            # Names have neither dots nor slashes, so that none leads out of the folder.
            value = _read(self.secrets / name).decode().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise NotAdmittedError(
                f"the job needs the secret {name}, and this node has no readable file of that name "
                f"in MESHLOOM_SECRETS_DIR ({type(error).__name__})"
            ) from error
        if not MIN_SECRET_CHARACTERS <= len(value) <= _MAX_SECRET_BYTES:
            raise NotAdmittedError(
                f"the secret {name} must have from {MIN_SECRET_CHARACTERS} to "
                f"{_MAX_SECRET_BYTES} characters"
            )
        return value


def _read(path: Path) -> bytes:
    """What a plain file holds, somewhat more than a secret may have at most.

    Links are followed: Kubernetes mounts secrets as such. A pipe in the place of one is not waited for: the loop that
    renews the node's lease would wait with it.

    Raises:
        OSError: It cannot be read, or is no plain file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(_MAX_SECRET_BYTES + 1)
    finally:
        os.close(descriptor)
