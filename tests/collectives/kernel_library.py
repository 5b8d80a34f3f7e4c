"""``kernels.cu`` compiled as C++ for the CPU, as numpy and ctypes see it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional

import gluon_esgd.collectives

SOURCE = Path(gluon_esgd.collectives.__file__).with_name("kernels.cu")
OPTIONS = ("-x", "c++", "-std=c++11", "-O1", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror")


def compiler() -> Optional[str]:
    """The C++ compiler of this machine."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def build(source: Path, library: Path) -> None:
    """Compile `source` to a shared library; its pragmas are nvcc's."""
    found = compiler()
    assert found is not None
    flags = [*OPTIONS, "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    done = subprocess.run(
        [found, *flags, str(source), "-o", str(library)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@lru_cache(maxsize=None)
def library() -> Any:
    """The library, compiled anew for this process."""
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        path = Path(folder) / "kernels.so"
        build(SOURCE, path)
        return ctypes.CDLL(str(path))


def start(kernel: str, grid: int, block: int, arguments: Any) -> None:
    """Run `kernel` with the arguments that CuPy would get."""
    sources, n, targets, m, length, divisor = arguments
    getattr(library(), kernel)(
        ctypes.c_int(grid),
        ctypes.c_int(block),
        ctypes.c_void_p(sources.ctypes.data),
        ctypes.c_int(int(n)),
        ctypes.c_void_p(targets.ctypes.data),
        ctypes.c_int(int(m)),
        ctypes.c_longlong(int(length)),
        ctypes.c_void_p(divisor.ctypes.data),
    )


def misaligned() -> int:
    """How many loads and stores of 16 bytes a GPU would not have made."""
    return int(ctypes.c_longlong.in_dll(library(), "misaligned").value)
