"""``python -m tests.pools.kube_kubelet SERVER NODE FOLDER [CA]``: a stand-in for the kubelet of one node.

It starts the containers of its pods as processes of this machine: images are ignored, and mounted volumes are folders
below FOLDER, by whose paths those of the mounts are replaced in the containers' commands.
"""

import base64
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError

import psutil

from services.local.children import die_with_parent
from services.local.settings import child_environment
from tests.pools.kube_access import NAMESPACE, Server, Thing, now_text

NODE_MARK: Final = "MARK_OF_KUBE_NODE"
POD_MARK: Final = "MARK_OF_KUBE_POD"
_LOOKS_EVERY_S: Final = 0.2
_SAYS_EVERY_S: Final = 1.0
_MISSING: Final = 404
_PULL_BACK_OFF: Final = "no-such-image"


def _say_ready(server: Server, node: str) -> None:
    """The node is there, and its kubelet answers."""
    is_ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    status = {
        "allocatable": {"cpu": "1", "pods": "110"},
        "conditions": [{**is_ready, "lastHeartbeatTime": now_text()}],
    }
    try:
        server.ask("PATCH", f"api/v1/nodes/{node}/status", {"status": status})
    except HTTPError as error:
        if error.code != _MISSING:
            raise
        meta = {"name": node, "labels": {"kubernetes.io/hostname": node}}
        server.ask("POST", "api/v1/nodes", {"metadata": meta, "status": status})


class Pod:
    """One pod of the node, and the processes of its container.

    Args:
        server: The API server.
        pod: As it was first seen.
        folder: For its volumes.
        node: The node's name.
    """

    def __init__(self, server: Server, pod: Thing, folder: Path, node: str) -> None:
        self._server = server
        self._spec = pod["spec"]
        self.path = f"api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}"
        self._name = pod["metadata"]["name"]
        self._uid = pod["metadata"]["uid"]
        self._folder = folder / self._uid
        self._marks = {NODE_MARK: node, POD_MARK: self._uid}
        self._main: subprocess.Popen[bytes] | None = None
        self._killed_at: float | None = None
        self._said: Thing = {}
        if pod["status"]["phase"] == "Running":
            self._say(
                "Failed", {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
            )

    def look(self, pod: Thing) -> None:
        """Do what is to be done for it now."""
        grace = pod["metadata"].get("deletionGracePeriodSeconds")
        if self._said.get("phase") in ("Failed", "Succeeded"):
            pass
        elif self._main is None:
            if grace is None:
                self._start()
        elif (code := self._main.poll()) is not None:
            self._kill()
            phase = "Failed" if code else "Succeeded"
            exit_code = code if code >= 0 else 128 - code
            self._say(
                phase,
                {"terminated": {"exitCode": exit_code, "reason": "Error" if code else "Completed"}},
            )
        elif grace is not None:
            self._end(grace)
            return
        if grace is not None:
            self._server.ask("DELETE", f"{self.path}?gracePeriodSeconds=0")

    def _end(self, grace: float) -> None:
        assert self._main is not None
        if self._killed_at is None:
            self._main.terminate()
            self._killed_at = time.monotonic() + grace
        elif time.monotonic() > self._killed_at:
            self._main.kill()

    def _start(self) -> None:
        (container,) = self._spec["containers"]
        if container["image"] == _PULL_BACK_OFF:
            message = f'Back-off pulling image "{_PULL_BACK_OFF}"'
            self._say("Pending", {"waiting": {"reason": "ImagePullBackOff", "message": message}})
            return
        try:
            folders = self._volumes()
        except HTTPError as error:
            if error.code != _MISSING:
                raise
            self._say("Pending", {"waiting": {"reason": "ContainerCreating"}})
            return
        for first in self._spec["initContainers"]:
            code = self._process(first, folders).wait()
            if code:
                self._say("Failed", {"terminated": {"exitCode": code, "reason": "Error"}})
                return
        self._main = self._process(container, folders)
        self._say("Running", {"running": {}})

    def _volumes(self) -> dict[str, Path]:
        """The folders of volumes, by name; of claims there are none: their paths are this machine's."""
        found = {}
        for volume in self._spec["volumes"]:
            folder = self._folder / volume["name"]
            if "persistentVolumeClaim" not in volume:
                folder.mkdir(parents=True, exist_ok=True)
                found[volume["name"]] = folder
            if (source := volume.get("secret")) is not None:
                name = source["secretName"]
                secret = self._server.ask("GET", f"api/v1/namespaces/{NAMESPACE}/secrets/{name}")
                for key, value in secret["data"].items():
                    (folder / key).write_bytes(base64.b64decode(value))
        return found

    def _process(self, container: Thing, folders: dict[str, Path]) -> "subprocess.Popen[bytes]":
        mounts = {
            mount["mountPath"]: str(folders[mount["name"]])
            for mount in container["volumeMounts"]
            if mount["name"] in folders
        }
        paths = re.compile("|".join(sorted(map(re.escape, mounts), key=len, reverse=True)))
        command = [paths.sub(lambda found: mounts[found[0]], word) for word in container["command"]]
        given = {each["name"]: each["value"] for each in container["env"]}
        kept = {name: value for name, value in child_environment().items() if name == "PATH"}
        address = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_PORT": "tcp://127.0.0.1:443"}
        return subprocess.Popen(
            command,
            env={**kept, **address, **given, **self._marks},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 prctl is one call and takes no lock
        )

    def _kill(self) -> None:
        """With its first process all of a container ends."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(POD_MARK) == self._uid:
                    process.kill()

    def _say(self, phase: str, state: dict[str, Any]) -> None:
        container = {"name": "agent", "image": "", "imageID": "", "ready": False, "restartCount": 0}
        said = {"phase": phase, "containerStatuses": [{**container, "state": state}]}
        if said != self._said:
            self._server.ask("PATCH", f"{self.path}/status", {"status": said})
            self._said = said


def main() -> None:
    """Look after the node's pods until killed."""
    address, node, folder, *ca = sys.argv[1:]
    server = Server(address, Path(ca[0]) if ca else None)
    pods, pause = dict[str, Pod](), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    said_at = 0.0
    while not pause.wait(_LOOKS_EVERY_S):
        with contextlib.suppress(OSError):
            if time.monotonic() > said_at + _SAYS_EVERY_S:
                _say_ready(server, node)
                said_at = time.monotonic()
            listed = server.ask("GET", f"api/v1/pods?fieldSelector=spec.nodeName={node}")["items"]
            for pod in listed:
                uid = pod["metadata"]["uid"]
                if uid not in pods:
                    pods[uid] = Pod(server, pod, Path(folder), node)
                with contextlib.suppress(OSError):
                    pods[uid].look(pod)
            pods = {
                uid: pods[uid] for uid in pods if uid in {pod["metadata"]["uid"] for pod in listed}
            }


if __name__ == "__main__":
    main()
