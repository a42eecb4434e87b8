"""The file of pools: what it refuses, and where it says the fault is."""

import json
from pathlib import Path

import pytest

from services.controller.adapters.pools.pools_file import PoolsFileError, read_pools_file

SLURM = {"name": "hpc", "kind": "slurm", "cpu_slots": 1, "max_nodes": 4}
RAY = {"name": "burst", "kind": "ray", "cpu_slots": 1, "max_nodes": 4, "address": "control:6379"}


def refusal(folder: Path, pool: dict[str, object]) -> str:
    """What is said of a file with this pool, behind its path."""
    file = folder / "pools.yaml"
    file.write_text(json.dumps({"pools": [pool]}))
    with pytest.raises(PoolsFileError) as caught:
        read_pools_file(file)
    return str(caught.value).removeprefix(f"{file}: ")


@pytest.mark.parametrize("address", ["ray://control:10001", "http://control:8265"])
def test_an_address_that_is_not_of_the_clusters_state_is_refused(
    tmp_path: Path, address: str
) -> None:
    said = refusal(tmp_path, {**RAY, "address": address})
    assert said.startswith(f"/pools/0/ray/address: {address} is not HOST:PORT"), said
    assert "ray start --address=HOST:6379 --num-cpus=0" in said


@pytest.mark.parametrize("word", ["gpu", "", "--", "-", "train.sh", "/opt/job", "=gpu"])
def test_a_bare_word_among_options_is_refused(tmp_path: Path, word: str) -> None:
    said = refusal(tmp_path, {**SLURM, "options": ["--partition=gpu", word]})
    assert said == (
        f"/pools/0/slurm/options: {word!r} is no option of sbatch: "
        "write each as one word, such as --partition=gpu"
    )


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    said = refusal(tmp_path, {**SLURM, "options": ["gpu"], "max_nodes": 0, "gpus": 8})
    places = [part.split(":")[0] for part in said.split("; ")]
    assert places == ["/pools/0/slurm/max_nodes", "/pools/0/slurm/options", "/pools/0/slurm/gpus"]


@pytest.mark.parametrize(
    "text",
    [
        f"pools: {'[' * 500}",
        "owner: 2001-13-01",
        "owner: !!bool x",
        f"%YAML 1.1\n---\nowner: 1{':59' * 200}.5",
        "é",
    ],
)
def test_a_text_that_yaml_cannot_be_read_from_is_refused_with_its_path(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "pools.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(PoolsFileError, match=r"^/.*/pools\.yaml: ."):
        read_pools_file(file)


def test_what_may_stand_there_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    options = ["--partition=gpu", "--exclusive=user", "-pgpu", "-Aml", "--comment=two words\nand"]
    file.write_text(json.dumps({"pools": [{**SLURM, "options": options}, RAY]}))
    slurm, ray = read_pools_file(file).pools
    assert (getattr(slurm, "options", None), ray.name) == (tuple(options), "burst")
