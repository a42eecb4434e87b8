"""The allow-list of entry points, and secrets that are named instead of written out."""

import pytest

from services.contract.jobs.entry_points import entry_points
from services.contract.jobs.secret_references import references, resolved, written_out


@pytest.mark.parametrize(
    ("factory", "allowed"),
    [
        ("decoder", True),
        ("models.net:Tiny", True),
        ("models.net.deep:Tiny", True),
        ("models.network:Tiny", False),
        ("models:net", False),
        ("models.net", True),
        ("models.net.Tiny", True),
        ("models.network.Tiny", False),
        ("os.system", False),
        ("exact:One", True),
        ("exact:OneMore", False),
        ("os:system", False),
    ],
)
def test_a_prefix_ends_where_a_part_of_the_name_ends(factory: str, allowed: bool) -> None:  # noqa: FBT001 a parameter
    listed = entry_points(["models.net", " exact:One "], otherwise_any=True)
    assert listed.allows(factory) is allowed


def test_an_unset_list_is_as_open_as_the_settings_say_and_a_star_is_all() -> None:
    assert entry_points(None, otherwise_any=True).allows("os:system")
    assert entry_points(["*"], otherwise_any=False).allows("os:system")
    for shut in (entry_points(None, otherwise_any=False), entry_points([""], otherwise_any=True)):
        assert not shut.allows("os:system")
        assert shut.allows("decoder")


def test_a_reference_is_found_wherever_it_stands_and_replaced() -> None:
    args = {"a": {"secret": "ONE"}, "b": [1, {"c": {"secret": "TWO"}}], "d": "plain"}
    assert list(references(args)) == ["ONE", "TWO"]
    values = {"ONE": "first value", "TWO": "second value"}
    assert resolved(args, values) == {
        "a": "first value",
        "b": [1, {"c": "second value"}],
        "d": "plain",
    }
    with pytest.raises(KeyError, match="TWO"):
        resolved(args, {"ONE": "x"})


@pytest.mark.parametrize(
    ("args", "pointers"),
    [
        ({"token": "abc"}, ["/token"]),
        ({"hf_token": "abc", "API_KEY": "x", "db": {"password": "y"}}, None),
        ({"items": [{"secret_key": "x"}]}, ["/items/0/secret_key"]),
        ({"secret": {"secret": "../../etc/passwd"}}, ["/secret/secret"]),
        ({"secret": {"secret": "NAME", "more": 1}}, ["/secret/secret"]),
        ({"source": "s3://key:pass@host/bucket"}, ["/source"]),
        ({"password": {"secret": "NAME"}, "token": ""}, []),
        ({"pad_token": "<pad>", "eos_token": "</s>", "tokens": "many", "key": "x"}, []),
        ({"token": 5, "source": "https://host/a:b@c"}, []),
        (
            {"AWS_SESSION_TOKEN": "x", "api-key": "x", "pwd": "x"},
            ["/AWS_SESSION_TOKEN", "/api-key", "/pwd"],
        ),
        (
            {"headers": {"Authorization": "x"}, "dbPassword": "x"},
            ["/dbPassword", "/headers/Authorization"],
        ),
        ({"passwords": ["a", "b"], "api_keys": [{"secret": "NAME"}]}, ["/passwords"]),
        ({"note": "use ghp_" + "a1B2" * 9}, ["/note"]),
        (
            {"list": ["hf_" + "a" * 34, "Bearer abcdefgh123", "AKIA" + "A" * 16]},
            ["/list/0", "/list/1", "/list/2"],
        ),
        ({"key": "-----BEGIN RSA PRIVATE KEY-----\nMIIE"}, ["/key"]),
        (
            {
                "bos_token": "<s>",
                "special_tokens": ["<pad>"],
                "keys": ["a"],
                "author": "Basic people",
            },
            [],
        ),
        ({"note": "the sk-learn way, hf_datasets, ghp_ and a bearer of news", "hidden": "eyJ"}, []),
    ],
)
def test_what_looks_like_a_credential_is_found_and_what_does_not_is_left(
    args: dict[str, object], pointers: list[str] | None
) -> None:
    expected = ["/args/API_KEY", "/args/db/password", "/args/hf_token"]
    if pointers is not None:
        expected = [f"/args{pointer}" for pointer in pointers]
    assert sorted(fault.pointer for fault in written_out(args, "/args")) == expected


def test_a_text_that_almost_holds_a_credential_everywhere_is_judged_in_one_pass() -> None:
    # With a time that grows with the square of its length this would take an hour.
    assert not list(written_out({"note": "eyJ-" * 1_000_000}, ""))
    hidden = "x=eyJ" + "a" * 20 + ".eyJ" + "b" * 20 + ".c"
    assert len(list(written_out({"note": hidden}, ""))) == 1
