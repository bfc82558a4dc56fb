"""The picture of starts: bars as long as what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.picture import LEFT, WIDTH, bars_of, draw, draw_documents
from bench.record import BenchError, figure

SVG = "{http://www.w3.org/2000/svg}"


def document(directory: Path, **seconds: list[float]) -> str:
    """The JSON of a bench with these figures."""
    figures = {f"start.{name}": figure("s", samples)._asdict() for name, samples in seconds.items()}
    path = directory / "start.json"
    machine = {"cores": 2, "cpu": "A & B"}
    path.write_text(json.dumps({"argv": ["start"], "machine": machine, "figures": figures}))
    return str(path)


def test_bars_are_as_long_as_their_times(tmp_path: Path) -> None:
    times = {"nodes3_plain_s": [60.0, 70.0, 80.0], "nodes3_cold_s": [7.0], "nodes1_first_s": [75.0, 77.0, 76.0]}
    path = document(tmp_path, **times, nodes3_plain_cpu_s=[500.0], nodes3_alone_env_s=[400.0])
    picture = draw_documents([path])
    root = ElementTree.fromstring(picture)
    bars = [(each.get("class"), float(each.get("width") or 0)) for each in root.iter(f"{SVG}rect")]
    assert [kind for kind, _ in bars] == ["peer", "ours", "ours"]
    plain, cold, first = (width for _, width in bars)
    assert plain / cold == pytest.approx(10, rel=0.01) and first / plain == pytest.approx(76 / 70, rel=0.01)
    ends = [float(each.get("x2") or 0) for each in root.iter(f"{SVG}line")]
    assert max(ends) <= WIDTH and min(ends) > LEFT
    texts = [each.text or "" for each in root.iter(f"{SVG}text")]
    assert any(re.search(r"\(1/10\.0\)", text) for text in texts)
    assert "python -m bench start (2 cores, A & B)" in texts


def test_what_is_slower_than_plain_is_said_to_be(tmp_path: Path) -> None:
    path = document(tmp_path, nodes1_plain_s=[10.0], nodes1_first_s=[11.0])
    assert "(1.10 of plain)" in draw_documents([path])


def test_values_that_do_not_follow_from_their_samples(tmp_path: Path) -> None:
    path = document(tmp_path, nodes1_plain_s=[10.0])
    stated = json.loads(Path(path).read_text())
    stated["figures"]["start.nodes1_plain_s"]["value"] = 9.0
    with pytest.raises(BenchError, match="nodes1_plain_s"):
        bars_of(stated, path)


def test_another_bench(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="bench start"):
        draw_documents([document(tmp_path, other_s=[1.0])])


def test_without_plain_nothing_is_compared() -> None:
    from bench.picture import Bar

    assert "(1/" not in draw({1: [Bar("cold", 3.0, 2.0, 4.0)]}, ())
