"""Ranks that go on from a checkpoint train on the samples that the undisturbed run would have had."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import RankEvaluated, RankFailed, RankReady
from services.worker.rank.checkpoints.shard_file import opened
from tests.rank.gang import Attempt, Ranks, Trained
from tests.waiting import until

pytestmark = pytest.mark.ranks

Spec = Callable[..., JobSpec]
SETS = "tests.rank.user_sets"


def of(spec: Spec, factory: str, args: dict[str, Any] | None = None, **parts: Any) -> JobSpec:  # noqa: ANN401 (sections)
    plain = spec(optimizer={"args": {"lr": 0.05}}, **parts).model_dump()
    return JobSpec.model_validate(
        plain
        | {
            "model": {"factory": "tests.rank.user_vision:Classifier"},
            "data": {"factory": f"{SETS}:{factory}", "args": args or {}},
            "loss": {"factory": "cross_entropy"},
        }
    )


def saved_position(attempt: Attempt, step: int) -> list[Any]:
    """What the files of all ranks say of where the run was."""
    manifest = attempt.committed(step)
    folder = attempt.root / manifest.job_id / "shards" / manifest.checkpoint_id
    texts = []
    for shard in manifest.shards:
        with opened(folder, shard) as reader:
            texts.append(json.loads(reader.metadata["meshloom"])["data"])
    return texts


def processes_of(folder: Path) -> list[int]:
    return [int(file.name.partition("-")[2]) for file in folder.glob("worker-*")]


def lives(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_data_set_trains_with_its_epoch_ends_and_goes_on_with_other_ranks(
    trained: Trained, ranks: Ranks, spec: Spec, tmp_path: Path
) -> None:
    job = of(spec, "pair")  # epochs of 20 samples, steps of 12
    whole = trained.of(job)
    losses = whole.losses()
    assert losses[6] < losses[1]
    (evaluated,) = whole.of_kind(0, RankEvaluated)
    assert evaluated.tokens == 10
    log = (whole.root / "rank-0.log").read_text(encoding="utf-8")
    assert "20 samples an epoch, in an order that follows from seed and epoch" in log
    # With workers, and on other ranks, it is the same run.
    noted = of(spec, "with_workers", {"folder": str(tmp_path)})
    source = trained.committed(3, ranks, job)
    for world in (3, 2):
        again = ranks.start(noted, world, fence=world, resume_from=source.checkpoint_id).succeeded()
        expected = {step: loss for step, loss in losses.items() if step > 3}
        assert again.losses() == pytest.approx(expected, abs=1e-5 if world == 3 else 0)
    positions = saved_position(whole, 6)
    assert positions == [{"samples": 72, "taken": [72]}] * 2
    workers = processes_of(tmp_path)
    assert len(workers) == 5
    assert not any(map(lives, workers))


def test_a_stream_goes_on_with_other_ranks(trained: Trained, ranks: Ranks, spec: Spec) -> None:
    job = of(spec, "Flow")
    losses = trained.of(job).losses()
    log = (trained.of(job).root / "rank-0.log").read_text(encoding="utf-8")
    assert "a stream that every rank reads" in log
    source = trained.committed(3, ranks, job)
    again = ranks.start(job, 3, fence=2, resume_from=source.checkpoint_id).succeeded()
    expected = {step: loss for step, loss in losses.items() if step > 3}
    assert again.losses() == pytest.approx(expected, abs=1e-5)


def test_workers_die_with_their_rank(ranks: Ranks, spec: Spec, tmp_path: Path) -> None:
    noted = of(
        spec,
        "with_workers",
        {"folder": str(tmp_path)},
        train={"steps": 100_000, "global_batch": 12, "seed": 7},
    )
    attempt = ranks.start(noted, 1)
    until(lambda: len(processes_of(tmp_path)) == 1)
    until(lambda: bool(attempt.steps()))
    (worker,) = processes_of(tmp_path)
    assert lives(worker)
    attempt.processes[0].kill()
    until(lambda: not lives(worker))


@pytest.mark.parametrize(
    ("data", "kind", "said"),
    [
        ("Wide", None, r"VocabularyError: data: token 1011 .* of 256 tokens \(first in sample 3 "),
        ("spoilt", "nan", r"NonFiniteLossError: .*; data: sample 7 \(number .* not finite"),
        ("spoilt", "bytes", r"UnfitBatchError: data: .*\[uint8 \[12, 8\], .*as float32"),
    ],
)
def test_an_error_that_the_data_made_names_it(
    ranks: Ranks, spec: Spec, data: str, kind: str | None, said: str
) -> None:
    job = of(spec, data, None if kind is None else {"kind": kind})
    if kind is None:
        job = spec(data={"factory": f"{SETS}:{data}", "args": {}})
    attempt = ranks.start(job, 1)
    assert attempt.ended() == [1]
    (failure,) = attempt.of_kind(0, RankFailed)
    assert re.match(said, failure.error), failure.traceback


def test_each_rank_names_the_sample_that_only_one_of_them_has(ranks: Ranks, spec: Spec) -> None:
    attempt = ranks.start(of(spec, "spoilt", {"kind": "nan"}), 3)
    assert attempt.ended() == [1] * 3
    errors = [attempt.of_kind(rank, RankFailed)[0].error for rank in range(3)]
    named = {re.sub(r".*; ", "", error) for error in errors}
    assert len(named) == 1
    assert re.match(r"data: sample 7 \(number \d+ of the job\) is the first", named.pop())


def test_a_tokenizer_that_is_larger_than_the_embedding_ends_ranks_before_a_step(
    ranks: Ranks, spec: Spec
) -> None:
    attempt = ranks.start(spec(model={"args": {"dim": 16, "layers": 1, "heads": 2, "vocab": 200}}))
    assert attempt.ended() == [1, 1]
    (failure,) = attempt.of_kind(0, RankFailed)
    assert failure.error.startswith(
        "VocabularyError: data.args: the tokenizer has 256 tokens, and the model embeds 200; model.args"
    )
    assert attempt.of_kind(0, RankReady) == []


def test_a_sampler_that_is_not_used_is_told_once(ranks: Ranks, spec: Spec) -> None:
    attempt = ranks.start(of(spec, "weighted")).succeeded()
    (told,) = attempt.of_kind(0, RankReady)
    (notice,) = told.notices
    assert notice.startswith("data.factory: the DataLoader's WeightedRandomSampler is not used")
    log = (attempt.root / "rank-0.log").read_text(encoding="utf-8")
    assert log.count(notice) == 1
    assert notice not in (attempt.root / "rank-1.log").read_text(encoding="utf-8")
