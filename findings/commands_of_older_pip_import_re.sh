#!/bin/bash
# The command that pip writes for an entry point imports re, and so enum, functools and collections, before the program.
# Seen with pip 25.1: `import re` is in the command. Seen with pip 25.2: it is not.
# It costs each start of each command some milliseconds; a virtual environment keeps the commands of the pip that made them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv tools
written_by() {  # VERSION: how many lines of the command import re
    tools/bin/python -m pip install --quiet --disable-pip-version-check "pip==$1"
    tools/bin/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps shtab==1.7.1
    grep -c '^import re$' tools/bin/shtab || true
}
old=$(written_by 25.1) new=$(written_by 25.2)
echo "pip 25.1: $old, pip 25.2: $new lines that import re"
[ "$old $new" = "1 0" ]
