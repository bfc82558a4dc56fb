"""A C++ extension that is built when it is first used, as packages with kernels do: `compile_extension.py
DIRECTORY`.

Writes `rank-0.json` into FOLDER: how long until it could be called, and the file that was loaded.
"""

import json
import os
import sys
import time

import torch
from torch.utils import cpp_extension

SOURCE = """
torch::Tensor scaled(torch::Tensor values, double factor) { return values * factor + 1.0; }
"""


def main() -> None:
    began_s = time.monotonic()
    made = cpp_extension.load_inline("bench_scaled", cpp_sources=[SOURCE], functions=["scaled"])
    found = made.scaled(torch.full((4,), 2.0), 3.0)
    took_s = time.monotonic() - began_s
    if found.tolist() != [7.0] * 4:
        raise RuntimeError(f"the extension computes {found.tolist()}")
    about = os.stat(made.__file__)
    said = {"took_s": took_s, "file": made.__file__, "mtime_ns": about.st_mtime_ns}
    with open(os.path.join(sys.argv[1], "rank-0.json"), "w", encoding="ascii") as file:
        json.dump(said, file)


main()
