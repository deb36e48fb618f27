"""Every check that needs a GPU, in one command: ``python benchmarks/gpu/run.py``, from the repository root.

Under six minutes on a data-centre GPU, under one on a CPU (tiny sizes: it then only shows that the script is alive).
Writes ``results.json`` and ``results.md``. The exit code is 1 where a section failed, a result was less exact than
plain PyTorch allows, or a promise about bits was broken.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # run as a file, its own folder is there

    from benchmarks.gpu.suite import main

    sys.exit(main())
