"""Forked ranks at work with torch: process groups, data loaders, threads, compilation."""

from __future__ import annotations

import mmap
import os
import platform
import shutil
import textwrap
from pathlib import Path

import pytest

from tests.integration.fork_jobs import FORKED, Jobs
from tests.support import Programs

pytestmark = pytest.mark.slow


@pytest.fixture
def jobs(program: Programs, tmp_path: Path) -> Jobs:
    return Jobs(program, tmp_path)


def write(jobs: Jobs, text: str) -> Path:
    return jobs.write("program.py", textwrap.dedent(text))


def test_training_goes_on_from_a_checkpoint(jobs: Jobs) -> None:
    """DDP with gloo and a data loader with workers; a failure, and a restart that loads what was saved."""
    text = """
        import json, os, sys
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

        out, attempt = os.environ["OUT"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        torch.manual_seed(7)
        data = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data), num_workers=2)
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if attempt == "1":
            state = torch.load(out + "/checkpoint.pt")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        losses = []
        for inputs, wanted in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        total = torch.tensor([float(sum(losses))])
        dist.all_reduce(total)
        with open(f"{out}/{attempt}-{rank}.json", "w") as file:
            json.dump([losses, total.item(), torch.rand(2).tolist()], file)
        if attempt == "0":
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, out + "/checkpoint.pt")
            dist.barrier()
            os._exit(3)
        dist.destroy_process_group()
        """
    path, env = write(jobs, text), {"OUT": os.fspath(jobs.out)}
    execd, forked = jobs.both("--max-restarts", "1", path, preload="", nproc=2, env=env)
    assert forked.status == 0, forked.logs
    names = ["0-0.json", "0-1.json", "1-0.json", "1-1.json"]
    assert [forked.out[name] for name in names] == [execd.out[name] for name in names]
    assert forked.out["0-0.json"][0] != forked.out["0-1.json"][0]
    assert forked.statuses["1/0"] == 0


def test_what_ranks_share_is_in_huge_pages(jobs: Jobs) -> None:
    """So that forks, and ends of ranks, need not go through it page by page."""
    text = """
        import json, os
        with open("/proc/self/smaps_rollup") as file:
            sizes = {line.split()[0]: int(line.split()[1]) for line in list(file)[1:]}
        if os.environ["RANK"] == "1":  # rank 0 of a first start notes what is imported
            with open(os.environ["OUT"] + "/sizes.json", "w") as file:
                json.dump(sizes, file)
        """
    if not can_collapse():
        pytest.skip("this kernel makes no huge pages when it is asked to")
    env = {"OUT": os.fspath(jobs.out)}
    sizes = jobs.run(FORKED, write(jobs, text), preload="", nproc=2, env=env).out["sizes.json"]
    assert sizes["AnonHugePages:"] > 0, "none, although there is time for some on any machine"
    assert sizes["Private_Dirty:"] < 8 << 10


def test_the_heap_is_in_huge_pages_from_the_start(jobs: Jobs) -> None:
    """And what was reserved for it and not needed is given back."""
    text = """
        import json, os
        with open("/proc/self/smaps") as file:
            lines = file.read().splitlines()
        sizes, is_heap = {}, False
        for line in lines:
            words = line.split()
            if not words[0].endswith(":"):
                is_heap = words[-1] == "[heap]"
            elif is_heap and words[-1] == "kB":
                sizes[words[0]] = sizes.get(words[0], 0) + int(words[1])
        with open(os.environ["OUT"] + "/sizes.json", "w") as file:
            json.dump(sizes, file)
        """
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if platform.libc_ver()[0] != "glibc" or not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("no huge pages here, or another C library than glibc")
    sizes = jobs.run(FORKED, write(jobs, text), preload="", env={"OUT": os.fspath(jobs.out)}).out["sizes.json"]
    assert sizes["AnonHugePages:"] > sizes["Anonymous:"] / 2
    assert sizes["Size:"] - sizes["Anonymous:"] < 8 << 10


