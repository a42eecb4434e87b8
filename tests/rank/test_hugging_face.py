"""Models of transformers as jobs: first values, saved weights, and the way back to their library."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fsdp_core.plan.model import UnitPlan
from services.contract.jobs.specs import JobSpec
from services.worker.agent.storage.export import export
from services.worker.rank.models.hugging_face import (
    PretrainedFilesError,
    hf_causal_lm,
    hf_sequence_classification,
)
from services.worker.rank.models.loss import loss_of
from services.worker.rank.models.materialise import give_values
from tests.forking import HUGGING_FACE
from tests.rank.gang import JOB, Ranks
from tests.rank.user_data import Counting

pytestmark = [pytest.mark.ranks, pytest.mark.system]

Spec = Callable[..., JobSpec]
WIDTHS = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
UNITS = (UnitPlan(("model.layers.*",)),)
ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", WIDTHS | ENDS),
    "qwen": ("Qwen2Config", WIDTHS | ENDS | {"tie_word_embeddings": True}),
    "gpt2": (
        "GPT2Config",
        ENDS | {"vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    ),
}


def saved(shape: str, folder: Path) -> nn.Module:
    """A model of random values, as its library saves it."""
    import transformers  # noqa: PLC0415 (slow to import)

    kind, fields = SHAPES[shape]
    torch.manual_seed(11)
    no_drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = getattr(transformers, kind)(**fields, **(no_drop if shape == "gpt2" else {}))
    library: Any = transformers.AutoModelForCausalLM
    model: nn.Module = library.from_config(config)
    model.save_pretrained(folder, max_shard_size="20KB")  # type: ignore[operator]  # the library's
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return model.eval()


def of(spec: Spec, **args: Any) -> JobSpec:  # noqa: ANN401 (arguments of a spec)
    plain = spec(
        train={"steps": 5}, checkpoint={"every_steps": 4}, optimizer={"args": {"lr": 3e-3}}
    ).model_dump()
    data = {"factory": "tests.rank.user_data:Counting"}
    return JobSpec.model_validate(
        plain | {"model": {"factory": "hf_causal_lm", "args": args}, "data": data}
    )


def loss_of_step(model: nn.Module, step: int) -> float:
    """As the trainer computes it, over the whole batch."""
    tokens = Counting().batch(step, range(12))
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    return float(functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


@pytest.mark.parametrize("shape", SHAPES)
def test_each_rank_reads_its_slices_and_the_library_loads_what_came_of_them(
    ranks: Ranks, spec: Spec, shape: str
) -> None:
    import transformers  # noqa: PLC0415 (slow to import)

    first = saved(shape, ranks.root / "first")
    attempt = ranks.start(
        of(spec, model="first"),
        units=UNITS if shape != "gpt2" else (UnitPlan(("transformer.h.*",)),),
        libraries=HUGGING_FACE,
    ).succeeded()
    losses = attempt.losses()
    assert losses[1] == pytest.approx(loss_of_step(first, 1), abs=1e-5)
    committed = attempt.committed(4)
    outcome = export(ranks.root, JOB, committed.checkpoint_id, 20_000)
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= set(outcome.files)
    library: Any = transformers.AutoModelForCausalLM
    trained, about = library.from_pretrained(
        ranks.root / JOB / "exports" / committed.checkpoint_id, output_loading_info=True
    )
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    assert loss_of_step(trained.eval(), 5) == pytest.approx(losses[5], abs=1e-5)
    assert loss_of_step(trained, 1) < losses[1]


def test_a_model_of_the_library_that_a_factory_of_ones_own_made_is_exported_with_its_configuration(
    ranks: Ranks, spec: Spec
) -> None:
    import transformers  # noqa: PLC0415 (slow to import)

    own = of(spec).model_dump() | {"model": {"factory": "tests.rank.user_models:own_llama"}}
    attempt = ranks.start(
        JobSpec.model_validate(own), units=UNITS, libraries=HUGGING_FACE
    ).succeeded()
    committed = attempt.committed(4)
    assert "config.json" in export(ranks.root, JOB, committed.checkpoint_id, 1 << 30).files
    library: Any = transformers.AutoModelForCausalLM
    trained, about = library.from_pretrained(
        ranks.root / JOB / "exports" / committed.checkpoint_id, output_loading_info=True
    )
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    assert loss_of_step(trained.eval(), 5) == pytest.approx(attempt.losses()[5], abs=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_first_values_are_drawn_as_the_library_draws_them(shape: str, tmp_path: Path) -> None:
    usual = saved(shape, tmp_path)
    with torch.device("meta"):
        model = hf_causal_lm(str(tmp_path))
    model.to_empty(device="cpu")
    give_values(model, seed=3)
    others = dict(usual.named_parameters(remove_duplicate=False))
    for name, mine in model.named_parameters():
        theirs = others[name].detach()
        assert torch.isfinite(mine).all(), name
        if mine.ndim == 1:
            assert torch.equal(mine, theirs), name
        elif mine.numel() >= 256:
            assert float(mine.detach().std()) == pytest.approx(float(theirs.std()), rel=0.2), name
    for (name, buffer), theirs in zip(model.named_buffers(), usual.buffers(), strict=True):
        assert torch.equal(buffer, theirs), name


def test_first_values_do_not_depend_on_the_number_of_ranks(ranks: Ranks, spec: Spec) -> None:
    saved("llama", ranks.root / "config")
    job = of(spec, config="config")
    runs = [
        ranks.start(job, world, fence=world, units=UNITS, libraries=HUGGING_FACE).succeeded()
        for world in (1, 2)
    ]
    assert runs[0].losses() == pytest.approx(runs[1].losses(), abs=1e-5)


def test_no_rank_holds_more_of_saved_weights_than_its_slices(tmp_path: Path) -> None:
    """The kernel refuses more memory than half of the model."""
    import transformers  # noqa: PLC0415 (slow to import)

    wide = WIDTHS | ENDS | {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8}
    library: Any = transformers.AutoModelForCausalLM
    whole = library.from_config(transformers.LlamaConfig(**wide))
    nbytes = sum(each.numel() * each.element_size() for each in whole.parameters())
    whole.save_pretrained(tmp_path)
    assert nbytes > 200 << 20

    def run(way: str) -> subprocess.CompletedProcess[str]:
        program = Path(__file__).parent / "programs" / "load_below_a_limit.py"
        arguments = [way, str(tmp_path), str(nbytes // 2)]
        return subprocess.run(
            [sys.executable, str(program), *arguments], capture_output=True, text=True, check=False
        )

    streamed, at_once = run("streamed"), run("at_once")
    assert streamed.returncode == 0, streamed.stderr
    assert at_once.returncode != 0


def test_a_folder_that_lacks_what_its_configuration_asks_for_is_named(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with pytest.raises(PretrainedFilesError, match=r"model\.args\.config: there is no .*config"):
        hf_causal_lm(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"give config .* or model .*, not both"):
        hf_causal_lm(str(tmp_path), str(tmp_path))
    with (
        torch.device("meta"),
        pytest.raises(PretrainedFilesError, match=r"lacks model\.layers\.2\..* and 4 more"),
    ):
        hf_causal_lm(model=str(tmp_path), overrides={"num_hidden_layers": 3})
    with (
        torch.device("meta"),
        pytest.raises(
            PretrainedFilesError, match=r"has \(24, 16\), the configuration says \(32, 16\)"
        ),
    ):
        hf_causal_lm(model=str(tmp_path), overrides={"intermediate_size": 32})


@pytest.mark.parametrize("name", ["subfolder", "_configuration_file", "gguf_file"])
def test_no_field_that_is_changed_leads_to_a_configuration_elsewhere(
    tmp_path: Path, name: str
) -> None:
    roots, elsewhere = tmp_path / "roots", tmp_path / "elsewhere"
    saved("llama", roots / "a")
    saved("llama", elsewhere)
    (elsewhere / "config.json").write_text('{"model_type": "gpt2", "told": "another owner"}')
    leads = {"subfolder": "../../elsewhere"}.get(name, "../../elsewhere/config.json")
    with torch.device("meta"):
        made: Any = hf_causal_lm(
            "a", overrides={name: leads, "vocab_size": 128}, data_roots=(roots,)
        )
    files = made.first_values.files
    assert "another owner" not in files["config.json"].decode()
    assert made.config.vocab_size == 128


@pytest.mark.parametrize("named", ["somebody/attention", {"": "somebody/attention"}])
def test_no_attention_is_loaded_from_the_hub(tmp_path: Path, named: Any) -> None:  # noqa: ANN401 as a spec may say
    saved("llama", tmp_path)
    with pytest.raises(ValueError, match="nothing is downloaded"):
        hf_causal_lm(str(tmp_path), attn_implementation=named)


def test_a_classifier_draws_the_head_that_a_language_model_lacks(tmp_path: Path) -> None:
    language = saved("llama", tmp_path)
    with torch.device("meta"):
        model = hf_sequence_classification(model=str(tmp_path), num_labels=3)
    model.to_empty(device="cpu")
    give_values(model, seed=3)
    values = dict(model.named_parameters())
    assert values["score.weight"].shape == (3, 16)
    assert 0 < float(values["score.weight"].detach().std()) < 0.1
    theirs = dict(language.named_parameters())
    assert all(torch.equal(v, theirs[n]) for n, v in values.items() if n != "score.weight")
    computed = loss_of(model)({"input_ids": torch.arange(8)[None], "labels": torch.tensor([2])})
    assert torch.isfinite(computed.loss)
