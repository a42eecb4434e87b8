"""What ``meshloom compare`` finds in two specs and in two curves."""

from services.cli.comparing import metric_pairs, spec_differences
from services.contract.api.views import Evaluation, MetricPoint, MetricsView, StepView


def test_the_fields_that_differ_are_named_by_their_paths() -> None:
    a = {"name": "x", "train": {"steps": 10, "ema": None}, "labels": {}, "plan": "auto"}
    b = {"name": "x", "train": {"steps": 20, "ema": {"decay": 0.9}}, "labels": {"k": "v"}, "plan": "auto"}  # fmt: skip
    found = {each.field: (each.a, each.b) for each in spec_differences(a, b)}
    assert found == {
        "train.steps": ("10", "20"),
        "train.ema": ("null", "-"),
        "train.ema.decay": ("-", "0.9"),
        "labels": ("{}", "-"),
        "labels.k": ("-", "v"),
    }
    assert not list(spec_differences(a, a))


def test_a_plan_in_a_word_differs_from_one_in_fields_as_a_whole() -> None:
    said = {"name": "x", "plan": "default"}
    planned = {"name": "x", "plan": {"mesh": {"dp_shard": 2}, "units": [{"modules": ["a"]}, {}]}}
    (found,) = spec_differences(said, planned)
    assert (found.field, found.a) == ("plan", "default")
    assert found.b == "a layout with 2 units of its own"
    meshes = list(spec_differences({"mesh": "auto"}, {"mesh": {"dp_shard": 2, "tp": 1}}))
    assert [(each.field, each.a, each.b) for each in meshes] == [
        ("mesh", "auto", "dp_shard 2 x tp 1")
    ]
    wider = planned | {"plan": {"mesh": {"dp_shard": 4}, "units": [{"modules": ["a"]}, {}]}}
    assert [each.field for each in spec_differences(planned, wider)] == ["plan.mesh.dp_shard"]


def _metrics(losses: list[float], hits: float | None) -> MetricsView:
    steps = [
        StepView(step=n, fence=1, loss=loss, tokens_per_s=10.0 * n, step_time_s=1.0 / n)
        for n, loss in enumerate(losses, start=1)
    ]
    points = () if hits is None else (MetricPoint(step=1, fence=1, values={"hits": hits}),)
    names = () if hits is None else ("hits",)
    passed = (Evaluation(step=1, loss=9.0, tokens=1), Evaluation(step=2, loss=losses[-1], tokens=1))
    return MetricsView(
        items=tuple(steps), total=len(steps), user_metrics=points, names=names, evaluations=passed
    )


def test_final_and_best_figures_stand_side_by_side() -> None:
    pairs = metric_pairs(_metrics([3.0, 1.0, 2.0], 0.5), _metrics([5.0, 4.0], None))
    found = {(each.metric, each.which): (each.a, each.b) for each in pairs}
    assert found[("loss", "final")] == (2.0, 4.0)
    assert found[("loss", "least")] == (1.0, 4.0)
    assert ("loss", "most") not in found
    assert found[("tokens_per_s", "most")] == (30.0, 20.0)
    assert ("tokens_per_s", "least") not in found
    assert found[("hits", "final")] == (0.5, None)
    assert (found[("hits", "least")], found[("hits", "most")]) == ((0.5, None), (0.5, None))
    assert found[("validation loss", "final")] == (2.0, 4.0)
