"""``--code DIR``: what is packed of a folder, and what the commands do with it."""

import gzip
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from typer.testing import CliRunner, Result

from meshloom.client import RestClient as Client
from services.cli import code_folder
from services.cli.app import app
from services.cli.code_folder import pack_folder
from services.cli.errors import CliError, RefusedError
from services.cli.terminal import console
from services.contract.jobs.code_archives import digest_of
from services.contract.redis import redis_keys as keys
from services.local.embedded_redis import EmbeddedRedis
from tests.controller.conftest import job_body
from tests.controller.test_process import started

FILES = {
    ".gitignore": "*.ckpt\n/data/*\n!/data/loader.py\nbuild/\n",
    "train.py": "import torch\n",
    "last.ckpt": "x",
    "data/loader.py": "",
    "data/tokens.bin": "",
    "pkg/__init__.py": "",
    "pkg/.gitignore": "!best.ckpt\nscratch\n",
    "pkg/best.ckpt": "",
    "pkg/other.ckpt": "",
    "pkg/scratch/x.py": "",
    "pkg/deep/build/x.py": "",
    "pkg/deep/build.py": "",
    "pkg/häßlich.py": "",
    ".hidden.toml": "",
}
NEVER = {
    ".git/config": "",
    "pkg/__pycache__/x.pyc": "",
    ".venv/bin/python": "",
    ".meshloom/redis/password": "",
    "my-env/pyvenv.cfg": "",
    "my-env/lib/torch.py": "",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def packed(folder: Path) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(pack_folder(folder, 1)))) as tar:
        return set(tar.getnames())


