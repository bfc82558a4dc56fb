"""One section of `bench gpu`: `python -m bench.gpu_section MODULE DEVICE SIZE ROUNDS DIRECTORY TOLD LIMIT_S`.

Whatever it measures is a line of JSON in the file TOLD at once: a section that is ended has not measured in vain.
A section is a module with `measure(section)`.
"""

from __future__ import annotations

import json
import os
import sys
import time

from bench.gpu import measure_of
from bench.processes import become_subreaper


class Section:
    """What a section knows, and whom it tells."""

    def __init__(self, device: str, size: str, rounds: int, folder: str, told: str, limit_s: float) -> None:
        self.device = device  # cuda or cpu
        self.size = size  # one of bench.gpu.SIZES
        self.rounds = rounds
        self.folder = folder  # of its own, empty
        self._reported = told
        self._end_s = time.monotonic() + limit_s

    @property
    def has_gpu(self) -> bool:
        return self.device == "cuda"

    def left_s(self) -> float:
        """Until it is ended."""
        return self._end_s - time.monotonic()

    def sample(self, name: str, unit: str, value: float) -> None:
        """A sample of a figure."""
        self._tell(name=name, unit=unit, value=value)

    def say(self, text: str) -> None:
        """A line for people."""
        print(text, flush=True)
        self._tell(say=text)

    def _tell(self, **fields: object) -> None:
        with open(self._reported, "a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


def main(argv: list[str]) -> int:
    """Runs it; returns the exit status."""
    module, device, size, rounds, directory, told, limit_s = argv
    become_subreaper()
    os.environ["TMPDIR"] = directory
    try:
        measure_of(module)(Section(device, size, int(rounds), directory, told, float(limit_s)))
    except Exception as error:
        import traceback

        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
