"""What is shown and counted of kills."""

from __future__ import annotations

from bench.kill_restart import table
from bench.kill_restart_job import Came
from bench.kill_restart_plan import ENDED, UNCLEAR, WENT_ON, draw


def test_a_row_for_each_that_was_killed() -> None:
    verdicts = (WENT_ON, ENDED, UNCLEAR)
    kills = draw(1, 6, ["agent0", "fork_server"])
    came = [
        Came(kill, verdicts[number // 2], "", 0.5 + number, ("/dev/shm/x",) if number == 5 else (), "")
        for number, kill in enumerate(kills)
    ]
    head, agent, fork_server = [line.split("  ") for line in table(came)]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in (head, agent, fork_server)]
    assert cells[1] == ["agent0", "3", "1", "1", "1", "0", "4.5"]
    assert cells[2] == ["fork_server", "3", "1", "1", "1", "1", "5.5"]
    assert len(cells[0]) == len(cells[1])