@pytest.mark.skipif(shutil.which("git") is None, reason="git says what git ignores")
@pytest.mark.parametrize("below", [".", "pkg"])
def test_what_git_ignores_stays_out_and_nothing_else(tmp_path: Path, below: str) -> None:
    write(tmp_path, FILES)
    git = ["git", "-c", "core.excludesFile=/dev/null", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    listed = subprocess.run(
        [*git, "-C", below, "ls-files", "-z", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    expected = {name for name in listed.split("\0") if name}
    assert packed(tmp_path / below) == expected
    assert len(expected) == {".": 9, "pkg": 5}[below]


def test_a_folder_that_is_ignored_itself_is_packed_where_it_is_named(tmp_path: Path) -> None:
    files = {
        ".git/HEAD": "",
        ".gitignore": "drafts/\n*.log\n",
        "drafts/a/b.py": "",
        "drafts/a/.gitignore": "x.py\n",
    }
    write(tmp_path, files | {"drafts/a/x.py": "", "drafts/a/y.log": ""})
    assert packed(tmp_path) == {".gitignore"}
    assert packed(tmp_path / "drafts/a") == {".gitignore", "b.py", "y.log"}


def test_the_files_of_tools_stay_out_whatever_gitignore_says(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "", ".gitignore": "!.venv\n"} | NEVER)
    assert packed(tmp_path) == {"a.py", ".gitignore"}


def test_the_same_files_make_the_same_archive_wherever_and_whenever_they_lie(
    tmp_path: Path,
) -> None:
    one, other = (write(tmp_path / name, FILES) for name in ("one", "other"))
    os.utime(other / "train.py", (1, 1))
    assert pack_folder(one, 1) == pack_folder(other, 1)
    (other / "train.py").chmod(0o755)
    assert pack_folder(one, 1) != pack_folder(other, 1)


def test_what_cannot_be_packed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CliError, match="no such folder"):
        pack_folder(tmp_path / "nothing", 1)
    with pytest.raises(CliError, match="nothing is left"):
        pack_folder(tmp_path, 1)
    write(tmp_path, {"a.py": "", "big.bin": "x" * 3_000_000, "sub/small.bin": "y"})
    (tmp_path / "random.bin").write_bytes(os.urandom((1 << 20) + 1))
    with pytest.raises(CliError, match=r"more than 1 MiB.*big\.bin \(2\.9 MiB\), random\.bin"):
        pack_folder(tmp_path, 1)
    monkeypatch.setattr(code_folder, "MOST_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(CliError, match=r"more than 1\.0 MiB.*list it in \.gitignore.*big\.bin"):
        pack_folder(tmp_path, 1)
    (tmp_path / ".gitignore").write_text("*.bin\n")
    assert packed(tmp_path) == {"a.py", ".gitignore"}
    monkeypatch.setattr(code_folder, "MOST_MEMBERS", 5)
    write(tmp_path, {f"many/{n}.py": "" for n in range(5)})
    with pytest.raises(CliError, match="more than 5 files, 4 of them in many"):
        pack_folder(tmp_path, 1)
    (tmp_path / ".gitignore").write_text("many\n*.bin\n")
    (tmp_path / "link.py").symlink_to("a.py")
    with pytest.raises(CliError, match=r"link\.py is a symbolic link"):
        pack_folder(tmp_path, 1)
    (tmp_path / "link.py").unlink()
    os.mkfifo(tmp_path / "sub" / "pipe")
    with pytest.raises(CliError, match=r"sub/pipe is no plain file"):
        pack_folder(tmp_path, 1)
    (tmp_path / "sub" / "pipe").unlink()
    line = [tmp_path / "sub" / "/".join("d" * depth) for depth in range(1, 1_001)]
    for folder in line:
        folder.mkdir()
    with pytest.raises(CliError, match=r"/d lies in more than 32 folders.*list it in \.gitignore"):
        pack_folder(tmp_path, 1)
    for folder in reversed(line):
        folder.rmdir()
    write(tmp_path, {"services/x.py": ""})
    with pytest.raises(CliError, match=r"'services/x\.py' would be hidden.*services; rename it"):
        pack_folder(tmp_path, 1)


# --- with a controller --------------------------------------------------------------------------


@pytest.fixture
def terminal(redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    redis_server.flush()
    monkeypatch.setattr(console, "_width", 240)
    with started(redis_server.url, max_code_mib="2") as controller:
        url = str(controller.client.base_url)
        monkeypatch.setenv("MESHLOOM_URL", url)
        with Client(url) as client:
            yield client


def types(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.mark.redis
def test_the_commands_upload_a_folder_once_and_name_it_in_the_spec(
    terminal: Client, redis_server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = write(tmp_path / "code", FILES)
    digest = digest_of(pack_folder(code, 1))
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(job_body(model={"factory": "train:Model"})))
    dry = types("submit", spec, "--code", code, "--dry-run")
    assert (dry.exit_code, f"uploaded 9 files of {code}" in dry.stderr) == (0, True)
    submitted = types("submit", spec, "--code", code)
    assert "known already: 9 files" in submitted.stderr
    (job,) = terminal.jobs().items
    assert job.spec.code == digest
    assert digest in types("status", job.id).stdout
    (code / "train.py").write_text("import torch  # better\n")
    cloned = types("clone", job.id, "--code", code, "--set", "train.steps=20")
    assert cloned.exit_code == 0, cloned
    newest = terminal.jobs().items[0]
    assert newest.spec.code == digest_of(pack_folder(code, 1)) != digest
    assert newest.spec.train.steps == 20
    assert types("clone", job.id).exit_code == 0
    assert terminal.jobs().items[0].spec.code == digest
    refused = types("submit", "--plan-id", "plan_x", "--code", code).exception
    assert isinstance(refused, CliError)
    with Redis.from_url(redis_server.url) as redis:
        assert redis.zcard(keys.CODES) == 2
    monkeypatch.setenv("MESHLOOM_MAX_CODE_MIB", "8")
    (code / "random.bin").write_bytes(os.urandom(3 << 20))
    too_large = types("plan", spec, "--code", code).exception
    assert isinstance(too_large, RefusedError)
    assert (too_large.problem.status, too_large.problem.code) == (413, "body_too_large")
