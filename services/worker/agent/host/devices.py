"""What a node has: processors, memory, accelerators and the versions of what runs on them."""

import importlib.metadata
import shutil
import socket
import subprocess
from typing import Final

import psutil

from services.contract.messages.facts import Device, Inventory

_REPORTED: Final = ("meshloom", "torch", "numpy", "redis", "safetensors", "transformers")
_QUERY_TIMEOUT_S: Final = 20
_MIB: Final = 1 << 20


def take_inventory(
    cpu_slots: int, storage_id: str | None = None, storage_fault: str | None = None
) -> Inventory:
    """Look the node over. Never imports torch: a broken driver must not take the agent down."""
    return Inventory(
        hostname=socket.gethostname(),
        cpu_slots=cpu_slots,
        cpu_count=psutil.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        accelerators=nvidia_devices(),
        versions=installed_versions(),
        storage_id=storage_id,
        storage_fault=storage_fault,
    )


def nvidia_devices() -> tuple[Device, ...]:
    """The GPUs that ``nvidia-smi`` lists; none where it is missing, fails or hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(  # noqa: S603 a fixed command
            query, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_devices(answer.stdout)


def parse_devices(listing: str) -> tuple[Device, ...]:
    """Devices from lines of ``index, name, MiB``; lines of another shape are passed over."""
    found = []
    for line in listing.splitlines():
        index, _, rest = line.partition(",")
        name, _, mebibytes = rest.rpartition(",")
        if index.strip().isdigit() and mebibytes.strip().isdigit():
            memory = int(mebibytes) * _MIB
            found.append(Device(index=int(index), name=name.strip(), memory_bytes=memory))
    return tuple(found)


def installed_versions() -> dict[str, str]:
    """The versions of the distributions that decide how a rank behaves, where installed."""
    versions = {}
    for name in _REPORTED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
