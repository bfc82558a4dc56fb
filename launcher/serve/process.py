"""`bootseer serve` as a process of bootrun's, for --dashboard."""

from __future__ import annotations

import sys

from launcher.serve.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
