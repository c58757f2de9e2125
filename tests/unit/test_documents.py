"""Documents agree with the repository: links, make targets, the tree of files, keys; what README
claims is in the results; pages stay short."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import read_configuration

from swinv2_moe import __version__
from swinv2_moe.commands import LEFT
from swinv2_moe.config import load

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), ROOT / "data" / "README.md", *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
CLAIM = re.compile(  # what README measures: 0.77, 2 points, 43%, 3 times
    r"(?<![\w.,-])(\d[\d,]*\.\d+|\d[\d,]*(?=\s?(?:%|points\b|times\b)))(?![\w.])"
)
MOST_WORDS = {
    "results.md": 3000,
    "explanation/architecture.md": 2500,
    "explanation/performance.md": 2000,
    "explanation/planner.md": 1000,
}


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    text = FENCE.sub("", document.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    kept = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(document):
    for link in LINK.findall(FENCE.sub("", document.read_text())):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        if document.name != "CHANGELOG.md":
            named = re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text(), re.MULTILINE)
            assert set(named) <= targets, document


def test_the_tree_in_contributing_is_the_tree_on_disk():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = re.search(r"## What is inside\n\n```\n(.*?)```", text, re.DOTALL)[1]
    named: dict[str, set[str]] = {}  # by folder
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name
            named[folder] = set()
            assert (ROOT / folder).is_dir(), line
        else:
            named[folder].add(name)
    for package in ("moe_core/", "swinv2_moe/"):
        modules = {path.name for path in (ROOT / package).glob("*.py")}
        packages = {f"{path.parent.name}/" for path in (ROOT / package).glob("*/__init__.py")}
        assert named[package] == (modules | packages) - {"__init__.py", "__main__.py"}


def test_files_that_the_readme_names_exist():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"\b(?:tools|configs|data|examples)/[\w/]+\.(?:py|yaml|ipynb)", text):
        assert (ROOT / name).is_file(), name


def test_the_table_of_keys_is_what_the_definitions_say():
    """In a process of its own, where no other test has registered anything."""
    printed = subprocess.run(
        [sys.executable, "-m", "swinv2_moe", "config", "--markdown"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    committed = (ROOT / "docs" / "reference" / "configuration-keys.md").read_text()
    assert printed == committed, "write it anew: CONTRIBUTING.md"
    assert "|  |" not in printed, "a key without a comment"


def section(text: str, anchor: str) -> str:
    """The part of a document under the heading with an anchor."""
    for part in re.split(r"^#+ ", FENCE.sub("", text), flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        if re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") == anchor:
            return body
    raise AssertionError(f"no heading {anchor}")


def decimals(number: str) -> int:
    return len(number.partition(".")[2])


def unsupported_claims(readme: str, results: str) -> list[str]:
    """The figures of README that no section of the results that their paragraph links to has."""
    missing = []
    for paragraph in re.split(r"\n\s*\n|\n(?=- )|\n(?=\| )", FENCE.sub("", readme)):
        anchors_linked = re.findall(r"docs/results\.md#([\w-]+)", paragraph)
        linked = " ".join(section(results, anchor) for anchor in anchors_linked)
        known = [float(number.replace(",", "")) for number in NUMBER.findall(linked)]
        words = re.sub(r"\]\([^)]*\)|`[^`]*`|Python [\d.]+", "", paragraph)
        for claim in CLAIM.findall(words):
            value = float(claim.replace(",", ""))
            if value not in [round(abs(number), decimals(claim)) for number in known]:
                missing.append(f"{claim} in {' '.join(words.split())[:60]!r}")
    return missing


def test_every_figure_of_the_readme_is_in_the_results_that_it_links_to():
    results = (ROOT / "docs" / "results.md").read_text()
    assert unsupported_claims((ROOT / "README.md").read_text(), results) == []


def test_a_figure_without_its_row_is_found():
    results = "# Speed\n\n| a | 1.31 |\n"
    assert unsupported_claims("1.3 times as fast ([s](docs/results.md#speed)).", results) == []
    assert unsupported_claims("1.4 times as fast ([s](docs/results.md#speed)).", results)
    assert unsupported_claims("1.3 times as fast.", results)


@pytest.mark.parametrize("name", MOST_WORDS)
def test_pages_stay_short(name):
    text = (ROOT / "docs" / name).read_text()
    assert len(text.split()) <= MOST_WORDS[name]


def test_the_results_have_at_most_ten_tables():
    text = (ROOT / "docs" / "results.md").read_text()
    assert len(re.findall(r"^\|[-:|]+\|$", text, re.MULTILINE)) <= 10


@pytest.mark.parametrize("name", ["models.csv", "speed.csv"])
def test_figures_of_models_and_speed_are_in_the_documents(name):
    documents = [ROOT / "docs" / "results.md", ROOT / "docs" / "log.md"]
    known = set(NUMBER.findall(" ".join(path.read_text() for path in documents)))
    lines = (ROOT / "docs" / "results" / name).read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert rows
    for row in rows:
        assert re.fullmatch("[0-9a-f]{7}", row["commit"]), row
        for column in ("top1", "to_dense", "samples_per_sec", "dense_samples_per_sec"):
            value = row.get(column)
            assert not value or value in known, row


def test_there_is_one_version():
    """The wheel has that of the package, and what names one names it."""
    assert read_configuration(ROOT / "pyproject.toml")["project"]["version"] == __version__
    changes = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changes[:2] == ["Unreleased", __version__]
    card = (ROOT / "swinv2_moe" / "models" / "bundled" / "tiny.md").read_text()
    assert f"| swinv2-moe {__version__} |" in card
    for name in ("Dockerfile", "examples/kubernetes/train.yaml", "docs/how-to/clusters.md"):
        text = (ROOT / name).read_text()
        versions = re.findall(r"swinv2-moe:([\d.]*\d)|image.version=\"([^\"]+)", text)
        assert {"".join(version) for version in versions} == {__version__}, name


def test_the_changes_of_a_version_are_short():
    _, *versions = re.split(r"^## \[\d", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert all(text.count("\n") <= 40 for text in versions)


def test_the_upgrade_notes_name_what_left():
    notes = (ROOT / "docs" / "reference" / "upgrade.md").read_text()
    for name in [*load._LEFT, *(f"swinv2-moe {command}" for command in LEFT)]:
        assert f"`{name}`" in notes


def test_the_recorded_runs_of_the_picture_are_those_of_the_table():
    results = (ROOT / "docs" / "results.md").read_text()
    known = NUMBER.findall(section(results, "accuracy-at-equal-time"))
    lines = (ROOT / "docs" / "results" / "equal_time.csv").read_text().splitlines()
    last = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        last[row["model"]] = row
    assert len(last) == 6
    for row in last.values():
        assert {row["top1"], f"{float(row['minutes']):.0f}"} <= set(known), row
