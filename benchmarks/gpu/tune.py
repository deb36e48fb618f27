"""Launch configurations of the attention kernel, tried on this GPU: ``python benchmarks/gpu/tune.py [--write]``.

Prints the fastest rows for `_PREFIX_ATTENTION` in gatekern/ops/triton/configs.py; ``--write`` puts them in that file.
About a minute for a dtype and head dimension, most of it compiling. Run the tests of the kernel and
`benchmarks/gpu/run.py` after it: other tiles are other bits.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # run as a file, its own folder is there

from benchmarks.gpu.attention import Heads, Problem, Workload  # noqa: E402
from benchmarks.gpu.parity import AttentionCase, attention  # noqa: E402
from benchmarks.gpu.recorder import Setup  # noqa: E402
from benchmarks.gpu.timing import compare  # noqa: E402
from gatekern.ops import dispatch, prefix_attention  # noqa: E402
from gatekern.ops.triton.configs import _LARGE_SHARED_MEMORY, AttentionConfig  # noqa: E402

CONFIGS = ROOT / "gatekern/ops/triton/configs.py"
CHOICE = "gatekern.ops.triton.prefix_attention.prefix_attention_config"
WORKLOAD = Workload(16, 1000, 20, 60)
#: By element size: rows, slots, warps, stages.
CANDIDATES = {
    2: list(product((64, 128), (32, 64, 128), (4, 8), (2, 3))),
    4: list(product((16, 32, 64), (16, 32), (4, 8), (2,))),
}
Key = tuple[int, int, bool]  # element size, head dimension, whether shared memory is large


def with_rows(text: str, rows: dict[Key, AttentionConfig]) -> str:
    """The text of configs.py with these rows of `_PREFIX_ATTENTION` instead of its own; each has to be there."""
    for key, config in rows.items():
        pattern = rf"^    {re.escape(repr(key))}: AttentionConfig\(.*\),$"
        text, count = re.subn(pattern, row_text(key, config), text, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"the configurations of attention have {count} rows {key}")
    return text


def row_text(key: Key, config: AttentionConfig) -> str:
    return f"    {key!r}: {config!r},"


def tune(dtype: torch.dtype, dim: int, setup: Setup) -> AttentionConfig | None:
    """The fastest of the candidates that pass parity, with all options of a layer too; None where none does."""
    plain = AttentionCase(dtype, 32, 8, dim)
    everything = replace(plain, kind="trie", window=100, softcap=5.0, sinks=True)
    problem = Problem(WORKLOAD, Heads("", 32, 8, dim), setup, dtype)
    operands = (problem.query, problem.key, problem.value, problem.layout)
    times: dict[AttentionConfig, float] = {}
    for config in (AttentionConfig(*sizes) for sizes in CANDIDATES[dtype.itemsize]):
        verdict = verdict_of(config, plain, setup)
        if verdict == "pass":
            with patch(CHOICE, lambda *_, config=config: config):
                form = {"": lambda: prefix_attention(*operands, scale=problem.scale, backend="triton")}
                times[config] = compare(form, setup, 0.1)[""].get("median_us", math.inf)
            verdict = f"{times[config]:.0f} us"
        print(f"{dtype} {dim} {config}: {verdict}", flush=True)
    best = (config for config in sorted(times, key=times.__getitem__) if times[config] < math.inf)
    return next((config for config in best if verdict_of(config, everything, setup) == "pass"), None)


def verdict_of(config: AttentionConfig, case: AttentionCase, setup: Setup) -> str:
    """Of parity with `config`: "pass", "fail", or in one line why it did not run."""
    dispatch._broken.clear()  # one that could not be built says nothing of the next
    with patch(CHOICE, lambda *_: config):
        row = next(iter(attention(case, setup, ["triton"])))
    return str(row.get("traceback", row["verdict"])).strip().splitlines()[-1]


def main() -> int:
    """Tune, print the rows and, where asked to, write them."""
    parser = argparse.ArgumentParser(description="Launch configurations of the attention kernel, tried on this GPU.")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256], choices=[64, 128, 256])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float32"])
    parser.add_argument("--write", action="store_true", help=f"replace the rows in {CONFIGS.relative_to(ROOT)}")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("tuning needs a GPU: the kernel is compiled for it and timed on it", file=sys.stderr)
        return 1
    setup = Setup.of("cuda", "full")
    large = torch.cuda.get_device_capability() in _LARGE_SHARED_MEMORY
    rows: dict[Key, AttentionConfig] = {}
    for dtype, dim in product((getattr(torch, name) for name in options.dtypes), options.dims):
        best = tune(dtype, dim, setup)
        rows |= {(dtype.itemsize, dim, large): best} if best else {}
    print("\n".join(row_text(key, config) for key, config in rows.items()))
    if options.write:
        CONFIGS.write_text(with_rows(CONFIGS.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return 0 if len(rows) == len(options.dtypes) * len(options.dims) else 1


if __name__ == "__main__":
    sys.exit(main())
