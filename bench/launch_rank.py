"""What the ranks of `bench launch` run when the moment of their first statement is wanted.

Writes one line a rank into the folder of argv[1]: attempt, rank, the moment, and the CPU time that the processes
between the bench (pid argv[2]) and this rank had used by then. With a third argument, rank 1 of attempt 0 waits
for rank 0 and then dies, writing when; rank 0 waits to be stopped.
"""

import time

FIRST_NS = time.monotonic_ns()

import os  # noqa: E402
import sys  # noqa: E402


def launcher_cpu_ns(top: int) -> int:
    """Nanoseconds on a CPU of all threads of the processes above this one and below `top`."""
    total = 0
    pid = os.getppid()
    while pid not in (top, 0, 1):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[0])
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return total


def write(name: str, text: str) -> None:
    path = os.path.join(sys.argv[1], name)
    with open(path + ".part", "w", encoding="ascii") as file:
        file.write(text)
    os.rename(path + ".part", path)


def main() -> None:
    attempt, rank = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ["RANK"]
    write(f"first-{attempt}-{rank}", f"{FIRST_NS} {launcher_cpu_ns(int(sys.argv[2]))}")
    if len(sys.argv) < 4 or attempt != "0":
        return
    if rank == "0":
        time.sleep(300)
    while not os.path.exists(os.path.join(sys.argv[1], "first-0-0")):
        time.sleep(0.001)
    time.sleep(0.2)  # the launcher has finished its start and waits
    write("death", str(time.monotonic_ns()))
    os._exit(1)


main()
