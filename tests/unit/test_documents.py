"""Documents agree with the repository: links, make targets, files of the README, keys."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), ROOT / "data" / "README.md", *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


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


def test_the_tree_of_the_readme_is_the_tree_on_disk():
    text = (ROOT / "README.md").read_text()
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
    for name in re.findall(r"\b(?:tools|configs|data|examples)/[\w/]+\.(?:py|yaml)", text):
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
