"""A secret may be in a file that a setting names, so that no process has it in its environment."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import BaseSettings
from redis.connection import parse_url

from meshloom.client.errors import ClientError
from meshloom.client.settings import ClientSettings
from services.controller.settings import AclSettings, Settings
from services.local.settings import LocalSettings
from services.worker.agent.settings import AgentSettings

PASSWORD = "of any kind: /@#?%é"  # noqa: S105 not one of ours
SECRETS: list[tuple[type[BaseSettings], str]] = [
    (Settings, "token"),
    (Settings, "redis_password"),
    (AgentSettings, "redis_password"),
    (LocalSettings, "token"),
    (LocalSettings, "redis_password"),
    (AclSettings, "redis_controller_password"),
    (AclSettings, "redis_agent_password"),
]


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHLOOM_REDIS_URL", "redis://someone@server:6379/0")
    monkeypatch.setenv("MESHLOOM_REDIS_CONTROLLER_PASSWORD", "0123456789abcdef")


def variable(name: str) -> str:
    return f"MESHLOOM_{name.upper()}"


@pytest.mark.parametrize(("settings", "name"), SECRETS)
def test_a_secret_is_read_from_its_file(
    settings: type[BaseSettings], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{PASSWORD}\n")
    monkeypatch.delenv(variable(name), raising=False)
    monkeypatch.setenv(f"{variable(name)}_FILE", str(path))
    found = getattr(settings(), name)
    assert (found if isinstance(found, str) else found.get_secret_value()) == PASSWORD


def named_twice(path: Path) -> str:
    path.write_text("x")
    return "are both set"


def empty(path: Path) -> str:
    path.write_text(" \n")
    return "is empty"


def missing(path: Path) -> str:
    return f"cannot read {path}: No such file or directory"


def binary(path: Path) -> str:
    path.write_bytes(b"\xff\xfe")
    return "is no text"


@pytest.mark.parametrize("make", [named_twice, empty, missing, binary])
@pytest.mark.parametrize(("settings", "name"), SECRETS)
def test_a_fault_of_the_file_names_the_variable(
    settings: type[BaseSettings],
    name: str,
    make: Callable[[Path], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = make(tmp_path / "secret")
    if make is named_twice:
        monkeypatch.setenv(variable(name), "0123456789abcdef")
    else:
        monkeypatch.delenv(variable(name), raising=False)
    monkeypatch.setenv(f"{variable(name)}_FILE", str(tmp_path / "secret"))
    with pytest.raises(ValidationError) as refused:
        settings()
    assert said in str(refused.value)
    assert f"{variable(name)}_FILE" in str(refused.value)


def test_the_client_reads_its_token_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    monkeypatch.delenv("MESHLOOM_TOKEN", raising=False)
    monkeypatch.setenv("MESHLOOM_TOKEN_FILE", str(path))
    with pytest.raises(ClientError, match="MESHLOOM_TOKEN_FILE: cannot read"):
        ClientSettings.from_environment()
    path.write_text("secret\n")
    assert ClientSettings.from_environment().token == "secret"  # noqa: S105 the file's


@pytest.mark.parametrize("settings", [Settings, AgentSettings, LocalSettings])
def test_a_password_of_any_characters_becomes_part_of_the_address(
    settings: type[Settings | AgentSettings | LocalSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHLOOM_REDIS_PASSWORD", PASSWORD)
    parsed = parse_url(str(settings().redis_address))  # type: ignore[no-untyped-call] # not annotated in redis-py
    assert parsed["password"] == PASSWORD
    assert (parsed["username"], parsed["host"], parsed["port"]) == ("someone", "server", 6379)
    monkeypatch.setenv("MESHLOOM_REDIS_URL", "redis://someone:else@server:6379/0")
    with pytest.raises((ValidationError, ValueError), match="leave one of them out"):
        _ = settings().redis_address


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (Settings, "MESHLOOM_REDIS_URL"),
        (Settings, "MESHLOOM_TELEMETRY_REDIS_URL"),
        (AgentSettings, "MESHLOOM_REDIS_URL"),
        (AgentSettings, "MESHLOOM_TELEMETRY_REDIS_URL"),
        (LocalSettings, "MESHLOOM_REDIS_URL"),
    ],
)
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("server:6379", "must begin with redis://"),
        ("https://server", "must begin with redis://"),
        ("REDIS://server", "must begin with redis://"),
        ("redis://:zz/yy@server", "write / as %2F"),
        ("redis://server:99999", "no valid host and port"),
        ("redis://[zz]/0", "no valid host and port"),
    ],
)
def test_what_is_no_address_of_redis_is_refused_without_its_password(
    settings: type[Settings | AgentSettings | LocalSettings],
    name: str,
    url: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MESHLOOM_REDIS_PASSWORD", raising=False)
    monkeypatch.setenv(name, url)
    with pytest.raises((ValidationError, ValueError)) as refused:
        _ = settings().redis_address
    faults = refused.value.errors() if isinstance(refused.value, ValidationError) else []
    words = " ".join(str(fault["msg"]) for fault in faults) or str(refused.value)
    assert said in words
    assert "zz" not in words
