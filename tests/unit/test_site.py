"""The documentation as a site (`make docs`): it builds without a warning, links lead somewhere and
nothing is loaded from elsewhere."""

import html
import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from urllib.parse import unquote

import pytest

import moe_core
import moe_core.parallel
import swinv2_moe
from moe_core.options import options

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
API_PAGES = {
    moe_core: "api-moe-core.md",
    moe_core.parallel: "api-moe-core-parallel.md",
    swinv2_moe: "api-swinv2-moe.md",
}
LOADED = re.compile(r"""<(?:script|img|iframe|link)[^>]*\s(?:src|href)=["']?([^\s"'>]+)""")
LINK = re.compile(r"<a [^>]*href=\"?([^\s\">]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"needs the docs extra ({package} is missing)")
    directory = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", directory],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    return directory


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = LOADED.findall(page.read_text())
        assert len(loaded) > 3
        assert [name for name in loaded if name.startswith(("http:", "https:", "//"))] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\W*(?:https?:)?//|@import", sheet.read_text()), sheet


def test_links_lead_to_files_of_the_site(site):
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its links are absolute
            continue
        for link in LINK.findall(page.read_text()):
            path = unquote(link.partition("#")[0])
            if path and not path.startswith(("http:", "https:")):
                assert (page.parent / path).is_file(), f"{page.name}: {link}"


def test_a_link_out_of_docs_is_its_path(site):
    text = (site / "tutorial" / "first-model.html").read_text().replace("<wbr>", "")
    assert "<code>examples/classify.py</code>" in text
    text = (site / "how-to" / "evaluate.html").read_text().replace("<wbr>", "")
    assert "configs/ablations" in text


def test_docstrings_are_in_the_api_pages(site):
    text = (site / "reference" / "api-moe-core.html").read_text()
    assert 'id="moe_core.MoELayer"' in text
    assert "Each owns the same number of consecutive experts" in text
    assert "search_index.json" in {file.name for file in (site / "search").iterdir()}


def test_every_field_of_a_layers_configuration_is_described(site):
    text = (site / "reference" / "api-moe-core.html").read_text()
    assert len(options(moe_core.MoEConfig)) == len(fields(moe_core.MoEConfig))
    for field, option in options(moe_core.MoEConfig):
        name = field.name
        _, _, entry = text.partition(f'id="moe_core.MoEConfig.{name}"')
        shown = html.unescape(re.sub(r"<[^>]*>", "", entry[:4000]))
        meaning = option.meaning.replace("`", "").split(";")[0]
        assert meaning, name
        assert meaning in " ".join(shown.split()), name


@pytest.mark.parametrize("module", API_PAGES, ids=lambda module: module.__name__)
def test_every_field_of_a_public_class_is_described(site, module):
    text = (site / "reference" / API_PAGES[module].replace(".md", ".html")).read_text()
    classes = [getattr(module, name) for name in module.__all__]
    for owner in filter(inspect.isclass, classes):
        names = getattr(owner, "_fields", None) or getattr(owner, "__dataclass_fields__", ())
        _, _, entry = text.partition(f'id="{module.__name__}.{owner.__name__}"')
        for name in names:
            in_table = re.search(rf"<td>\s*<code>(?:<span [^>]*>)?{name}<", entry)
            _, _, field = entry.partition(f'id="{module.__name__}.{owner.__name__}.{name}"')
            described = "<p>" in field.partition('class="doc doc-object doc-')[0]
            assert in_table or described, f"{owner.__name__}.{name}"


@pytest.mark.parametrize("module", API_PAGES, ids=lambda module: module.__name__)
def test_api_pages_have_every_public_name_once(module):
    text = (REFERENCE / API_PAGES[module]).read_text()
    names = re.findall(r"^::: [\w.]+\.(\w+)$", text, re.MULTILINE)
    assert len(names) == len(set(names))
    if module is swinv2_moe:
        assert set(module.__all__) <= set(names)
    else:
        assert set(module.__all__) == set(names)
