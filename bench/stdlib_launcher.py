"""The yardstick of `bench launch`: ranks started by the standard library and nothing else, in five lines."""

import os, subprocess, sys  # noqa: E401, I001

sizes = {"WORLD_SIZE": sys.argv[1], "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
command = [sys.executable, "-u", *sys.argv[2:]]
ranks = [subprocess.Popen(command, env={**os.environ, **sizes, "RANK": str(r)}) for r in range(int(sys.argv[1]))]
sys.exit(max(abs(rank.wait()) for rank in ranks))
