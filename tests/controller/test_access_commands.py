"""``meshloom tokens``, ``audit`` and ``webhooks`` against a controller that wants tokens."""

from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from services.cli.app import app
from services.cli.errors import CliError, RefusedError
from services.cli.terminal import console
from services.contract.words.ids import new_token_id
from tests.controller.test_process import started

pytestmark = pytest.mark.redis
BOOTSTRAP = "the-operators-own"


def test_a_token_from_its_making_to_its_revocation(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*arguments: str, token: str = BOOTSTRAP) -> Result:
        monkeypatch.setenv("MESHLOOM_TOKEN", token)
        monkeypatch.setattr(console, "_width", 200)
        return CliRunner().invoke(app, arguments)

    with started(redis_url, token=BOOTSTRAP) as controller:
        monkeypatch.setenv("MESHLOOM_URL", str(controller.client.base_url))
        asked = ("tokens", "create", "alice", "--scope", "submitter", "--label", "laptop")
        made = call(*asked, "--expires", "30d")
        assert made.exit_code == 0, made.output
        token = made.stdout.strip()
        token_id = f"tok_{token.split('_')[1]}"
        assert made.stderr.startswith(f"{token_id}: submitter for alice")
        listed = call("tokens", "ls").stdout
        for shown in (token_id, "alice", "submitter", "laptop", "bootstrap", "UTC"):
            assert shown in listed
        assert token.split("_", 2)[2] not in listed
        assert call("ls", token=token).exit_code == 0
        refused = call("tokens", "ls", token=token).exception
        assert isinstance(refused, RefusedError)
        assert refused.problem.code == "insufficient_scope"
        _webhooks_are_added_listed_and_removed(call)
        assert call("tokens", "revoke", token_id).exit_code == 0
        gone = call("ls", token=token).exception
        assert isinstance(gone, RefusedError)
        assert gone.problem.code == "unauthorized"
        trail = call("audit").stdout
        for shown in ("bootstrap", "alice", "refused (403)", f"DELETE /v1/tokens/{token_id}"):
            assert shown in trail


def _webhooks_are_added_listed_and_removed(call: Callable[..., Result]) -> None:
    assert call("webhooks", "ls").stdout == "No webhooks\n"
    url = "https://192.0.33.8/hook?key=in-the-path"
    made = call("webhooks", "add", url, "--kind", "job.failed", "--label", "team=vision")
    assert made.exit_code == 0, made.output
    assert made.stdout.startswith("whsec_")
    webhook = made.stderr.partition(":")[0]
    listed = call("webhooks", "ls", "-o", "wide").stdout
    for shown in (webhook, "https://192.0.33.8", "never", "job.failed", "team=vision", "standard"):
        assert shown in listed
    for secret in (made.stdout.strip(), "in-the-path"):
        assert secret not in listed
    refused = call("webhooks", "add", "http://127.0.0.1/hook").exception
    assert isinstance(refused, RefusedError)
    assert str(refused).startswith("/url: ")
    wrong = call("webhooks", "add", url, "--kind", "Job Failed").exception
    assert isinstance(wrong, CliError)
    assert "/kinds/0" in str(wrong)
    assert call("webhooks", "remove", webhook).stdout == f"{webhook} is removed\n"
    assert call("webhooks", "ls").stdout == "No webhooks\n"
    gone = call("webhooks", "remove", webhook).exception
    assert isinstance(gone, RefusedError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tokens", "create", "alice", "--expires", "soon"), "30d"),
        (("tokens", "revoke", "mlt_the-token-itself"), "not a token id"),
    ],
)
def test_what_is_no_duration_or_id_is_refused_before_anything_is_asked(
    arguments: tuple[str, ...], words: str
) -> None:
    refused = CliRunner().invoke(app, arguments).exception
    assert isinstance(refused, CliError)
    assert words in str(refused)
    assert "the-token-itself" not in str(refused)


def test_token_ids_sort_by_time() -> None:
    assert new_token_id(1, bytes(10)) < new_token_id(2, bytes(10))
