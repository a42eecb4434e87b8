"""The parts of a rank that need no process: factories, data, schedules, first values, the board."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdp_core import TrainingState
from services.contract.jobs.plans import default_micro_batch
from services.contract.jobs.spec_parts import Factory
from services.contract.messages.board import BoardReader, BoardWriter
from services.contract.words.states import RankPhase
from services.worker.rank import registry
from services.worker.rank.data.corpus import stdlib_sources
from services.worker.rank.data.ngrams import bigram_loss, unigram_loss
from services.worker.rank.data.stdlib_bytes import StdlibBytes, stdlib_bytes
from services.worker.rank.loop.board_watch import BoardWatch
from services.worker.rank.models.decoder import Decoder
from services.worker.rank.optim.optimizers import adamw
from services.worker.rank.optim.schedules import warmup_cosine
from services.worker.rank.seeds import derive


def test_a_batch_is_a_function_of_seed_step_and_index_alone(library: Path) -> None:
    def source(seed: int) -> StdlibBytes:
        return stdlib_bytes(16, 6, 2, str(library), seed=seed)

    once, again = source(1), source(1)
    again.batch(5, range(4))  # what was asked before does not matter
    whole = once.batch(3, range(8))
    assert whole.shape == (8, 17)
    assert whole.dtype == torch.int64
    assert torch.equal(again.batch(3, [6, 2]), whole[[6, 2]])
    assert not torch.equal(once.batch(4, range(8)), whole)
    assert not torch.equal(source(2).batch(3, range(8)), whole)
    assert once.digest == again.digest
    assert len(once.validation()) == 3


def test_the_digest_names_names_and_contents(library: Path, tmp_path: Path) -> None:
    digests: set[str] = set()
    for name, text in (("a.py", "x = 1\n"), ("a.py", "x = 2\n"), ("b.py", "x = 2\n")):
        folder = tmp_path / f"{name}-{len(digests)}"
        folder.mkdir()
        (folder / "z.py").write_text("pass\n" * 50, encoding="utf-8")
        (folder / name).write_text(text * 50, encoding="utf-8")
        digests.add(stdlib_bytes(16, library=str(folder)).digest)
    assert len(digests) == 3
    assert stdlib_bytes(16, library=str(library)).digest not in digests


def test_the_interpreters_own_library_is_about_eleven_megabytes() -> None:
    source = stdlib_bytes()
    losses = source.baselines()
    assert 2.0 < losses["bigram"] < 2.8 < losses["unigram"] < 3.6


def test_packages_beside_the_library_are_not_even_looked_for(tmp_path: Path) -> None:
    for folder in ("site-packages/other", "json/tests", "json"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "one.py").write_text("pass\n")
    entered = []
    listening = True

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if listening and event == "os.scandir":
            entered.append(Path(str(arguments[0])))

    sys.addaudithook(hear)  # for the rest of the process: there is no way to remove one
    files = stdlib_sources(tmp_path)
    listening = False
    assert [file.name for file in files] == ["json/one.py"]
    assert entered == [tmp_path, tmp_path / "json"]


def test_a_sequence_longer_than_the_corpus_is_refused(library: Path) -> None:
    with pytest.raises(ValueError, match="seq_len: 100000000 is too long"):
        stdlib_bytes(100_000_000, library=str(library))


def test_a_bigram_table_knows_what_a_unigram_table_does_not() -> None:
    text = np.frombuffer(b"abababab" * 500, dtype=np.uint8)
    sequences = text[:64].reshape(4, 16)
    assert unigram_loss(text, sequences) == pytest.approx(np.log(2), abs=0.1)
    assert bigram_loss(text, sequences) < 0.2


def test_warmup_rises_then_the_cosine_falls_to_its_floor() -> None:
    schedule = warmup_cosine(4, 0.1, steps=20)
    factors = [schedule(step) for step in range(1, 21)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[3:] == sorted(factors[3:], reverse=True)
    assert factors[-1] == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"warmup_steps: 20 is not in 0\.\.19"):
        warmup_cosine(20, steps=20)


def test_only_matrices_decay() -> None:
    model = Decoder(16, 1, 2)
    decayed, others = adamw(model.named_parameters(), weight_decay=0.3).param_groups
    assert decayed["weight_decay"] == 0.3
    assert others["weight_decay"] == 0.0
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in others["params"]} == {1}


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            Factory(factory="lion"),
            "optimizer.factory: there is no built-in 'lion'; .*adamw, muon, sgd",
        ),
        (
            Factory(factory="adamw", args={"learning_rate": 1}),
            "optimizer.args: adamw: .*'learning_rate'; it takes lr, weight_decay, betas, eps",
        ),
        (Factory(factory="torch.optim:NoSuch"), "module torch.optim has no 'NoSuch'"),
        (Factory(factory="nothing.here:at_all"), "No module named 'nothing'"),
        (Factory(factory="tests.rank.user_models:NOT_CALLABLE"), "is not callable"),
    ],
)
def test_a_factory_that_does_not_fit_is_refused_with_the_choices(
    factory: Factory, message: str
) -> None:
    with pytest.raises(registry.FactoryError, match=message):
        registry.create("optimizer", factory, [])


def test_what_the_trainer_offers_yields_to_the_spec(library: Path) -> None:
    factory = Factory(factory="stdlib_bytes", args={"library": str(library), "seed": 5})
    grant = registry.Grant(data_roots=(library,))
    mine = registry.create("data", factory, offered={"seed": 9, "unknown": 1}, grant=grant)
    assert torch.equal(mine.batch(1, [0]), stdlib_bytes(library=str(library), seed=5).batch(1, [0]))


def test_an_automatic_micro_batch_divides_the_share_and_bounds_the_tokens() -> None:
    assert default_micro_batch(8, 256) == 8
    assert default_micro_batch(96, 1024) == 16
    assert default_micro_batch((1 << 61) - 1, 1) == 1, "a prime: to try all below it has no end"
    assert default_micro_batch(7, 16_384) == 1
    assert default_micro_batch(4, 1_000_000) == 1


def test_seeds_differ_by_purpose() -> None:
    seeds = {derive(seed, *words) for seed in (0, 1) for words in (("a",), ("b",), ("a", 1))}
    assert len(seeds) == 6
    assert derive(7, "init", "blocks.0") == derive(7, "init", "blocks.0")


def test_a_decoder_cannot_see_the_future() -> None:
    torch.manual_seed(0)
    model = Decoder(32, 2, 2)
    tokens = torch.randint(0, 256, (2, 12))
    changed = tokens.clone()
    changed[:, 8:] = 0
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-5)
    assert not torch.allclose(before[:, 8:], after[:, 8:], atol=1e-3)


def test_a_decoder_of_odd_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 2 x heads"):
        Decoder(dim=30, heads=4)


def test_the_board_tells_phase_unit_and_collectives(tmp_path: Path) -> None:
    board = BoardWriter.create(tmp_path / "board", fence=3)
    watch = BoardWatch(board, ("dp_shard", "control"), torch.device("cpu"))
    reader = BoardReader.open(tmp_path / "board")

    def place() -> tuple[RankPhase, int | None]:
        snapshot = reader.read()
        assert snapshot is not None
        assert snapshot.fence == 3
        return snapshot.phase, snapshot.unit_index

    watch.enter(RankPhase.DATA)
    assert place() == (RankPhase.DATA, None)
    watch.on_state(TrainingState.FORWARD, 2, "blocks.1")
    assert place() == (RankPhase.FORWARD, 2)
    watch.on_state(TrainingState.IDLE, 2, "blocks.1")
    assert place() == (RankPhase.FORWARD, 2)
    watch.on_state(TrainingState.PRE_BACKWARD, 1, "blocks.0")
    watch.on_issue("dp_shard", 4)
    watch.on_issue("control", 1)
    watch.on_issue("unknown", 9)
    watch.on_complete("dp_shard", 3)
    assert place() == (RankPhase.PRE_BACKWARD, 1)
    snapshot = reader.read()
    assert snapshot is not None
    assert (snapshot.issued[:2], snapshot.completed[:2]) == ((4, 1), (3, 0))
    watch.enter(RankPhase.EVAL)
    watch.on_state(TrainingState.FORWARD, 0, "")
    assert place() == (RankPhase.EVAL, 0)
    reader.close()
