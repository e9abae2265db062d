"""Build the C++ swap once, ahead of any job: `python -m keepstep.training.swap.build`.

The result lies beside this file and is named after the torch version and the Python ABI, so
that several torch versions can be served from one tree and a mismatch is a missing file, never
a crash. A training job must never come here: it loads what it finds, or falls back to Python.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).resolve().parent


def library_name() -> str:
    """Name of the extension for the torch and the Python that run now, without suffix."""
    version = torch.__version__.split("+")[0]
    return f"_swap_torch{version}_cp{sys.version_info.major}{sys.version_info.minor}"


def library_path() -> Path:
    return HERE / f"{library_name()}.so"


def load() -> ModuleType | None:
    """The prebuilt extension, or None where none was built for this torch."""
    path = library_path()
    if not path.exists():
        return None
    loader = importlib.machinery.ExtensionFileLoader("_keepstep_swap", str(path))
    spec = importlib.util.spec_from_loader("_keepstep_swap", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def build() -> Path:
    """Compile swap.cpp against the installed torch and move the result into place at once."""
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(prefix="keepstep-swap-") as work:
        cpp_extension.load(
            name="_keepstep_swap",
            sources=[str(HERE / "swap.cpp")],
            extra_cflags=["-O2", "-g0", "-fvisibility=hidden"],
            build_directory=work,
            is_python_module=False,
        )
        # Same directory first: a rename is atomic, a half-written library would crash a job.
        partial = HERE / f".{library_name()}.partial"
        shutil.copy(Path(work) / "_keepstep_swap.so", partial)
        partial.replace(library_path())
    return library_path()


def main() -> None:
    began = time.monotonic()
    path = build()
    print(f"built {path} in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
