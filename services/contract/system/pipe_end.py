"""An end of the pipe between an agent and one of its ranks: two pipes of the kernel, one each way.

No pair of sockets: over a socket a rank could send descriptors, which the kernel closes in the name of
the agent that reads there. To close what a rank has made may take as long as the rank likes, such as a
connection that lingers for what nobody takes, and the agent would wait so long with all of its gangs.
"""

import os
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class PipeEnd:
    """Two descriptors, owned by whoever has the end.

    Attributes:
        reading: What the other end writes comes here.
        writing: What is written here, the other end reads.
    """

    reading: int
    writing: int

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """The two ends of a new pipe.

        Raises:
            OSError: The system has no descriptors left.
        """
        there, ours = os.pipe()
        try:
            here, theirs = os.pipe()
        except OSError:
            cls(there, ours).close()
            raise
        return cls(here, ours), cls(there, theirs)

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.reading)
        os.close(self.writing)
