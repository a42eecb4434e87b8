"""Writes what this version's controllers and agents say to each other, for the test of the next version.

``python -m tests.contract.record_contract FILE``: a message of each kind with all of its fields, and by kind
what this version takes for such a message, as a JSON schema.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.contract.test_versions import SPOKEN, of_yesterday


def contract() -> dict[str, dict[str, Any]]:
    """By name of the message: one such, and its schema."""
    return {
        kind.__name__: {
            "message": json.loads(kind.model_validate(of_yesterday(kind)).model_dump_json()),
            "schema": kind.model_json_schema(),
        }
        for kind in SPOKEN
    }


if __name__ == "__main__":
    told = json.dumps(contract(), separators=(",", ":"), sort_keys=True)
    Path(sys.argv[1]).write_text(f"{told}\n")