def can_collapse() -> bool:
    """MADV_COLLAPSE, of Linux 6.1, where huge pages are built in."""
    size = 4 << 20
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[::4096] = b"1" * (size // 4096)
    try:
        memory.madvise(25)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("threads", [None, "1", "2"])
def test_threads_of_operators(jobs: Jobs, threads: str | None) -> None:
    """As many as OMP_NUM_THREADS says, or as there are cores, although libraries were loaded before the fork."""
    text = """
        import json, os
        import numpy, torch
        def tasks():
            return len(os.listdir("/proc/self/task"))
        facts = {"threads": [torch.get_num_threads(), torch.get_num_interop_threads()]}
        facts["tasks at first"] = tasks()
        facts["info"] = torch.__config__.parallel_info()
        facts["OMP"] = os.environ.get("OMP_NUM_THREADS")
        torch.manual_seed(1)
        before = tasks()
        left = torch.randn(700, 700)
        facts["sum"] = (left @ left).sum().item()
        facts["softmax"] = torch.log_softmax(torch.randn(2000, 500), 1).sum().item()
        facts["started by torch"] = tasks() - before
        array = left.numpy()
        facts["numpy"] = float(numpy.dot(array, array).sum())
        facts["tasks"] = tasks()
        torch.set_num_threads(3)
        facts["set"] = [torch.get_num_threads(), torch.randn(900, 900).exp().sum().isfinite().item()]
        pid = os.fork()
        if pid == 0:
            os._exit(0 if torch.ones(3).sum().item() == 3 else 1)
        facts["child"] = os.waitpid(pid, 0)[1]
        with open(os.environ["OUT"] + "/facts.json", "w") as file:
            json.dump(facts, file)
        """
    env = {"OUT": os.fspath(jobs.out), "OMP_NUM_THREADS": threads}
    execd, forked = (job.out["facts.json"] for job in jobs.both(write(jobs, text), preload="", env=env))
    # OpenBLAS starts its threads when it is loaded; in a forked rank, when they are needed.
    assert forked.pop("tasks at first") == 1
    assert execd.pop("tasks at first") == execd["threads"][0]
    cores = len(os.sched_getaffinity(0))
    assert forked["threads"][0] == (int(threads) if threads else cores)
    assert forked["started by torch"] == forked["threads"][0] - 1
    assert forked == execd


def test_workers_of_all_kinds(jobs: Jobs) -> None:
    """Data loaders and torch.multiprocessing, with each start method."""
    text = """
        import json, os
        import torch
        import torch.multiprocessing as mp
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self):
                return 6
            def __getitem__(self, index):
                return torch.tensor([index * index])

        class Answer:
            def __init__(self, tensor):
                self.tensor = tensor

        def work(index, queue, shared):
            shared[index] = index + 1.0
            queue.put(Answer(torch.full((2,), float(index))))
            queue.get()  # until the tensor has been taken

        if __name__ == "__main__":
            found = {}
            for method in ("fork", "spawn", "forkserver"):
                loader = DataLoader(Squares(), batch_size=3, num_workers=1, multiprocessing_context=method)
                found[method] = [batch.flatten().tolist() for batch in loader]
            for method in ("fork", "spawn"):
                context = mp.get_context(method)
                queue, shared = context.Queue(), torch.zeros(1).share_memory_()
                processes = mp.start_processes(work, (queue, shared), nprocs=1, join=False, start_method=method)
                answer = queue.get()
                found["torch " + method] = [answer.tensor.tolist(), type(answer).__name__]
                queue.put(None)
                processes.join()
                found["torch " + method].append(shared.tolist())
            with open(os.environ["OUT"] + "/found.json", "w") as file:
                json.dump(found, file)
        """
    env = {"OUT": os.fspath(jobs.out)}
    job = jobs.run(FORKED, write(jobs, text), preload="", env=env)
    assert job.status == 0, job.logs
    answer = [[0.0, 0.0], "Answer", [1.0]]
    loaded = {method: [[0, 1, 4], [9, 16, 25]] for method in ("fork", "spawn", "forkserver")}
    assert job.out["found.json"] == {**loaded, "torch fork": answer, "torch spawn": answer}


def test_compiled_functions(jobs: Jobs) -> None:
    """torch.compile with its pool of compiling processes, although inductor was preloaded."""
    backend = "inductor" if shutil.which("c++") or shutil.which("g++") else "eager"
    text = f"""
        import json, os
        import torch
        @torch.compile(backend={backend!r})
        def function(x):
            return x.sin() + x.cos()
        x = torch.arange(100.0)
        same = torch.allclose(function(x), x.sin() + x.cos(), atol=1e-5)
        with open(os.environ["OUT"] + "/found.json", "w") as file:
            json.dump([same, os.environ.get("TORCH_WARM_POOL")], file)
        """
    env = {
        "OUT": os.fspath(jobs.out),
        "TORCHINDUCTOR_CACHE_DIR": os.fspath(jobs.folder / "compiled"),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # takes longer than it saves here
    }
    job = jobs.run(FORKED, write(jobs, text), preload="torch._inductor.compile_fx", env=env, deadline_s=100.0)
    assert job.out == {"found.json": [True, None]}, job.logs


def test_crash_reports_list_fork_server_modules(jobs: Jobs) -> None:
    text = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    execd, forked = jobs.both(write(jobs, text), preload="", env={"PYTHONFAULTHANDLER": "1"})
    assert forked.statuses == execd.statuses == {"0/0": -11}
    ours, more = forked.logs["0/0/stderr.log"].split("\nExtension modules: ")
    assert ours.rstrip("\n") == execd.logs["0/0/stderr.log"].rstrip("\n")
    assert "torch._C" in more


@pytest.mark.parametrize("names_store", [False, True], ids=["waits-where-it-joins", "names-TCPStore"])
def test_ranks_join_the_store_when_rank_0_listens(jobs: Jobs, names_store: bool) -> None:
    """However late rank 0 comes; the other ranks have run what is before. In each attempt."""
    text = """
        import os, socket, sys, time
        import torch.distributed as dist

        out, rank, attempt = os.environ["OUT"], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        module = sys.modules["torch.distributed.rendezvous"]
        is_gate = type(module._rendezvous_handlers).__name__ == "Gate"
        make = module._create_c10d_store

        def is_listened_on():
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("", int(os.environ["MASTER_PORT"])))
                except OSError:
                    return True
            return False

        def create(*args):
            with open(f"{out}/{attempt}-{rank}", "w") as file:
                file.write(f"{is_gate} {rank == '0' or is_listened_on()}")
            return make(*args)

        module._create_c10d_store = create
        def pause(seconds, sleep=time.sleep):
            open(f"{out}/waits-{attempt}-{rank}", "w").close()
            sleep(seconds)

        sign = SIGN
        if rank == "0":
            while not all(os.path.exists(f"{out}/{sign}-{attempt}-{other}") for other in (1, 2)):
                time.sleep(0.002)  # between looks, which end with the job
        elif is_gate:
            time.sleep = pause  # what waits at the gate is seen to wait
        open(f"{out}/ran-{attempt}-{rank}", "w").close()
        dist.init_process_group("gloo")
        assert module._rendezvous_handlers["env"] is module._env_rendezvous_handler
        assert type(module._rendezvous_handlers) is dict
        dist.barrier()
        dist.destroy_process_group()
        sys.exit(3 if attempt == "0" else 0)
        """
    sign = '"ran"  # TCPStore' if names_store else '"waits"'
    path = write(jobs, text.replace("SIGN", sign))
    env = {"OUT": os.fspath(jobs.out)}
    ended = jobs.run(FORKED, "--max-restarts", "1", path, preload="", nproc=3, env=env)
    assert ended.status == 0, ended.logs
    for attempt in (0, 1):
        for rank in (0, 1, 2):
            is_gate, is_listened_on = ended.out[f"{attempt}-{rank}"].split()
            assert is_gate == str(not names_store)
            assert is_listened_on == "True" or names_store
