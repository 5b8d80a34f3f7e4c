"""What the documentation shows is what there is."""

import argparse
import ast
import re
import shlex
import subprocess
import sys

import pytest
import sklearn  # noqa: F401 (sets environment variables when imported: not in a test)
from mxnet.gluon import Trainer, data

from gluon_esgd import settings
from gluon_esgd.counters import Counters
from gluon_esgd.launch import words
from gluon_esgd.launch.arguments import add_arguments

from .pool import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
IDS = [p.name for p in PAGES]


def blocks(path, language):
    every = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.M | re.S)
    return [text for name, text in every if name == language]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_blocks_compile_and_their_imports_work(page):
    for text in blocks(page, "python"):
        tree = ast.parse(text)
        imports = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
        module = ast.Module(imports, type_ignores=[])
        exec(compile(module, str(page), "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_examples_of_collectives_run():
    for text in blocks(ROOT / "docs" / "collectives.md", "python"):
        subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


def test_the_command_starts_where_numpy_is_missing():
    text = "import sys, gluon_esgd.cli; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_what_belongs_to_a_list_is_indented_for_both_kinds_of_markdown(page):
    """GitHub takes two or three spaces behind an empty line, Python's Markdown four."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    assert not re.findall(r"\n\n {1,3}\S.*", prose)


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name


def test_the_diff_ends_in_the_recipe():
    (diff,) = blocks(ROOT / "README.md", "diff")
    recipe = (ROOT / "recipes" / "mnist_elastic.py").read_text()
    hunks = re.split(r"^@@.*\n", diff, flags=re.M)[1:]
    assert len(hunks) == 2
    for hunk in hunks:
        lines = hunk.splitlines()
        assert all(line[0] in " +-" for line in lines)
        after = "\n".join(line[1:] for line in lines if line[0] != "-") + "\n"
        assert after in recipe
    assert [line[0] for line in diff.splitlines()].count("+") == 3


def test_the_diff_starts_from_a_script_that_gluon_runs():
    (diff,) = blocks(ROOT / "README.md", "diff")
    before = [line[1:].strip() for line in diff.splitlines() if line[0] == "-"]
    assert before[0] == "from mxnet.gluon import Trainer"
    assert "Trainer(" in before[1] and "gluon.data.RandomSampler(" in before[2]
    assert callable(Trainer) and callable(data.RandomSampler)


def test_the_settings_page_is_in_step():
    page = (ROOT / "docs" / "settings.md").read_text()
    assert settings.table() in page, (
        'docs/settings.md: put in what python -c "from gluon_esgd import settings; '
        "print(settings.table(), end='')\" prints"
    )


def test_docs_speak_of_every_counter():
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert all(f"| `{name}` |" in page for name in Counters().as_dict())


def test_flags_in_the_docs_are_those_of_the_launcher():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    known = set(parser.format_help().split()) | {"--logdir", "--lr", "--data"}
    for page in (ROOT / "README.md", ROOT / "docs" / "algorithms.md"):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text()):
            assert flag in known, f"{page.name}: {flag}"


COMMANDS = re.findall(r"^gluon-esgd run .*$", (ROOT / "README.md").read_text(), re.M)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_in_the_readme_are_plannable(line):
    argv = shlex.split(line.split("#")[0])[2:]
    done = subprocess.run(
        [sys.executable, "-m", "gluon_esgd.launch", "--dry-run", *argv],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_protocol_page_has_every_word_with_its_fields():
    page = (ROOT / "docs" / "protocol.md").read_text()
    for known in (words._LEADER, words._STATION):
        for say, fields in known.items():
            rows = [line for line in page.splitlines() if f'"say": "{say}"' in line]
            assert rows, say
            assert all(f'"{field}"' in rows[0] for field in fields), (say, rows[0])
    orders = (ROOT / "gluon_esgd" / "center" / "orders.py").read_text()
    obeyed = re.findall(r'^            "(\w+)": self\._\w+,$', orders, re.MULTILINE)
    assert len(obeyed) > 10
    for do in obeyed:
        assert f'"do": "{do}"' in page, do
