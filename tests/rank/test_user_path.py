"""A user's folder with the name of one of our packages does not take its place, and that is said."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import multiprocessing, os, sys
from services.worker.rank.process.user_path import add_user_path
add_user_path(sys.argv[1:])
from services.worker.rank import registry

def main():
    import mine
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(mine.imports))
    child = "import mine; print(mine.ME)"
    os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", child)
    for name in ("services.models:Model", "mine:Model"):
        try:
            registry.find("model", name)
        except registry.FactoryError as error:
            print(error)

if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    main()
"""
MINE = """
ME = __file__
def imports():
    import services.contract.words.states, fsdp_core.errors
    return fsdp_core.errors.__name__
"""


def test_our_packages_come_first_in_a_rank_and_in_what_it_starts(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "models.py").write_text("class Model: ...")
    (tmp_path / "fsdp_core.py").write_text("raise SystemExit('of the user')")
    (tmp_path / "mine.py").write_text(MINE)
    program = tmp_path / "program" / "program.py"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-P", str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    spawned, child, hidden, missing = done.stdout.splitlines()
    assert spawned == "fsdp_core.errors"
    assert child == str(tmp_path / "mine.py")
    assert hidden == (
        "model.factory: services.models:Model: No module named 'services.models': "
        f"{tmp_path}/services is hidden by Meshloom's own package services; rename it"
    )
    assert missing == "model.factory: module mine has no 'Model'"
