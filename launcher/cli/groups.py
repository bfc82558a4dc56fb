"""The command groups of the library, and examples of `bootseer`, for its help, man pages and completions."""

from __future__ import annotations

from typing import NamedTuple

EXAMPLES = """\
examples:
  bootseer run --standalone --nproc-per-node 8 train.py     the same as: bootrun ...
  bootseer ckpt ls hdfs://namenode/run1/ckpt                show which checkpoint a job would load
  bootseer image build docker://python:3.11 /data/python    build an image whose files are fetched on demand
  bootseer env list --env-store hdfs://namenode/envs        list cached environments
  bootseer warm --image hdfs://namenode/images/train-v3     warm this node's caches before a job starts
  bootseer report /logs/run1 --html run1.html               show where startup time was spent, as text and as HTML
  bootseer replay --hosts hosts.txt --group-size 4 --run "srun ..."    find the faulty machine
  bootseer check --path /data --expect-gpus 8               check this node's health
  bootseer status --watch                                   show the jobs that run here: ranks, steps, restarts
  bootseer serve                                            show them as a page, with an API and metrics
  bootseer keys make                                        make a key that signs what this user publishes
  bootseer --version
"""


class Group(NamedTuple):
    """One command group of the library."""

    module: str  # its `main` takes arguments and returns the exit status
    extra: str  # of the bootseer package
    help: str


GROUPS = {
    "ckpt": Group("bootseer.cli.ckpt", "checkpoint", "Checkpoints: stripe, list, verify, prefetch, mount"),
    "image": Group(
        "bootseer.cli.image", "image", "Images as trees: build, push, pull, mount, run, prefetch, unpack"
    ),
    "env": Group("bootseer.cli.env", "env", "Environments: set up once, restored everywhere; compile caches"),
    "keys": Group("bootseer.cli.keys", "image", "Keys: which publishers this user trusts"),
    "replay": Group("bootseer.cli.replay", "report", "Find the faulty machine by replays on groups of machines"),
    "report": Group(
        "bootseer.cli.report", "report", "Show where startup time was spent; compare two starts, aggregate many"
    ),
    "check": Group("bootseer.cli.check", "check", "Check this node's health: disks, network, devices"),
}
