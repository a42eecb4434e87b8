"""A user's model that is careless with what it is given."""

import json
import os
import sys
import urllib.parse


def build(credential: str, report: str) -> None:
    """Say the secret in every way that happens by accident, then fail with it."""
    sys.stdout.write(f"using {credential}\n")
    sys.stderr.write(f"GET https://host/?key={urllib.parse.quote(credential, safe='')}\n")
    sys.stdout.write(json.dumps({"credential": credential}) + "\n")
    sys.stdout.write(f"{credential!r}\n")
    with open(f"{report}-{os.getpid()}", "w", encoding="utf-8") as file:  # noqa: PTH123 a user's way
        json.dump({"environment": dict(os.environ), "credential": credential}, file)  # noqa: TID251 what a rank sees
    # So long that a rank cuts it through the secret.
    name = "x" * 90 + credential + "x" * 300
    raise type(name, (ValueError,), {})(f"the hub refused {credential}")
