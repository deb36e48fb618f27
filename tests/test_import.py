"""Importing the package is free; what it needs is imported when it is used."""

from __future__ import annotations

import subprocess
import sys

import gatekern as gk


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_loads_neither_torch_nor_triton():
    code = "import gatekern, sys; print([m for m in ('torch', 'transformers', 'triton', 'numpy') if m in sys.modules])"
    assert python(code) == "[]"


def test_the_engine_works_without_triton_and_without_the_extension():
    """As on a machine without a compiler: both imports fail, and scoring falls back to PyTorch."""
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('triton', 'flash_attn') or name == 'gatekern._native':
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import torch
from gatekern.ops import backends, label_scores, resolved_name
print(resolved_name('label_scores', 'auto', 'cpu'), [b.available for b in backends()])
label_scores(torch.ones(1, 4), torch.ones(8, 4), [[1], [2]])
"""
    assert python(code) == "torch [False, False, False, True]"


def test_public_names_resolve():
    for name in gk.__all__:
        assert getattr(gk, name) is not None
    assert set(gk.__all__) <= set(dir(gk))
