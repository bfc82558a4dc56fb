"""The keeper of a job's image: `python -P -m bootseer.mounts.image_keeper`. One for each job and node.

bootrun starts it, gives orders on its standard input and hears answers on its standard output, JSON lines; URLs
come that way, never in argv. It is no process below bootrun's guard: what mounts a tree outlives the job, and is
found again by the next one. It ends when its input does; what runs in the image goes on.

    start       url ... (`Order`)  -> said text ..., resolved digest ("" for a folder), then ready (`Ready`), or
                                      failed why
                                   -> fell-back why: it is unpacked, and could not be mounted
                                   -> origin url folders: of a store, what the job's nodes may give each other
    first-step                     -> statistics (numbers by name)
    show        number paths       -> shown number missing: the paths that are not seen inside
    show-from   door folders       -> shown-from door why ("": mounts of that namespace are seen inside)
    hide        folders            -> hidden why ("": nothing that was shown there is seen any more)
                                   -> lost: it cannot be read any more; then the keeper ends
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

from bootseer.errors import BootseerError
from bootseer.mounts import namespaces
from bootseer.mounts.binds import Bind, Without
from bootseer.mounts.holder import Holder
from bootseer.mounts.image_root import ImageRequest, OpenImage, open_image
from bootseer.mounts.image_shared import CACHES, shared_folders
from bootseer.mounts.image_source import ROOTFS

MOST_LINE_BYTES = 16 << 20
LOOK_S = 1.0  # between looks whether the image is still served


class Keeper:
    """See the module's docstring; one order after the other."""

    def __init__(self, connection: socket.socket, holder: Holder) -> None:
        self._connection = connection
        self._holder = holder
        self._image: OpenImage | None = None

    def run(self) -> None:
        """Until the other end is closed."""
        try:
            for order in self._orders():
                self._obey(order)
        except ConnectionError:
            pass  # bootrun has gone
        finally:
            if self._image is not None:
                self._image.close()
            else:
                self._holder.close()

    def _orders(self) -> Iterator[dict[str, Any]]:
        received = b""
        while len(received) <= MOST_LINE_BYTES:
            if not select.select([self._connection], [], [], LOOK_S)[0]:
                if self._is_lost():
                    return
                continue
            data = self._connection.recv(1 << 16)
            if not data:
                return
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                if self._is_lost():
                    return
                yield json.loads(line)

    def _is_lost(self) -> bool:
        if self._image is None or not self._image.is_lost():
            return False
        self._tell("lost")
        return True

    def _obey(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "start":
                self._start(order)
            case "first-step":
                try:
                    found = {} if self._image is None else dict(self._image.source.first_step())
                except BootseerError as error:
                    self._tell("said", text=f"what the start has read of the image is not recorded: {error}")
                else:
                    self._tell("statistics", found=found)
            case "show":
                missing = list(order["paths"])
                if self._image is not None:
                    try:
                        missing = self._image.show(missing)
                    except (BootseerError, OSError) as error:
                        self._tell("said", text=f"the image does not show {', '.join(missing)}: {error}")
                self._tell("shown", number=order["number"], missing=missing)
            case "show-from" if self._image is not None:
                why = ""
                try:
                    self._image.show_from(order["door"], order["folders"])
                except (BootseerError, OSError) as error:
                    why = str(error)
                self._tell("shown-from", door=order["door"], why=why)
            case "hide" if self._image is not None:
                why = ""
                try:
                    self._image.hide(order["folders"])
                except (BootseerError, OSError) as error:
                    why = str(error)
                self._tell("hidden", why=why)

    def _start(self, order: dict[str, Any]) -> None:
        try:
            needs = [need for need in order.get("needs", ()) if need != CACHES]
            shared = shared_folders(needs, order.get("parents", ()), os.environ)
        except BootseerError as error:
            self._tell("failed", why=str(error))
            return
        if CACHES in order.get("needs", ()):
            try:
                shared += shared_folders([CACHES], order.get("cache_dirs", ()), os.environ)
            except BootseerError as error:  # it costs a cold first step, no job
                self._tell("fell-back", why=f"first-step caches are not seen inside: {error}")
        if order["url"].startswith(ROOTFS):
            self._tell("resolved", digest="")
        request = ImageRequest(
            url=order["url"],
            name=order["name"],
            digest=order["digest"],
            workload=(order["workload"][0], order["workload"][1]),
            writable=order["writable"],
            given=[Bind(*each) if len(each) > 1 else Without(*each) for each in order["given"]],
            environ=order["environ"],
            programs=order["programs"],
            work=order["work"],
            own=[*order["own"], *shared],
            files=order["files"],
            peers=order.get("peers", ""),
            avoid_mount=order.get("avoid_mount", ""),
            on_origin=lambda url, folders: self._tell("origin", url=url, folders=folders),
            on_digest=lambda digest: self._tell("resolved", digest=digest),
            on_fall_back=lambda why: self._tell("fell-back", why=why),
        )
        try:
            image = open_image(request, self._holder, lambda text: self._tell("said", text=text))
        except (BootseerError, OSError) as error:
            self._tell("failed", why=str(error))
            return
        self._image = image
        self._tell(
            "ready",
            prefix=image.prefix,
            program=image.program,
            set=image.changes.set,
            unset=image.changes.unset,
            digest=image.source.digest,
            lock=image.source.lock_path,
            how=image.source.how,
            mount=list(image.source.mount),
            source_s=image.source.seconds,
            root_s=image.made_s,
            has_user_namespace=image.has_user_namespace,
            notes=image.notes,
        )

    def _tell(self, did: str, **fields: object) -> None:
        self._connection.sendall(json.dumps({"did": did, **fields}).encode("ascii") + b"\n")


def main() -> None:
    """The standard streams are the connection; what libraries print goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # bootrun decides when a job ends
    namespaces.die_with_parent(signal.SIGTERM)  # also in the middle of unpacking, which hears of nothing else
    connection = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    Keeper(connection, Holder()).run()


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # threads of libraries are not waited for
