"""One start of `bench start`: nodes in network namespaces, a store behind them, launch to first step on all.

    plain, tuned      without Bootseer (start_node.py), from nothing
    first             bootrun, nothing known anywhere: set-up runs, everything is recorded and published
    cold              the store has what an earlier job left; these nodes have nothing
    warmed            as cold, on nodes that `bootseer warm` has prepared; nothing in memory
    second            the same nodes once more, nothing in memory
    restart           on nodes that have everything a rank is killed: from its death to the next first step
    torchrun_restart  the same with torchrun, on nodes that `plain` has set up; with the variable without which its
                      ranks find the last attempt's addresses, and again where it does not come to an end
    alone_...         as cold, but everything beside this one technique is done as `plain` does it; `env` needs an
                      image of which it is known what is in it, so it comes with ours

A node has folders of its own at paths that all have in common, a link of RATE_BYTES_PER_S (tc tbf) in both
directions; STORE_BYTES_PER_S go out of the store to all together, and each request is LATENCY_S late.
"""

from __future__ import annotations

import contextlib
import glob
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bench import ckpt_pages, netns
from bench.ckpt_run import BOOTSEER, BOUND, ROOT, make_environ, programs, python
from bench.ckpt_server import SERVED, fetch
from bench.env_packages import clean_environ
from bench.image_tree import regular_files
from bench.image_ways import NAME
from bench.peers import cpu_s, inside
from bench.record import BenchError
from bench.start_limits import PARTS
from bench.start_made import INDEX, LOCK, PYTHON, Made
from bench.start_node import WORK

RATE_BYTES_PER_S = 200e6
STORE_BYTES_PER_S = 400e6
PORT, RENDEZVOUS_PORT = 7000, 29400
STEPS, DIE_AT_STEP = 100, 20
MAX_STEP_S = 0.05
LOOK_S = 0.02
MEMORY_BYTES = 8 << 30
MADV_POPULATE_WRITE = 23
MAX_RESTARTS = 9  # torchrun's agents count each other's failures as well
DEADLINE_S = 900.0
TECHNIQUES = ("image", "env", "checkpoint", "ranks")
ALONE = tuple(f"alone_{technique}" for technique in TECHNIQUES)
WAYS = ("plain", "tuned", "first", "cold", "warmed", "second", "restart", "torchrun_restart", *ALONE)
DROP = "/proc/sys/vm/drop_caches"
_ENTER = 'mount --bind "$0" "$1" && mount --bind "$3" /etc/hosts && cd "$2" && shift 3 && {}'
_RUN = 'exec "$@"'
# What publishes goes on after the job's end; the node's first process has to outlive it.
_RUN_AND_PUBLISH = '"$@"; done=$?; while pgrep -f "[b]ootseer.env.service.main"; do sleep 0.1; done; exit $done'

Stages = list[tuple[str, int, int]]  # name, begin and end by the monotonic clock


class Sample(NamedTuple):
    """One start."""

    seconds: float  # from the launch, or a rank's death, to the first step on the last node
    nodes: list[dict[str, float]]  # of each: seconds until a moment of its script
    stages: list[list[tuple[str, float, float]]]  # of each: name, begin and end, from the launch
    sent_bytes: int
    node_bytes: list[int]  # that each has received
    requests: int
    cpu_s: float  # of all processors, until the first step on the last node
    step_s: float
    losses: list[float]
    tries: int = 1  # until it came to an end


