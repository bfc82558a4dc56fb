"""All probes, by subject. Names are unique; docs/reference/torchrun.md lists them in this order."""

from tests.parity.model import Probe
from tests.parity.probes import commandline, environment, failures, inherited, logs, nodes, processes, signals

SUBJECTS: dict[str, tuple[Probe, ...]] = {
    "Environment of the ranks": environment.PROBES,
    "The process of a rank": processes.PROBES,
    "State of the launcher's starter": inherited.PROBES,
    "Command line": commandline.PROBES,
    "Logs and console": logs.PROBES,
    "Failures and restarts": failures.PROBES,
    "Signals and clean-up": signals.PROBES,
    "Several nodes": nodes.PROBES,
}
PROBES: tuple[Probe, ...] = tuple(probe for probes in SUBJECTS.values() for probe in probes)
BY_NAME = {probe.name: probe for probe in PROBES}
assert len(BY_NAME) == len(PROBES)
