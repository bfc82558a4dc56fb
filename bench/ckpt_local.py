"""`bench ckpt --local`: a checkpoint on a disk, cold and warm, through each loader, and through a node's arena.

A round: fio; each loader once on cold files, the arena among them; fio again; each loader once on warm files.
The disk's rate of a round is the mean of the best before and the best after. Alone means a fresh process, from
after its imports until every page of every tensor was touched. Arena means that a keeper made memory ready
beforehand (that cost is a figure of its own) and then loads the file; what a rank needs from there to its
tensors is one more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from bench import ckpt_fio, ckpt_pages
from bench.ckpt_keeper import Fill, fill_and_load
from bench.ckpt_model import FILES
from bench.ckpt_run import Load, Sums, load, make_model, order
from bench.record import Figures, note

# Loader, and what it loads.
LOADERS = {
    "bootseer": "safetensors",
    "safetensors": "safetensors",
    "runai": "safetensors",
    "fastsafetensors": "safetensors",
    "bootseer_pt": "pt",
    "torch_load": "pt",
    "torch_mmap": "pt",
    "bootseer_dcp": "dcp",
    "torch_dcp": "dcp",
}
ARENA = "arena"
MB = 1e6


class Round(NamedTuple):
    """What was measured in one round."""

    fio: list[dict[str, float]]  # bytes per second by engine: before, and after
    cold: dict[str, Load]
    warm: dict[str, Load]
    fill: Fill

    @property
    def disk(self) -> float:
        """Bytes per second that the disk gave."""
        return sum(max(rates.values()) for rates in self.fio) / len(self.fio)


def measure(directory: str, size: str, rounds: int) -> Figures:
    """All rounds, as figures."""
    ckpt_fio.check_fio()
    paths = make_model(directory, size, FILES)
    sums = Sums()
    for name, kind in LOADERS.items():  # before hours are spent: does each of them load, and the same?
        sums.check(name, load(name, paths[kind]).digests)
    note("all loaders give the same tensors")
    taken = [take_round(number, paths, sums, os.path.join(directory, "service")) for number in range(rounds)]
    return to_figures(taken)


def take_round(number: int, paths: dict[str, str], sums: Sums, directory: str) -> Round:
    """One round; the loaders' order depends on its number."""
    fio = [ckpt_fio.read_rates(paths["safetensors"])]
    cold: dict[str, Load] = {}
    fill: Fill | None = None
    for name in order([*LOADERS, ARENA], number):
        ckpt_pages.make_cold(paths.values())
        if name == ARENA:
            fill = fill_and_load(
                paths["safetensors"], directory, lambda: ckpt_pages.make_cold([paths["safetensors"]])
            )
            sums.check(ARENA, fill.load.digests)
        else:
            cold[name] = load(name, paths[LOADERS[name]])
            sums.check(name, cold[name].digests)
    fio.append(ckpt_fio.read_rates(paths["safetensors"]))
    warm: dict[str, Load] = {}
    for name in order(list(LOADERS), number):
        ckpt_pages.make_warm([paths[LOADERS[name]]])
        warm[name] = load(name, paths[LOADERS[name]])
        sums.check(name, warm[name].digests)
    assert fill is not None
    made = Round(fio, cold, warm, fill)
    tell(number, made)
    return made


def tell(number: int, made: Round) -> None:
    """The round in lines for people."""
    for when, rates in zip(("before", "after"), made.fio, strict=True):
        note(f"round {number + 1}: fio {when}: " + ", ".join(f"{e} {r / MB:.0f} MB/s" for e, r in rates.items()))
    for state, loads in (("cold", made.cold), ("warm", made.warm)):
        told = ", ".join(f"{name} {each.rate / MB:.0f}" for name, each in loads.items())
        note(f"round {number + 1}: {state}, MB/s: {told}")
    note(
        f"round {number + 1}: arena: made ready in {made.fill.ready_s:.2f} s, loaded at "
        f"{made.fill.rate / MB:.0f} MB/s with {made.fill.cpu_s_per_gb:.3f} CPU s/GB, "
        f"its rank had the tensors after {made.fill.load.seconds:.2f} s more"
    )


def to_figures(taken: Sequence[Round]) -> Figures:
    """Shares and ratios first, then what they are made of."""
    figures = Figures()
    disk = [each.disk for each in taken]

    def seconds(name: str, warm: bool = False) -> list[float]:
        return [(each.warm if warm else each.cold)[name].seconds for each in taken]

    figures.add_ratio("ckpt.disk_share", [each.cold["bootseer"].rate for each in taken], disk)
    for name in ("safetensors", "dcp", "runai", "fastsafetensors", "torch_load", "torch_mmap"):
        figures.add_ratio(f"ckpt.vs_{name}", seconds("torch_dcp" if name == "dcp" else name), seconds("bootseer"))
    figures.add_ratio("ckpt.pt_vs_torch_load", seconds("torch_load"), seconds("bootseer_pt"))
    figures.add_ratio("ckpt.dcp_reader_vs_dcp", seconds("torch_dcp"), seconds("bootseer_dcp"))
    figures.add_ratio("ckpt.arena_disk_share", [each.fill.rate for each in taken], disk)
    figures.add("ckpt.arena_cpu_s_per_gb", "CPU s/GB", [each.fill.cpu_s_per_gb for each in taken])
    figures.add_ratio("ckpt.warm_vs_safetensors", seconds("safetensors", True), seconds("bootseer", True))
    figures.add("ckpt.arena_ready_s", "s", [each.fill.ready_s for each in taken])
    figures.add("ckpt.arena_ready_cpu_s_per_gb", "CPU s/GB", [each.fill.ready_cpu_s_per_gb for each in taken])
    figures.add("ckpt.arena_mb_s", "MB/s", [each.fill.rate / MB for each in taken])
    figures.add("ckpt.arena_rank_s", "s", [each.fill.load.seconds for each in taken])
    figures.add("ckpt.arena_rank_cpu_s", "CPU s", [each.fill.load.cpu_s for each in taken])
    for state in ("cold", "warm"):
        for name in LOADERS:
            loads = [(each.warm if state == "warm" else each.cold)[name] for each in taken]
            figures.add(f"ckpt.{state}_{name}_mb_s", "MB/s", [each.rate / MB for each in loads])
            figures.add(f"ckpt.{state}_{name}_cpu_s_per_gb", "CPU s/GB", [each.cpu_s_per_gb for each in loads])
    figures.add("ckpt.disk_mb_s", "MB/s", [rate / MB for rate in disk])
    for engine in ckpt_fio.ENGINES:
        rates = [rates[engine] / MB for each in taken for rates in each.fio if engine in rates]
        if rates:  # two samples a round
            figures.add(f"ckpt.fio_{engine}_mb_s", "MB/s", rates)
    return figures
