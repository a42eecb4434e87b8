"""The example of a script with the session's lines, as a module below the user path."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "script" / "train_with_session.py"

if __name__ == "__main__":
    runpy.run_path(str(EXAMPLE), run_name="__main__")
