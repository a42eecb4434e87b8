"""Ways in which a backward reaches units, each in the module of what is unusual about it."""

from tests.engine.ways import graphs, groups, hidden, recomputed
from tests.engine.ways.run import BEYOND, WAYS

__all__ = ["BEYOND", "WAYS", "graphs", "groups", "hidden", "recomputed"]
