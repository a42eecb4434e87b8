"""JSON Merge Patch (RFC 7396)."""

from collections.abc import Mapping
from typing import Any


def merged(target: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """``target`` with what ``patch`` says: null removes a member, objects merge, others replace."""
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            known = result.get(key)
            result[key] = merged(known if isinstance(known, Mapping) else {}, value)
        else:
            result[key] = value
    return result
