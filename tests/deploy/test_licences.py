"""What the images hold of others is listed, and under licences that allow it."""

from importlib.metadata import version

import pytest

from tests.deploy.licences import (
    IMAGES,
    PAGE,
    closure,
    dashboard_packages,
    page,
    python_packages,
    refused,
    sbom,
)


def listed() -> list[list[str]]:
    """The rows of docs/licences.md: package, version, licence, where."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [row.strip("| ").split(" | ") for row in rows[2:]]


def test_every_package_is_listed_with_its_version() -> None:
    there = {(name, number) for name, number, *_ in listed()}
    names = frozenset[str]().union(*map(closure, IMAGES.values()))
    packages = {(name, version(name).partition("+")[0]) for name in names}
    packages |= {(each.name, each.version) for each in dashboard_packages()}
    assert packages == there, "run `make sbom`"


def test_every_licence_is_one_that_is_allowed() -> None:
    found = {name: refused(licence) for name, _, licence, _ in listed()}
    assert len(found) > 40
    assert {name: licences for name, licences in found.items() if licences} == {}


@pytest.mark.parametrize(
    ("licence", "words"),
    [
        ("MIT", set()),
        ("GPL-3.0-only", {"GPL-3.0-only"}),
        ("MIT AND GPL-3.0-only", {"GPL-3.0-only"}),
        ("(MIT OR GPL-3.0-only)", set()),
        ("unknown", {"unknown"}),
    ],
)
def test_a_licence_that_is_not_allowed_is_seen(licence: str, words: set[str]) -> None:
    assert refused(licence) == words


@pytest.mark.images  # the tool takes as long as it takes to read all packages of the environment
def test_the_page_and_the_sbom_say_what_the_packages_say() -> None:
    assert PAGE.read_text() == page(), "run `make sbom`"
    assert {each.name for each in python_packages()} <= {name for name, *_ in listed()}
    for image, extras in IMAGES.items():
        components = sbom(image)["components"]
        assert len(components) == len(closure(extras))
        assert all(component["purl"] for component in components)
    names = {image: {each["name"] for each in sbom(image)["components"]} for image in IMAGES}
    assert "torch" in names["worker"]
    assert "torch" not in names["controller"]
