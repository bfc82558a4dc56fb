#!/bin/bash
# torch's TCPStore asks the name server for the name of each client's address: the client before it connects, and the
# server when it accepts, in its only thread, one after the other. /etc/hosts does not help 127.0.0.1, because the
# address is looked up as an IPv6 one (::ffff:127.0.0.1). The names are for error messages only. So a name server that
# takes 0.1 s costs a job 0.1 s for each rank, and one that does not answer the resolver's whole timeout for each.
# Seen with torch 2.13.0 (CPU) on Linux with glibc 2.36: 8 clients are served 1.05 s after their start with a name server
# that takes 0.1 s, and after 0.01 s with one that answers at once; it is asked 16 times, once by each end.
# As root: in namespaces of its own, with a name server of its own on the loopback.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
printf 'nameserver 127.0.0.2\noptions timeout:5 attempts:1\n' >"$folder/resolv.conf"
printf '127.0.0.1 localhost\n' >"$folder/hosts"
cat >"$folder/seen.py" <<'PY'
import os
import socket
import threading
import time

import torch
from torch.distributed import TCPStore

print("torch", torch.__version__)
RANKS = 8
asked, delay_s = [], 0.0


def answer():  # every question: no such name
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.2", 53))
    while True:
        question, who = server.recvfrom(512)
        asked.append(question[12:])
        threading.Timer(delay_s, server.sendto, (question[:2] + b"\x81\x83" + question[4:], who)).start()


def join_all(port):  # seconds until all clients have had an answer from the store
    def join():
        TCPStore("127.0.0.1", port, RANKS + 1, False).get("key")

    clients = [threading.Thread(target=join) for _ in range(RANKS)]
    began = time.monotonic()
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    return time.monotonic() - began


threading.Thread(target=answer, daemon=True).start()
store = TCPStore("127.0.0.1", 0, RANKS + 1, True, wait_for_workers=False)
store.set("key", "value")
join_all(store.port)
found = {}
for delay_s in (0.0, 0.1):
    asked.clear()
    found[delay_s] = join_all(store.port)
    print(f"name server takes {delay_s} s, asked {len(asked)} times: {RANKS} clients served after {found[delay_s]:.2f} s")
    assert len(asked) >= 2 * RANKS and all(b"in-addr" in each for each in asked), asked
assert found[0.0] < 0.3, found
assert found[0.1] > 0.1 * RANKS, found
os._exit(0)
PY
unshare --mount --net bash -c 'ip link set lo up
mount --bind "$1/resolv.conf" /etc/resolv.conf
mount --bind "$1/hosts" /etc/hosts
exec "$1/venv/bin/python" "$1/seen.py"' _ "$folder"
