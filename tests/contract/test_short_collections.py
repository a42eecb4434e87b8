"""Collections of a process with many objects, in processes of their own: they change the collector."""

import subprocess
import sys

_SETUP = """
import gc, weakref
from services.contract.system.short_collections import keep_collections_short

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return node
"""


def _run(program: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _SETUP + program], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_what_survived_a_full_collection_is_not_visited_again_and_new_cycles_are_freed() -> None:
    _run("""
keep_collections_short()
kept = [[n] for n in range(100_000)]
gc.collect()
assert gc.get_freeze_count() > len(kept)
assert len(gc.get_objects()) < 1_000  # those that a collection visits
gone = weakref.ref(cycle())
assert gone() is not None
gc.collect()
assert gone() is None
""")


def test_what_is_set_aside_is_freed_by_its_count_and_a_cycle_once_the_process_has_grown() -> None:
    _run("""
keep_collections_short(growth=1.0, spare_bytes=32 << 20)
node, plain = cycle(), Node()
in_cycle, without = weakref.ref(node), weakref.ref(plain)
gc.collect()
del node, plain
assert without() is None
gc.collect()
assert in_cycle() is not None
larger = bytes(64 << 20).replace(b"\\0", b"x")
gc.collect()
assert in_cycle() is None
assert gc.get_freeze_count() > 1_000
""")
