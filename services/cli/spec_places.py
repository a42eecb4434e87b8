"""Where in a YAML file the faults of a spec are: JSON pointers as lines and columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode


@dataclass(frozen=True)
class SpecText:
    """A spec as it was read.

    Attributes:
        spec: Its fields.
        text: The file's text.
        where: What errors call the file.
    """

    spec: Mapping[str, Any]
    text: str
    where: str

    def mark(self, pointer: str) -> tuple[int, int] | None:
        """Line and column, from 1, of what a JSON pointer names, or of what is around a field that is missing.

        None where the file does not say it, as the digest of ``--code``.
        """
        found = _mark(self._node, pointer)
        return None if found is None else (found[0] + 1, found[1] + 1)

    @cached_property
    def _node(self) -> Node | None:
        """What the file says, with marks. Composed once for all of a hundred faults: of a file of 30 KB it takes half a second."""
        try:
            node: Node | None = YAML(typ="rt").compose(self.text)
        except YAMLError:  # it was read before
            return None
        return node


def _mark(node: Node | None, pointer: str) -> tuple[int, int] | None:
    """The line and column, from 0, of the key or item that a pointer leads to, as far as it leads."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    at: tuple[int, int] | None = None
    for part in parts:
        found = _step(node, part)
        if found is None:
            break
        at, node = found
    return at


def _step(node: Node | None, part: str) -> tuple[tuple[int, int], Node] | None:
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if key.value == part:
                return (key.start_mark.line, key.start_mark.column), value
    if isinstance(node, SequenceNode) and part.isdecimal() and int(part) < len(node.value):
        item = node.value[int(part)]
        return (item.start_mark.line, item.start_mark.column), item
    return None