class Worked:
    """What all processors of this machine have worked by when, looked at again and again meanwhile."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, float]] = []
        self._is_over = threading.Event()
        self._looking = threading.Thread(target=self._look)

    def __enter__(self) -> Worked:
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._looking.join()

    def _look(self) -> None:
        while True:
            self._seen.append((time.monotonic_ns(), cpu_s()))
            if self._is_over.wait(LOOK_S):
                return

    def between(self, began_ns: int, ended_ns: int) -> float:
        """CPU seconds, to two looks."""
        before = max((seen for seen in self._seen if seen[0] <= began_ns), default=self._seen[0])
        after = min((seen for seen in self._seen if seen[0] >= ended_ns), default=self._seen[-1])
        return after[1] - before[1]


class Bench:
    """Nodes, their store, and the folders of both."""

    def __init__(self, made: Made, hosts: netns.Hosts, count: int, folder: str) -> None:
        self._made, self._directory = made, folder
        self.nodes = hosts.hosts[:count]
        self._store = hosts.hosts[count]
        self._place = os.path.join(folder, "node")  # where each node sees a folder of its own
        os.makedirs(self._place)
        self._served = os.path.join(folder, "served")
        self._known = os.path.join(folder, "known")  # what the store has after a first job
        self._names = os.path.join(folder, "hosts")  # each node's /etc/hosts
        with open(self._names, "w", encoding="ascii") as file:
            file.writelines(f"{host.address} {host.name}\n" for host in hosts.hosts)
            file.write("127.0.0.1 localhost\n")
        self._secret = os.path.join(folder, "secret")
        with open(self._secret, "w", encoding="ascii") as file:
            file.write(os.urandom(32).hex())
        os.chmod(self._secret, 0o600)

    # ---- the store -------------------------------------------------------------------------------------------

    def set_store(self, *, known: bool) -> None:
        """The store's folder: with what a first job has left, or without."""
        shutil.rmtree(self._served, ignore_errors=True)
        subprocess.run(["cp", "-al", self._known if known else self._made.data, self._served], check=True)
        os.makedirs(os.path.join(self._served, "env"), exist_ok=True)

    def keep_store(self) -> None:
        """What the store has now is what later jobs find: also the recording, once the first node gives it."""
        own = self._own(self.nodes[0])
        kept = {"BOOTSEER_CACHE": os.path.join(own, "cache"), "BOOTSEER_KEYS": os.path.join(own, "keys")}
        words = [BOOTSEER, "image", "hot", "merge", os.path.join(self._served, "image", "tree"), "--name", NAME]
        subprocess.run(words, env=make_environ(**kept), check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        shutil.rmtree(self._known, ignore_errors=True)
        subprocess.run(["cp", "-al", self._served, self._known], check=True)

    @contextlib.contextmanager
    def _store_runs(self) -> Iterator[str]:
        argv = python("bench.s3_store", self._served, self._store.address, str(PORT), str(STORE_BYTES_PER_S))
        with programs([(inside(self._store, argv), make_environ())]) as (server,):
            server.listen(lambda line: line == "ready\n", 30.0)
            yield f"http://{self._store.address}:{PORT}"

    # ---- one start -------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Nodes that have nothing."""
        for host in self.nodes:
            shutil.rmtree(self._own(host), ignore_errors=True)

    def run(self, way: str, features: Sequence[str] = (), *, publishes: bool = False) -> Sample:
        """One start.

        Args: features: further flags of bootrun; publishes: what the first node has to publish is waited for.
        Raises: BenchError.
        """
        script = _RUN_AND_PUBLISH if publishes else _RUN
        self._prepare(way)
        kills = way.endswith("restart")
        with self._store_runs() as url:
            if way == "warmed":
                self._run_on_all([self._start_warming(host, url) for host in self.nodes])
            self._forget_memory()
            before, received = json.loads(fetch(f"{url}{SERVED}")), self._received()
            with Worked() as worked:
                began_ns = time.monotonic_ns()
                self._run_on_all([self._start(way, host, url, script, features) for host in self.nodes])
            after = json.loads(fetch(f"{url}{SERVED}"))
            node_bytes = [now - then for now, then in zip(self._received(), received, strict=True)]
        return self._sample(way, began_ns, kills, after[0] - before[0], after[1] - before[1], node_bytes, worked)

    def keep_logs(self, directory: str) -> None:
        """What all nodes have logged of the last start, for a report."""
        shutil.rmtree(directory, ignore_errors=True)
        for host in self.nodes:
            shutil.copytree(os.path.join(self._own(host), "work", "logs"), os.path.join(directory, host.name))

    def _run_on_all(self, running: Sequence[subprocess.Popen[bytes]]) -> None:
        try:
            self._wait(running)
        finally:
            for host in self.nodes:
                host.kill()

    def _received(self) -> list[int]:
        """Bytes, of each node: what the bridge's end of its link has sent."""
        found = []
        for host in self.nodes:
            with open(f"/sys/class/net/{host.link}/statistics/tx_bytes", encoding="ascii") as file:
                found.append(int(file.read()))
        return found

    def _prepare(self, way: str) -> None:
        for host in self.nodes:
            own = self._own(host)
            work = os.path.join(own, "work")
            for name in ("work", "run", "tmp", "home"):
                os.makedirs(os.path.join(own, name), mode=0o700, exist_ok=True)
            for each in ("out", "logs"):
                shutil.rmtree(os.path.join(work, each), ignore_errors=True)
                os.makedirs(os.path.join(work, each))
            shutil.copy2(os.path.join(ROOT, "bench", "start_train.py"), work)
            shutil.copy2(self._made.lock, work)
            if not os.path.isdir(os.path.join(own, "keys")):
                shutil.copytree(self._made.keys, os.path.join(own, "keys"))
            if way == "tuned" and not os.path.isdir(os.path.join(work, "uv-cache")):
                self._warm_uv(os.path.join(work, "uv-cache"))

    def _warm_uv(self, cache: str) -> None:
        """As another job has left it on this node."""
        target = os.path.join(self._directory, "uv-warming")
        environ = clean_environ(UV_CACHE_DIR=cache, UV_LINK_MODE="copy")
        words = [os.path.join(self._made.root, "usr/local/bin/uv"), "pip", "install", "-q", "--target", target]
        words += ["--python", os.path.realpath(sys.executable), "--no-index", "--find-links"]
        words += [os.path.join(self._made.data, "wheels"), "-r", self._made.lock]
        subprocess.run(words, env=environ, check=True, stdin=subprocess.DEVNULL)
        shutil.rmtree(target)

    def _forget_memory(self) -> None:
        os.sync()
        with open(DROP, "w", encoding="ascii") as file:
            file.write("3")
        touch_memory()
        # The store has it in memory, and our own code and interpreter are the machine's, not the job's.
        directories = (self._served, os.path.join(ROOT, "bootseer"), os.path.join(ROOT, "launcher"))
        ckpt_pages.make_warm(
            [path for directory in directories for path in regular_files(directory) if os.path.getsize(path)]
        )
        subprocess.run([sys.executable, "-m", "launcher", "--version"], capture_output=True, cwd=ROOT)

    def _own(self, host: netns.Host) -> str:
        return os.path.join(self._directory, host.name)

    def _start(
        self, way: str, host: netns.Host, url: str, script: str, features: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        kills = way.endswith("restart")
        technique = way.removeprefix("alone_") if way in ALONE else ""
        endpoint = f"{self.nodes[0].address}:{RENDEZVOUS_PORT}"
        flags = ["--nnodes", str(len(self.nodes)), "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        flags += [
            "--rdzv-endpoint",
            endpoint,
            "--rdzv-id",
            "start",
            "--max-restarts",
            str(MAX_RESTARTS if kills else 0),
        ]
        words = [str(STEPS), *([str(DIE_AT_STEP)] if kills else [])]
        network = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
        if way == "torchrun_restart":  # with the agents' store ranks find the addresses of the last attempt
            network["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        bootrun = [sys.executable, "-m", "launcher", *flags]
        using = ("image", "env") if technique == "env" else (technique,) if technique else TECHNIQUES
        bootrun += [*self._features(url, using), *features]
        bootrun += ["--log-dir", "logs", "start_train.py", "out", *words]
        if technique or way in ("plain", "tuned", "torchrun_restart"):
            order = {
                "way": "again" if way == "torchrun_restart" else "alone" if technique else way,
                "technique": technique,
                "bootrun": bootrun,
                "url": url,
                "folder": self._place,
                "stages": os.path.join(self._place, "work", "out", "stages.json"),
                "flags": flags,
                "words": [f"{WORK}/out", *words],
                "environ": network,
                "checkpoint_bytes": int(self._made.facts["checkpoint_bytes"]),
            }
            argv = [sys.executable, "-m", "bench.start_node", json.dumps(order)]
        else:
            argv = bootrun
        environ = self._environ(url) if argv is bootrun or technique else clean_environ(PYTHONPATH=ROOT)
        return self._start_on(host, argv, environ | network, script)

    def _start_warming(self, host: netns.Host, url: str) -> subprocess.Popen[bytes]:
        argv = [BOOTSEER, "warm", *self._features(url, TECHNIQUES), "start_train.py"]
        return self._start_on(host, argv, self._environ(url))

    def _start_on(
        self, host: netns.Host, argv: Sequence[str], environ: dict[str, str], script: str = _RUN
    ) -> subprocess.Popen[bytes]:
        enter = [*BOUND, "bash", "-c", _ENTER.format(script), self._own(host), self._place]
        enter += [os.path.join(self._place, "work"), self._names]
        return host.start([*enter, *argv], environ, os.path.join(self._own(host), "work", "out", "output"))

    def _environ(self, url: str) -> dict[str, str]:
        """Of bootrun and its like."""
        return clean_environ(
            PYTHONPATH=ROOT,
            BOOTSEER_CACHE=os.path.join(self._place, "cache"),
            BOOTSEER_RUNTIME=os.path.join(self._place, "run"),
            BOOTSEER_KEYS=os.path.join(self._place, "keys"),
            BOOTSEER_SECRET_FILE=self._secret,
            HOME=os.path.join(self._place, "home"),
            AWS_ENDPOINT=url,
            AWS_ALLOW_HTTP="true",
            AWS_REGION="us-east-1",
            AWS_ACCESS_KEY_ID="x",
            AWS_SECRET_ACCESS_KEY="x",
        )

    def _features(self, url: str, using: Sequence[str]) -> list[str]:
        """Flags of bootrun. Args: using: of TECHNIQUES; the others are done as `plain` does them."""
        image = ["--image", "s3://image/tree", "--image-name", NAME]
        pip = f"pip install -q --no-index --disable-pip-version-check --find-links {url}/{INDEX}"
        found = image if "image" in using else ["--image", f"rootfs:{os.path.join(self._place, 'root')}"]
        found += ["--image-python", PYTHON]
        found += ["--setup", f"{pip} --trusted-host {self._store.address} -r {LOCK}", "--setup-input", LOCK]
        if "env" in using:
            found += ["--env-store", "s3://env/store"]
        if "checkpoint" in using:
            found += ["--load-checkpoint", "s3://ckpt/striped", "--keep-arena", "--checkpoint-disk", "10GiB"]
        if "ranks" not in using:
            found += ["--fork-ranks", "off", "--record-start", "off"]
        return found

    def _wait(self, running: Sequence[subprocess.Popen[bytes]]) -> None:
        """Until all have ended, or one has not ended well."""
        end_s = time.monotonic() + DEADLINE_S
        left = dict(zip(self.nodes, running, strict=True))
        while left:
            for host, program in tuple(left.items()):
                status = program.poll()
                if status:
                    raise BenchError(f"{host.name} ended with status {status}:\n{self._said(host)}")
                if status == 0:
                    del left[host]
                elif time.monotonic() > end_s:
                    raise BenchError(f"{host.name} has not ended after {DEADLINE_S:g} s:\n{self._said(host)}")
            time.sleep(LOOK_S)

    def _said(self, host: netns.Host) -> str:
        path = os.path.join(self._own(host), "work", "out", "output")
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()[-6000:]

    # ---- what it was -----------------------------------------------------------------------------------------

    def _sample(
        self,
        way: str,
        began_ns: int,
        kills: bool,
        requests: int,
        sent_bytes: int,
        node_bytes: list[int],
        worked: Worked,
    ) -> Sample:
        found, stages = [], []
        for host in self.nodes:
            out = os.path.join(self._own(host), "work", "out")
            with open(newest_moments(out), encoding="utf-8") as file:
                found.append(json.load(file))
            stages.append(read_stages(out))
        if kills:
            began_ns = self._died()
        nodes = [{name: (at_ns - began_ns) / 1e9 for name, at_ns in each["moments"].items()} for each in found]
        step_s = max(each["step_s"] for each in found)
        # Beside `first`, the environment is being published; nodes that share a processor cannot be held to it.
        if step_s > MAX_STEP_S and way != "first" and len(self.nodes) <= (os.cpu_count() or 1):
            raise BenchError(f"{way}: a step takes {step_s * 1e3:.0f} ms, at most {MAX_STEP_S * 1e3:.0f} is meant")
        shifted = [
            [(name, (low - began_ns) / 1e9, (high - began_ns) / 1e9) for name, low, high in each]
            for each in stages
        ]
        losses = [loss for each in found for loss in each["losses"]]
        seconds = max(each["first_step"] for each in nodes)
        cpu = worked.between(began_ns, began_ns + int(seconds * 1e9))
        return Sample(seconds, nodes, shifted, sent_bytes, node_bytes, requests, cpu, step_s, losses)

    def _died(self) -> int:
        for host in self.nodes:
            for path in glob.glob(os.path.join(self._own(host), "work", "out", "moments-*-0.json")):
                with open(path, encoding="utf-8") as file:
                    moments: dict[str, int] = json.load(file)["moments"]
                if "died" in moments:
                    return moments["died"]
        raise BenchError("no rank was killed")


def touch_memory() -> None:
    """What a virtual machine has not used its host has to give it first, at several times the price of memory."""
    size = min(MEMORY_BYTES, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area, contextlib.suppress(OSError):
        area.madvise(MADV_POPULATE_WRITE)  # Linux 5.14


def newest_moments(out: str) -> str:
    """What the rank of a node has written in its last attempt. Raises: BenchError."""
    paths = glob.glob(os.path.join(out, "moments-*-*.json"))
    if not paths:
        raise BenchError(f"{out}: its rank has written nothing")
    return max(paths, key=os.path.getmtime)  # numbers of attempts are counted anew where nodes come and go


def read_stages(out: str) -> Stages:
    """What a node did when: as start_node.py wrote it, and the spans of bootrun's events."""
    found: Stages = []
    with contextlib.suppress(FileNotFoundError), open(os.path.join(out, "stages.json"), encoding="utf-8") as file:
        found += [(name, low, high) for name, low, high in json.load(file)]
    begun: dict[str, dict[str, Any]] = {}
    logs = os.path.join(os.path.dirname(out), "logs")
    for path in glob.glob(os.path.join(logs, "*", "events", "agent-*.jsonl")):
        with open(path, encoding="utf-8") as file:
            for event in map(json.loads, file):
                if event.get("stage") and event["kind"] == "begin":
                    begun[event["span"]] = event
                elif event.get("stage") and event["kind"] == "end" and event["span"] in begun:
                    began_ns = begun.pop(event["span"])["mono_ns"]
                    found.append((event["name"], began_ns, event["mono_ns"]))
                    found += [
                        (name, began_ns, began_ns + int(event["attrs"][attr] * 1e9))
                        for attr, name in PARTS.items()
                        if attr in event.get("attrs", {})
                    ]
    return found
