"""The pages as a site: built without a warning, whole, and loading nothing from elsewhere."""

import os
import re
import subprocess
import sys
from html import unescape
from importlib import import_module
from pathlib import Path

import pytest

from .pool import ROOT

MODULES = re.findall(r"^::: (gluon_esgd(?:\.\w+)?)$", (ROOT / "docs" / "api.md").read_text(), re.M)
PUBLIC = {name: import_module(name).__all__ for name in MODULES}  # MXNet: not inside of a test


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site; anchors, pages without a place and missing files are warnings."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return folder


def _pages(site):
    return {path: path.read_text() for path in site.rglob("*.html")}


def test_every_link_in_the_site_leads_somewhere(site):
    pages = _pages(site)
    assert len(pages) > 25
    for path, text in pages.items():
        if path.name == "404.html":  # its links begin at the root of whatever serves it
            continue
        for link in re.findall(r'(?:href|src)="([^"#:]+)[#"]', text):
            assert (path.parent / link).exists(), (path.name, link)


def test_nothing_is_loaded_from_elsewhere(site):
    for path, text in _pages(site).items():
        loads = re.findall(
            r'<(?:script|img|link|iframe)\b[^>]*(?:src|href)="((?:https?:)?//[^"]+)', text
        )
        assert not loads, (path.name, loads)
    for path in site.glob("assets/stylesheets/*.css"):
        assert "url(http" not in path.read_text()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_api(site, name):
    text = (site / "api.html").read_text()
    for public in PUBLIC[name]:
        home = rf"{name}(?:\.{public})?\.{public}"  # a module of the same name is in between
        assert re.search(rf'id="{home}"', text), public


def test_the_api_lists_what_has_a_docstring_only(site):
    text = (site / "api.html").read_text()
    assert "gluon_esgd.ElasticSGD" in text and 'id="gluon_esgd.ElasticSGD.interval"' not in text
    assert "Moving rate times max(2, clients)" in text


def test_pages_that_docstrings_name_are_links(site):
    text = (site / "api.html").read_text()
    assert text.count('<a href="algorithms.html">docs/algorithms.md</a>') == 1
    assert not re.search(r"[^>]docs/[a-z]+\.md", text)


def test_the_trainer_says_that_no_rule_is_its_default(site):
    text = (site / "api.html").read_text().split('id="gluon_esgd.ElasticTrainer"')[1]
    row = re.search(r"<td>\s*<code>rule</code>(.*?)</tr>", text, re.S)[1]
    default = row.rsplit("<td>", 1)[1]
    assert "<code>None</code>" in default


def test_the_api_has_all_modules_that_the_pages_and_recipes_import():
    texts = [path.read_text() for path in [*ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*.py")]]
    imported = set(re.findall(r"^from (gluon_esgd[.\w]*) import", "\n".join(texts), re.M))
    assert len(imported) > 5
    assert imported <= set(MODULES)


def test_formulas_are_drawn_without_scripts(site):
    text = (site / "algorithms.html").read_text()
    assert text.count("<math ") > 50 and 'display="block"' in text
    assert "arithmatex" not in text and "$$" not in text


def test_pictures_are_there(site):
    text = (site / "how.html").read_text()
    pictures = re.findall(r'<img alt="[^"]{40,}" src="([^"]+)"', text)
    assert len(pictures) == 2
    assert all(Path(site, picture).exists() for picture in pictures)


def test_every_page_is_an_entry_of_the_navigation(site):
    """As by its title: a README would be the index of its section, a link in the heading."""
    text = (site / "how.html").read_text()
    entry = (
        r'<a href="[^"]+" class="md-nav__link[^"]*">\s*<span class="md-ellipsis">\s*([^<]+?)\s*<'
    )
    listed = re.findall(entry, text)
    titles = re.findall(r"^- \[(.+?)\]\(", (ROOT / "docs" / "index.md").read_text(), re.M)
    assert {"README", "Benchmarks"} < set(titles)
    assert set(titles) <= {unescape(title) for title in listed}


def test_the_own_stylesheet_is_used(site):
    text = (site / "how.html").read_text()
    assert re.search(r'<link rel="stylesheet" href="site\.css', text)
    assert (site / "site.css").read_text() == (ROOT / "docs" / "site.css").read_text()
