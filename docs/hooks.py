"""What makes a site of these pages, which are plain Markdown and stay so.

The list of pages in ``index.md`` becomes the navigation. What a page links to outside of this
folder comes along, under ``repository``. TeX becomes MathML, which browsers draw by themselves.
"""

import posixpath
import re
from html import unescape
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = "repository/"

ENTRY = re.compile(r"^## (.+)$|^- \[(.+?)\]\((.+?)\)", re.M)
CODE = r"^ *```.*?^ *```$|`[^`\n]+`"
LINK = re.compile(CODE + r"|(\]\()(?![a-z]+:|#)([^)#\s]+)", re.M | re.S)
PAGE = re.compile(r"\bdocs/([a-z]+)\.md\b")
TEX = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def on_config(config):
    """Make the navigation."""
    config.nav, pages = [{"Overview": "index.md"}], []
    for group, title, target in ENTRY.findall((ROOT / "docs" / "index.md").read_text()):
        if group:
            pages = []
            config.nav.append({group: pages})
        else:
            pages.append({title: _in_site("index.md", target)})


def on_files(files, config):
    """Add what is outside and linked to; a folder becomes a page that lists its files."""
    todo = [(file.src_uri, Path(file.abs_src_path)) for file in files.documentation_pages()]
    while todo:
        page, source = todo.pop()
        for target in filter(None, (target for _, target in LINK.findall(_text(source)))):
            uri = _in_site(page, target)
            found = _in_repository(uri)
            if not uri.startswith(OUTSIDE) or uri in files.src_uris or not found.exists():
                continue
            if found.is_file():
                files.append(File.generated(config, uri, abs_src_path=str(found)))
            else:
                text, hidden = _text(found), InclusionLevel.NOT_IN_NAV
                files.append(File.generated(config, uri, content=text, inclusion=hidden))
            if uri.endswith(".md"):
                todo.append((uri, found))


def on_page_markdown(markdown, page, **_):
    """Turn links into those that lead to the same files in the site."""
    here = page.file.src_uri
    folder = posixpath.dirname(here) or "."

    def link(match):
        if match[1] is None:  # code
            return match[0]
        return match[1] + posixpath.relpath(_in_site(here, match[2]), folder)

    return LINK.sub(link, markdown)


def on_page_content(html, page, **_):
    """Draw formulas, and make links of the pages that docstrings name."""
    if page.file.src_uri == "api.md":
        html = PAGE.sub(r'<a href="\1.html">docs/\1.md</a>', html)
    return TEX.sub(lambda m: convert(unescape(m[2]), display=_DISPLAY[m[1]]), html)


_DISPLAY = {"span": "inline", "div": "block"}


def _in_site(page, target):
    """Return where that is in the site to which `page` links."""
    folder = posixpath.dirname(posixpath.join("docs", page))
    if page.startswith(OUTSIDE):
        folder = posixpath.dirname(page[len(OUTSIDE) :])
    path = posixpath.normpath(posixpath.join(folder, target))
    if path.startswith("docs/"):
        return path[len("docs/") :]
    return OUTSIDE + path + ("/index.md" if (ROOT / path).is_dir() else "")


def _in_repository(uri):
    """Return the file or folder of which `uri`, in the site, is made."""
    path = ROOT / uri[len(OUTSIDE) :] if uri.startswith(OUTSIDE) else ROOT / "docs" / uri
    return path.parent if not path.exists() and path.name == "index.md" else path


def _text(source):
    if source.is_file():
        return source.read_text()
    names = sorted(path.name for path in source.glob("*.*") if path.suffix != ".md")
    return "\n".join([f"# {source.name}", "", *(f"- [{name}]({name})" for name in names)])
