#!/bin/bash
# The usual way to end a Python process in good order is a handler of SIGTERM that raises SystemExit. Where a process forks
# (a launcher, a data loader, a service with helpers), the signal can be lost: `logging` and `threading` register Python
# functions that run in the parent after each os.fork, and CPython ignores what is raised in them. A signal that comes
# at that moment is handled there, so SystemExit is printed as "Exception ignored in", the process goes on, and whoever
# waits for its end waits for ever. Without the import of logging the same process ends.
# Seen with CPython 3.8, 3.10, 3.11, 3.12 (in logging's hook) and 3.13 (in threading's). Only the standard library is used.
# The signal is sent by a hook that was registered before those, which is the moment at which it may come by chance.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/look.py" <<'PY'
import functools, os, signal, sys

# killpg, as os.kill itself looks for signals before it returns; this process has a group of its own
os.register_at_fork(after_in_parent=functools.partial(os.killpg, os.getpid(), signal.SIGTERM))
if sys.argv[1] == "logging":
    import logging


def leave(*_):
    raise SystemExit(7)


signal.signal(signal.SIGTERM, leave)
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
print("goes on")
PY
look() {
    status=0
    printed=$(setsid -w python3 "$folder/look.py" "$1" 2>"$folder/errors") || status=$?
    echo "$printed, status $status"
}
python3 --version
with=$(look logging)
ignored=$(grep -o "^Exception ignored in: <function [A-Za-z_]*" "$folder/errors" || true)
without=$(look nothing)
echo "with logging: $with; $ignored"
echo "without: $without"
[ "$with" = "goes on, status 0" ] || { echo "changed: $with"; exit 1; }
[ -n "$ignored" ] || { echo "changed: nothing is ignored"; exit 1; }
[ "$without" = ", status 7" ] || { echo "changed: $without"; exit 1; }
