"""What Prometheus scrapes of a live controller: every series that rules and dashboard ask for is there."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML

from services.contract.words.states import NodeState, RankPhase
from tests.e2e.conftest import LONG, Stack
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]
DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
Samples = dict[str, list[tuple[dict[str, str], float]]]


def asked_for() -> set[str]:
    texts = RULES.read_text() + (DEPLOY / "grafana" / "meshloom.json").read_text()
    # Of pools there are none here: ``tests/controller/test_pools.py`` has some.
    return {
        n for n in re.findall(r"\bmeshloom_[a-z_]+", texts) if not n.startswith("meshloom_pool_")
    }


def scraped(stack: Stack, path: str = "/v1/metrics") -> Samples:
    found: Samples = {}
    answer = httpx.get(f"{stack.url}{path}").raise_for_status()
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_every_series_of_rules_and_dashboard_is_there_while_a_job_runs(stack: Stack) -> None:
    assert len(asked_for()) >= 20
    endless = {**LONG, "train": {"steps": 1_000_000, "global_batch": 4, "seed": 7}}
    job_id = stack.submit(**endless).id
    stack.at_step(job_id, 21)

    def all_there() -> Samples | None:
        found = scraped(stack)
        return found if asked_for() <= found.keys() else None

    found = until(all_there)
    assert found["meshloom_jobs"]
    assert ({"state": "READY"}, 1.0) in found["meshloom_nodes"]
    assert ({"device": "cpu"}, 4.0) in found["meshloom_slots"]
    assert found["meshloom_leading"] == [({}, 1.0)]
    assert found["meshloom_look_seconds_count"][0][1] > 0
    assert found["meshloom_fact_lag_seconds_count"][0][1] > 0
    ranks = [(labels["phase"], n) for labels, n in found["meshloom_job_ranks"]]
    assert sum(n for _, n in ranks) == 2
    # Anybody may read the totals, without a token: they name no job.
    public = scraped(stack, "/metrics")
    assert not [name for name in public if name.startswith("meshloom_job_")]
    stack.client.kill(job_id)
    stack.rested(job_id)
    assert job_id not in str(scraped(stack).get("meshloom_job_step", []))


def expressions() -> Iterator[str]:
    """All of the rules and of the dashboard's panels, with Grafana's variables filled in."""
    for group in YAML(typ="safe").load(RULES.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in json.loads((DEPLOY / "grafana" / "meshloom.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield re.sub(r"\$__\w+", "5m", re.sub(r"\$(?!__)\w+", "any", target["expr"]))


def test_every_expression_is_promql_of_series_that_are_labelled_so() -> None:
    texts = list(expressions())
    assert len(texts) >= 20
    for text in texts:
        promql_parser.parse(
            text
        )  # raises with the place of the error; functions and types are checked, too
    with pytest.raises(ValueError, match="expected type"):
        promql_parser.parse("rate(meshloom_jobs)")


def test_the_rules_are_what_promtool_takes() -> None:
    rules = YAML(typ="safe").load(RULES.read_text())
    texts = RULES.read_text() + (DEPLOY / "grafana" / "meshloom.json").read_text()
    assert set(re.findall(r'phase=\\?"(\w+)', texts)) <= set(RankPhase.__members__)
    assert set(re.findall(r'state=\\?"(\w+)', texts)) <= set(NodeState)
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert len(alerts) == len(set(alerts)) >= 10
    promtool = shutil.which("promtool")
    if promtool is not None:  # else the test above has parsed the expressions
        subprocess.run([promtool, "check", "rules", str(RULES)], check=True)
