"""What the documentation quotes of the library, in messages and figures, is what there is."""

import ast
import math
import re

from gluon_esgd.launch.faults import CUDA_WHEELS
from gluon_esgd.optim import default_alpha, largest_alpha

from .pool import ROOT
from .test_docs import blocks

DOCS = ROOT / "docs"
FORMAT = re.compile(r"%[-.\d]*[a-z]")  # of logging


def _literals():
    """Every text in the sources that may be printed, with a NUL where a value is put in."""
    for path in (ROOT / "gluon_esgd").rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [n.value if isinstance(n, ast.Constant) else "\0" for n in node.values]
                yield "".join(parts)
            elif isinstance(getattr(node, "value", None), str) and id(node) not in docstrings:
                yield FORMAT.sub("\0", node.value)


def _pattern(line):
    """What a text is searched for; at both ends of a line anything may be left out."""
    inner = re.sub(r"^\.\.\. ?|\.\.\.$", "", line)
    return re.compile(r"(?:\.\.\.|.*\0.*)".join(map(re.escape, inner.split("..."))), re.S)


def test_quoted_messages_are_those_of_the_sources():
    known = list(_literals())
    boxes = blocks(DOCS / "troubleshooting.md", "")
    quoted = [line for box in boxes for line in box.splitlines()]
    assert len(quoted) > 20
    assert not [line for line in quoted if not any(map(_pattern(line).search, known))]


def test_the_table_of_alpha_is_computed():
    rows = re.findall(r"^\| (\d+) \| (0\.\d{3}) \| ([01]\.\d{3}) \| ?([\d.]*) \|$",
                      (DOCS / "choosing.md").read_text(), re.M)  # fmt: skip
    assert len(rows) == 6
    for clients, default, largest, half in rows:
        p = int(clients)
        alpha = default_alpha(p)
        halved = f"{math.log(0.5) / math.log(1 - alpha):.1f}" if p > 1 else ""
        wanted = math.floor(1000 * alpha + 0.5) / 1000  # as at school
        assert (float(default), largest, half) == (wanted, f"{largest_alpha(p):.3f}", halved)


def test_the_launcher_knows_the_wheels_of_the_gpu_page():
    named = set(re.findall(r"`mxnet(-cu\d+)", (DOCS / "gpu.md").read_text()))
    assert len(named) > 3
    assert named <= set(CUDA_WHEELS)
