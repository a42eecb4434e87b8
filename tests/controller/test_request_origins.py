"""Where requests come from: names, other sites, types of bodies."""

import json

import pytest

from services.controller.api.guard import AccessPolicy
from tests.controller.conftest import BOOTSTRAP, ControlPlane, job_body, open_plane
from tests.controller.credentials import bearer, refusal

pytestmark = pytest.mark.redis


def test_a_page_that_rebinds_its_name_to_this_machine_reads_nothing(
    quiet_plane: ControlPlane,
) -> None:
    for host in ("evil.example", "evil.example:8400", "127.0.0.1.evil.example", ""):
        answer = quiet_plane.client.get("/v1/jobs", headers={"Host": host})
        assert refusal(answer) == (421, "misdirected_request")
    for host in ("localhost:8400", "LOCALHOST", "[::1]:8400", "127.0.0.1"):
        assert quiet_plane.client.get("/v1/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "media_type",
    ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain", ""],
)
def test_a_form_of_another_site_changes_nothing(quiet_plane: ControlPlane, media_type: str) -> None:
    job_id = quiet_plane.submit()
    sent = {"Content-Type": media_type}
    for path, body in (("/v1/jobs", json.dumps(job_body())), (f"/v1/jobs/{job_id}/kill", "")):
        blind = quiet_plane.client.post(path, content=body, headers=sent)
        assert refusal(blind) == (415, "unsupported_media_type")
        for mark in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            marked = quiet_plane.client.post(path, content=body, headers={**sent, **mark})
            assert refusal(marked) == (403, "cross_origin")
    assert quiet_plane.job(job_id)["state"] == "QUEUED"
    assert len(quiet_plane.get("/v1/jobs")["items"]) == 1


def test_a_body_without_a_type_is_not_taken(quiet_plane: ControlPlane) -> None:
    answer = quiet_plane.client.post("/v1/jobs", content=json.dumps(job_body()))
    assert refusal(answer) == (415, "unsupported_media_type")


def test_further_names_can_be_allowed(redis_url: str) -> None:
    policy = AccessPolicy(token=BOOTSTRAP, names=frozenset({"meshloom.example"}))
    with open_plane(redis_url, policy, leads=False) as plane:
        shown = bearer(BOOTSTRAP)
        for host, status in (("meshloom.example", 200), ("localhost", 200), ("evil.example", 421)):
            answer = plane.client.get("/v1/jobs", headers={**shown, "Host": host})
            assert answer.status_code == status, host
        for origin, status in (("https://meshloom.example", 201), ("https://evil.example", 403)):
            answer = plane.client.post(
                "/v1/jobs", json=job_body(), headers={**shown, "Origin": origin}
            )
            assert answer.status_code == status, origin
