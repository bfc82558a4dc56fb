#!/bin/bash
# An exporter that collects from many jobs can come upon one series twice: two jobs with the same id, two long names cut
# to the same label. prometheus_client exposes a series that a collector gives twice without a word. What a reader then
# sees depends on the format that it asked for: the parser of the text format returns both values, that of OpenMetrics
# the first one and no error, although OpenMetrics forbids the repetition. So an exporter must tell its series apart
# itself, and test that. Seen with prometheus-client 0.26.0, CPython 3.11.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check prometheus-client==0.26.0 2>/dev/null
found=$("$folder/venv/bin/python" - <<'PY'
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition, parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

class Jobs:
    def collect(self):
        family = GaugeMetricFamily("job_ranks", "Ranks of a job.", labels=["job"])
        for job, ranks in (("none", 8), ("none", 64)):
            family.add_metric([job], ranks)
        yield family

registry = CollectorRegistry()
registry.register(Jobs())
def values(families):
    return [sample.value for family in families for sample in family.samples]

print("text:", values(read_text(generate_latest(registry).decode())))
print("openmetrics:", values(openmetrics.text_string_to_metric_families(exposition.generate_latest(registry).decode())))
PY
)
echo "$found"
[ "$found" = "text: [8.0, 64.0]
openmetrics: [8.0]" ] || { echo "changed"; exit 1; }
