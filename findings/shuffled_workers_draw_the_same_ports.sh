#!/bin/bash
# Tests of servers often draw a free port from the module `random`, as two processes hardly draw the same one. Shuffled by
# pytest-random-order and run in parallel by pytest-xdist they do: each worker shuffles the same tests with the same
# seed, and the plugin seeds the module's own generator for it. So all workers go on with the same numbers, choose the
# same "random" ports, names and addresses at about the same time, and servers fail with "Address already in use".
# Seen with pytest 9.0.2, pytest-xdist 3.8.0, pytest-random-order 1.2.0, CPython 3.11. Without shuffling they differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    pytest==9.0.2 pytest-xdist==3.8.0 pytest-random-order==1.2.0 2>/dev/null
mkdir "$folder/tests"
for name in a b; do
    cat > "$folder/tests/test_$name.py" <<'PY'
import os, random

def test_port():
    with open(os.environ["PORTS"], "a") as file:
        file.write(f"{os.environ['PYTEST_XDIST_WORKER']} {random.randrange(10000, 32000)}\n")
PY
done
look() {
    : > "$folder/ports"
    (cd "$folder/tests" && PORTS="$folder/ports" "$folder/venv/bin/python" -m pytest -q -p no:cacheprovider -n 2 --dist loadfile "$@" >/dev/null)
    echo "$(cut -d' ' -f1 "$folder/ports" | sort -u | wc -l) workers, $(cut -d' ' -f2 "$folder/ports" | sort -u | wc -l) ports"
}
plain=$(look)
shuffled=$(look --random-order)
echo "in order: $plain; shuffled: $shuffled"
[ "$plain" = "2 workers, 2 ports" ] || { echo "changed: $plain"; exit 1; }
[ "$shuffled" = "2 workers, 1 ports" ] || { echo "changed: $shuffled"; exit 1; }
