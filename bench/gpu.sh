#!/usr/bin/env bash
# All that Bootseer has to show on a GPU, in one command and less than nine minutes, without a network:
#
#     bench/gpu.sh wheels [VERSION]    before, with a network: what the machine lacks, for its Python (3.12), into out/wheels
#     bench/gpu.sh [FLAG...]           there, in a copy of this folder: a table, and gpu.json in $OUT, else in out/
#
# The machine has to have a Python (3.11 or newer; PYTHON names it) with torch and transformers. A section that fails,
# or takes too long, has a line that says so and ends none of the others. Without a GPU it does what can be done without.
# Flags are those of `python -m bench gpu`: --limit-s 520, --sections start ckpt, --size tiny.
set -uo pipefail
began=$(date +%s)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
case "${1:-}" in
    -h | --help)
        sed -n 's/^# \{0,1\}//p' bench/gpu.sh | tail -n +2
        exit 0
        ;;
    wheels)
        shift
        exec "${PYTHON:-python3}" bench/gpu_place.py wheels "$@"
        ;;
esac
for starter in "${PYTHON:-python3}" .venv/bin/python python3 python; do
    command -v "$starter" >/dev/null && break
done
python=$("$starter" bench/gpu_place.py make) || exit 1
export PYTHONUNBUFFERED=1
exec "$python" -m bench gpu --began "$began" --json "${OUT:-out}/gpu.json" "$@"
