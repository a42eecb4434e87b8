"""What specs may say where others may submit: entry points, credentials, size."""

import pytest

from services.contract.jobs.entry_points import EntryPoints
from services.controller.api.guard import AccessPolicy
from services.controller.settings import Settings
from tests.controller.conftest import ControlPlane, job_body, open_plane
from tests.controller.credentials import refusal

pytestmark = pytest.mark.redis


def test_entry_points_that_are_not_listed_are_refused_with_the_place(redis_url: str) -> None:
    listed = EntryPoints(("models",))
    with open_plane(redis_url, AccessPolicy(), leads=False, entry_points=listed) as plane:
        good = job_body(model={"factory": "models.net:Tiny"})
        assert plane.client.post("/v1/jobs", json=good).status_code == 201
        bad = job_body(
            model={"factory": "os:system"},
            optimizer={"factory": "modelsx:f"},
            evaluation={"metrics": {"factory": "other:f", "args": {"token": "abc"}}},
        )
        answer = plane.client.post("/v1/jobs", json=bad)
        assert answer.status_code == 422
        found = {fault["pointer"]: fault["code"] for fault in answer.json()["errors"]}
        named = ("/model/factory", "/optimizer/factory", "/evaluation/metrics/factory")
        assert {p: code for p, code in found.items() if p in named} == dict.fromkeys(
            named, "factory_not_allowed"
        )
        assert found.keys() - named == {"/evaluation/metrics/args/token"}
        assert "MESHLOOM_FACTORY_PREFIXES" in answer.json()["detail"]


def test_with_tokens_nothing_but_built_ins_is_allowed_unless_listed() -> None:
    def allowed(**fields: object) -> bool:
        settings = Settings.model_validate({"redis_url": "redis://x", **fields})
        return settings.entry_points.allows("models:Tiny")

    assert allowed()
    assert not allowed(token="x" * 32)
    assert allowed(token="x" * 32, factory_prefixes="other, models")
    assert not allowed(factory_prefixes="")


@pytest.mark.parametrize(
    "metrics",
    [
        {"mlflow": {"tracking_uri": "https://mlflow.example.evil", "token": {"secret": "HUB"}}},
        {"mlflow": {"tracking_uri": "file:///storage/job_of_another/exports"}},
        {"mlflow": {"tracking_uri": "sqlite:////home/x.db"}},
        {"wandb": {"base_url": "http://169.254.169.254", "api_key": {"secret": "HUB"}}},
    ],
)
def test_where_entry_points_are_restricted_no_job_chooses_where_its_secrets_and_metrics_go(
    redis_url: str, metrics: dict[str, object]
) -> None:
    fields = {
        "redis_url": "redis://x",
        "token": "x" * 32,
        "tracker_servers": "https://mlflow.example/",
    }
    listed = Settings.model_validate(fields).entry_points
    with open_plane(redis_url, AccessPolicy(), leads=False, entry_points=listed) as plane:
        for path in ("/v1/jobs", "/v1/plans"):
            answer = plane.client.post(path, json=job_body(metrics=metrics))
            assert (answer.status_code, len(answer.json()["errors"])) == (422, 1), answer.text
            assert answer.json()["errors"][0]["code"] == "tracker_not_allowed"
            assert "MESHLOOM_TRACKER_SERVERS" in answer.json()["detail"]
        own: list[dict[str, object]] = [
            {"mlflow": {"tracking_uri": "https://mlflow.example"}},
            {"mlflow": {}, "wandb": {}},
        ]
        for allowed in own:
            answer = plane.client.post("/v1/jobs", json=job_body(metrics=allowed))
            assert answer.status_code == 201
    everything = Settings.model_validate(fields | {"tracker_servers": "", "factory_prefixes": "*"})
    with open_plane(
        redis_url, AccessPolicy(), leads=False, entry_points=everything.entry_points
    ) as plane:
        assert plane.client.post("/v1/jobs", json=job_body(metrics=metrics)).status_code == 201


def test_a_credential_in_a_spec_is_refused_and_not_echoed(quiet_plane: ControlPlane) -> None:
    literal = job_body(data={"factory": "stdlib_bytes", "args": {"hf_token": "hf_abcdefgh"}})
    answer = quiet_plane.client.post("/v1/jobs", json=literal)
    assert answer.status_code == 422
    (fault,) = answer.json()["errors"]
    assert (fault["pointer"], fault["code"]) == ("/data/args/hf_token", "credential_written_out")
    assert "MESHLOOM_SECRETS_DIR" in fault["detail"]
    assert "hf_abcdefgh" not in answer.text
    written = {"labels": {"api-key": "abcdefgh", "note": "ghp_" + "x" * 36}}
    answer = quiet_plane.client.post("/v1/jobs", json=job_body(**written))
    places = [fault["pointer"] for fault in answer.json()["errors"]]
    assert (answer.status_code, places) == (422, ["/labels/api-key", "/labels/note"])
    path = f"/v1/jobs/{quiet_plane.submit()}"
    answer = quiet_plane.client.patch(path, json=written, headers={"If-Match": "*"})
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/labels/api-key")
    typed = {"dim": "ghp_" + "x" * 36}
    answer = quiet_plane.client.post(
        "/v1/jobs",
        json=job_body(model={"factory": "decoder", "args": typed}, priority=typed["dim"]),
    )
    assert {each["pointer"] for each in answer.json()["errors"]} == {"/model/args/dim", "/priority"}
    assert "ghp_" not in answer.text
    named = job_body(data={"factory": "mine:load", "args": {"hf_token": {"secret": "HUB"}}})
    assert quiet_plane.client.post("/v1/jobs", json=named).status_code == 201


def test_a_spec_that_is_too_large_is_refused(quiet_plane: ControlPlane) -> None:
    answer = quiet_plane.client.post("/v1/jobs", json=job_body(plan={"x": "y" * 70_000}))
    assert refusal(answer) == (413, "spec_too_large")
