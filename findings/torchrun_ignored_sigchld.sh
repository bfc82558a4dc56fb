#!/bin/bash
# torchrun reports success for a job whose ranks failed, where its starter ignores SIGCHLD (as some supervisors, cron
# wrappers and first processes of containers do): the kernel then keeps no exit status, and subprocess takes 0 for it.
# Seen with torch 2.13.0 on Linux: every rank exits with 3, torchrun's status is 0, and nothing says that a rank failed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" -c 'import torch; print("torch", torch.__version__)'
echo 'import sys; sys.exit(3)' >"$folder/rank.py"
run() {  # HOW: run torchrun with SIGCHLD as it is by default, or ignored; prints its status
    "$folder/venv/bin/python" - "$1" "$folder" <<'PY'
import os, signal, subprocess, sys
how, folder = sys.argv[1:]
before = signal.SIG_IGN if how == "ignored" else signal.SIG_DFL
argv = [f"{folder}/venv/bin/torchrun", "--standalone", "--nproc-per-node", "2", f"{folder}/rank.py"]
pid = os.fork()
if pid == 0:
    signal.signal(signal.SIGCHLD, before)
    os.dup2(os.open(f"{folder}/{how}", os.O_WRONLY | os.O_CREAT), 2)
    os.execv(argv[0], argv)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
PY
}
plain=$(run default) ignored=$(run ignored)
echo "SIGCHLD by default: status $plain; ignored: status $ignored, $(grep -c 'exitcode' "$folder/ignored" || true) lines name an exit code"
[ "$plain" = 1 ] && [ "$ignored" = 0 ]
