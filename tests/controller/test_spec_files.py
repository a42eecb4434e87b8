"""Files that are no spec, however they try: one error in one line, and soon."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.errors import CliError, SpecFileError
from services.cli.spec_file import MAX_FILE_BYTES, read_overrides, read_spec

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGES = "a0: &a0 {x0: 0}\n" + "".join(
    f"a{n}: &a{n} {{x{n}: [*a{n - 1}, *a{n - 1}], <<: *a{n - 1}}}\n" for n in range(1, 40)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "more than 65536 values"),
        (MERGES, "more than 65536 values"),
        ("a: &a [*a]", "*a is inside itself"),
        ("a: &a {b: {c: *a}}", "*a is inside itself"),
        ("a: " + "[" * 2_000 + "]" * 2_000, "nested deeper than 32 levels"),
        ("a: " + "{b: " * 2_000 + "}" * 2_000, "nested deeper than 32 levels"),
        ("\n".join(" " * depth + "a:" for depth in range(600)), "nested deeper than 32 levels"),
        ("a: &a [[[[[[[[[[x]]]]]]]]]]\nb: &b [[[[[[[[[[*a]]]]]]]]]]\nc: [[[[[[[[[[[[*b]]]]]]]]]]]]", "deeper"),
        (f"a: {'9' * 5_000}", "digits"),
        (f"a: 0x{'f' * 100_000}", "a is an integer beyond 64 bits"),
        ("a: [0o7777777777777777777777]", "a[0] is an integer beyond 64 bits"),
        ("a: 2026-13-45", "month"),
        ("a: *nothing", "undefined alias"),
        ("a: !!python/object/apply:os.system [ls]", "constructor"),
        (f"a: !!binary {'A' * 100_000}", "JSON cannot carry"),
        (f"{'a' * 1_000}: .nan", "JSON cannot carry"),
        (f"a: *{'b' * 100_000}", "undefined alias"),
        ("a: b\n---\nc: d", "another document"),
        (f"a: {'x' * MAX_FILE_BYTES}", f"larger than {MAX_FILE_BYTES} bytes"),
    ],
)  # fmt: skip
def test_a_file_that_would_not_end_is_one_error(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(SpecFileError) as refused:
        read_spec(path)
    assert words in str(refused.value)
    assert str(refused.value).startswith(str(path))
    assert len(str(refused.value)) < 1_000
    for command in (("submit", str(path)), ("plan", str(path))):
        assert isinstance(CliRunner().invoke(app, command).exception, SpecFileError)


def test_an_override_is_bounded_alike() -> None:
    for value in ("&a [*a]", "[" * 100 + "]" * 100, "9" * 5_000):
        with pytest.raises(CliError, match=r"--set model\.args is not valid YAML"):
            read_overrides([f"model.args={value}"])


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([".".join("a" * 5_000) + "=1"], "deeper than 32 levels"),
        ([f"a=0x{'f' * 100_000}"], "what JSON cannot carry"),
        (["a" * 100_000], "--set is FIELD=VALUE"),
        ([f"{'a' * 100_000}=1", f"{'a' * 100_000}.b=1"], "was set as a whole before"),
    ],
)
def test_the_field_of_an_override_is_bounded_and_its_error_is_short(
    texts: list[str], words: str
) -> None:
    with pytest.raises(CliError, match=words) as refused:
        read_overrides(texts)
    assert len(str(refused.value)) < 1_000


def test_aliases_within_bounds_stand_for_what_they_name(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("a: &a {x: [1, 2]}\nb: *a\nc: {<<: *a, y: 3}\nd: &d text\ne: *d")
    spec = read_spec(path)
    assert spec["b"] == {"x": [1, 2]}
    assert (spec["c"], spec["e"]) == ({"x": [1, 2], "y": 3}, "text")


TOKENS = st.sampled_from(
    [*"[]{}:,-?|>&*!%@#'\" \n\tab1", "&a ", "*a", "<<: ", "!!int ", "0x", ".inf"]
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(TOKENS, max_size=30).map("".join))
def test_whatever_a_file_holds_it_is_a_spec_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text)
    with contextlib.suppress(SpecFileError):
        assert isinstance(read_spec(path), dict)
