"""A controller that wants tokens, and requests that show some."""

from httpx2 import Response

from tests.controller.conftest import BOOTSTRAP, ControlPlane


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def make(plane: ControlPlane, scope: str, subject: str = "alice", **more: object) -> dict[str, str]:
    """The headers of a new token."""
    body = {"subject": subject, "scope": scope, **more}
    answer = plane.client.post("/v1/tokens", json=body, headers=bearer(BOOTSTRAP))
    assert answer.status_code == 201, answer.text
    return bearer(answer.json()["token"])


def trail(plane: ControlPlane) -> list[dict[str, object]]:
    answer = plane.client.get("/v1/audit", headers=bearer(BOOTSTRAP))
    assert answer.status_code == 200
    return list(answer.json()["items"])


def refusal(answer: Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]
