#!/bin/bash
# torchmetrics and Lightning each keep "the rank" as an attribute of a function of the same name, set when they are
# imported: torchmetrics by LOCAL_RANK, Lightning by RANK, then LOCAL_RANK. On the second node of a job the first rank is
# therefore rank zero for the one and not for the other: what torchmetrics says "on rank zero only" comes once a node,
# what Lightning says once a job. And both keep it for good: variables that are set after the import change nothing, so
# who imports them before the launcher's variables are there (a process that forks workers) has rank 0 everywhere.
# Valid input, and each library as its documents say; together they surprise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 torchmetrics==1.9.0 lightning==2.6.1 2>/dev/null
cat > "$folder/look.py" <<'PY'
import os
from torchmetrics.utilities.prints import rank_zero_only as of_metrics
from lightning.fabric.utilities.rank_zero import rank_zero_only as of_lightning
print(of_metrics.rank, of_lightning.rank, of_metrics is of_lightning)
os.environ.update(RANK="7", LOCAL_RANK="3")
print(of_metrics.rank, of_lightning.rank)
PY
python="$folder/venv/bin/python -W ignore"
second=$(RANK=4 LOCAL_RANK=0 $python "$folder/look.py" | tr '\n' ';')
none=$(env -u RANK -u LOCAL_RANK $python "$folder/look.py" | tr '\n' ';')
"$folder/venv/bin/pip" list 2>/dev/null | grep -E "^(torchmetrics|lightning) "
echo "first rank of the second node (RANK=4 LOCAL_RANK=0): torchmetrics, lightning, the same function; after the change: $second"
echo "imported without variables, which are set then: $none"
[ "$second" = "0 4 False;0 4;" ] || { echo "changed: $second"; exit 1; }
[ "$none" = "0 0 False;0 0;" ] || { echo "changed: $none"; exit 1; }
