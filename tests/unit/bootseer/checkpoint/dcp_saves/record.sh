#!/bin/bash
# record.sh VERSION ...: has each version of torch make its save in this folder, then load all that are here by our
# reader, each in a virtual environment of its own that is removed again. Downloads a few GB a version.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../../../../.." && pwd)
status=0
for version in "$@"; do
    venv=$(mktemp -d)
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q "torch==$version" numpy msgspec crc32c fsspec
    rm -rf "${here:?}/$version"
    "$venv/bin/python" "$here/program.py" save "$here/$version"
    PYTHONPATH=$top "$venv/bin/python" "$here/program.py" load "$here"/2.* || status=1
    rm -rf "$venv"
done
exit $status
