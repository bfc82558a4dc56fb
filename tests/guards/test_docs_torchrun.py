"""docs/reference/torchrun.md is what the flags and the probes make of it, and they leave no flag out."""

from __future__ import annotations

from pathlib import Path

from launcher.cli.flags import FLAGS
from tests.integration import test_warts
from tests.parity import docs
from tests.parity.probes import PROBES


def test_docs_torchrun_is_up_to_date() -> None:
    assert Path(docs.PATH).read_text(encoding="utf-8") == docs.generate(), "run `python -m tests.parity.docs`"


def test_every_flag_of_torchrun_has_a_probe() -> None:
    shown = {name for probe in PROBES for name in probe.flags}
    assert shown == {flag.names[-1] for flag in FLAGS if not flag.ours}


def test_every_wart_has_a_test() -> None:
    for number in docs.WARTS:
        assert any(name.startswith(f"test_w{number:02}_") for name in vars(test_warts)), f"W{number}"
