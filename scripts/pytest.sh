#!/bin/bash
# pytest.sh PYTHON WORKERS [ARGUMENT...]: runs the tests, so many at a time. What they wrote is kept when they fail.
# The name of their folder is short because paths of sockets have at most 107 bytes. All is over after an hour, or
# PYTEST_LIMIT_S.
set -uo pipefail
python=$1 workers=$2
shift 2
folder=$(mktemp -d /tmp/bt-XXXXXX) || exit 1
timeout --foreground --kill-after=30 "${PYTEST_LIMIT_S:-3600}" \
    "$python" -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder --basetemp="$folder" "$@"
status=$?
if [ $status = 0 ]; then rm -rf "$folder"; else echo "what the tests wrote is in $folder" >&2; fi
exit $status
