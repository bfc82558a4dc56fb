"""Jobs as a Parquet file for fleets: one row for each job, attempt, node, rank and stage. Needs pyarrow.

Rows of nodes have no rank. `seconds` is the measured time. `lost_s` is the time that the accounting attributes to
the stage alone. Either may be null. pyarrow is loaded when the file is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from bootseer.errors import ConfigError
from bootseer.report.analysis import Analysis, Job
from bootseer.report.pieces import LABELS, node_times

COLUMNS = (
    "run_id", "source", "attempt", "first_event", "ranks", "nodes", "node", "rank", "stage", "seconds", "lost_s",
    "first_step_s",
)  # fmt: skip

Row = tuple[str, str, int, int, int, int, str, int | None, str, float | None, float | None, float | None]


class ParquetRows:
    """A Parquet file, written under a temporary name and renamed at the end; one row group a job."""

    def __init__(self, path: str) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise ConfigError("--parquet needs pyarrow: pip install 'bootseer[fleet]'") from error
        self._arrow = pyarrow
        self._path = path
        self._beside = f"{path}.{os.getpid()}.tmp"
        types = {
            **dict.fromkeys(("attempt", "rank", "ranks", "nodes"), pyarrow.int32()),
            **dict.fromkeys(("seconds", "lost_s", "first_step_s"), pyarrow.float64()),
            "first_event": pyarrow.timestamp("us", tz="UTC"),
        }
        self._schema = pyarrow.schema([(name, types.get(name, pyarrow.string())) for name in COLUMNS])
        try:
            self._writer: Any = pyarrow.parquet.ParquetWriter(self._beside, self._schema, compression="zstd")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
        self.rows = 0

    def add(self, job: Job, source: str) -> None:
        rows = [row for number in sorted(job.attempts) for row in rows_of(job.attempts[number], source)]
        columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True)) if rows else {}
        if columns:
            self._writer.write_table(
                self._arrow.table({k: list(v) for k, v in columns.items()}, schema=self._schema)
            )
            self.rows += len(rows)

    def __enter__(self) -> ParquetRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        if kind is None:
            os.replace(self._beside, self._path)
        else:
            os.unlink(self._beside)


def rows_of(found: Analysis, source: str) -> Iterator[Row]:
    start = found.start
    head = (start.run_id, source, start.attempt, start.wall_ns // 1000, len(start.ranks), len(start.nodes))
    for node in start.nodes:
        for stage, seconds in node_times(node).items():
            yield (*head, node.name, None, stage, seconds, None, None)
    for rank in start.ranks:
        step_s = None if rank.first_step_ns is None else rank.first_step_ns / 1e9
        times = found.times_of(rank)
        lost: dict[str, float] = {}
        if rank.first_step_ns is not None:
            for label, begin_ns, end_ns in found.pieces[rank]:
                lost[label] = lost.get(label, 0.0) + (end_ns - begin_ns) / 1e9
        for label in LABELS:
            if label in times or label in lost:
                yield (*head, rank.node.name, rank.rank, label, times.get(label), lost.get(label), step_s)
