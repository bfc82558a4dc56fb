"""The image service of a job: `python -P -m bootseer.mounts.sandbox.service`. One for each job and node.

bootrun starts it, sends requests to its standard input and receives answers from its standard output, as JSON
lines. URLs are sent by input, never in argv. It is not a process below bootrun's supervisor: the server of a
mounted tree outlives the job, and the next job finds it again. It ends when its input does; programs in the image
continue.

    start       url ... (`Order`)  -> `said` text ..., resolved digest ("" for a directory), then ready (`Ready`),
                                      or failed why
                                   -> fell-back why: it is unpacked, as it could not be mounted
                                   -> origin url `folders`: of a store, which the job's nodes may share as peers
    first-step                     -> statistics (numbers by name)
    show        number paths       -> shown number missing: the paths that are not visible inside
    show-from   address `folders`     -> shown-from address why ("": mounts of that namespace are visible inside)
    hide        `folders`          -> hidden why ("": nothing that was shown there is visible any more)
                                   -> lost: it cannot be read any more; then the service ends
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from bootseer.errors import BootseerError
from bootseer.ipc.channel import Channel
from bootseer.linux import processes
from bootseer.logs import get_logger, prepare, send_to
from bootseer.mounts.sandbox.binds import Bind, UnboundPath
from bootseer.mounts.sandbox.image_root import ImageRequest, OpenImage, open_image
from bootseer.mounts.sandbox.process import ImageSandbox
from bootseer.mounts.sandbox.shared import CACHES, shared_directories
from bootseer.mounts.sandbox.source import ROOTFS

_log = get_logger(__name__)

MAX_LINE_BYTES = 16 << 20
CHECK_S = 1.0  # between checks whether the image is still served


class ImageService:
    """The service; it handles one request after the other."""

    def __init__(self, channel: Channel, sandbox: ImageSandbox) -> None:
        self._channel = channel
        self._sandbox = sandbox
        self._image: OpenImage | None = None

    def run(self) -> None:
        """Serve until the other end is closed."""
        try:
            for order in self._orders():
                self._handle(order)
        finally:
            if self._image is not None:
                self._image.close()
            else:
                self._sandbox.close()

    def _orders(self) -> Iterator[dict[str, Any]]:
        while True:
            try:
                order = self._channel.receive(CHECK_S)
            except TimeoutError:
                if self._is_lost():
                    return
                if self._image is not None:
                    self._image.show_status_folder()  # not earlier, as ranks are being started
                continue
            if order is None or self._is_lost():
                return
            yield order

    def _is_lost(self) -> bool:
        if self._image is None or not self._image.is_lost():
            return False
        self._tell("lost")
        return True

    def _handle(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "start":
                self._start(order)
            case "first-step":
                try:
                    found = {} if self._image is None else dict(self._image.source.first_step())
                except BootseerError as error:
                    _log.info("the access trace of the image is not recorded: %s", error)
                else:
                    self._tell("statistics", found=found)
            case "show":
                missing = list(order["paths"])
                if self._image is not None:
                    try:
                        missing = self._image.show(missing)
                    except (BootseerError, OSError) as error:
                        _log.info("the image does not show %s: %s", ", ".join(missing), error)
                self._tell("shown", number=order["number"], missing=missing)
            case "show-from" if self._image is not None:
                why = ""
                try:
                    self._image.show_from(order["address"], order["folders"])
                except (BootseerError, OSError) as error:
                    why = str(error)
                self._tell("shown-from", address=order["address"], why=why)
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
            shared = shared_directories(needs, order.get("parents", ()), os.environ)
        except BootseerError as error:
            self._tell("failed", why=str(error))
            return
        if CACHES in order.get("needs", ()):
            try:
                shared += shared_directories([CACHES], order.get("cache_dirs", ()), os.environ)
            except BootseerError as error:  # it costs a cold first step, not the job
                self._tell("fell-back", why=f"compile caches are not visible inside: {error}")
        if order["url"].startswith(ROOTFS):
            self._tell("resolved", digest="")
        request = ImageRequest(
            url=order["url"],
            name=order["name"],
            digest=order["digest"],
            workload=(order["workload"][0], order["workload"][1]),
            writable=order["writable"],
            given=[Bind(*each) if len(each) > 1 else UnboundPath(*each) for each in order["given"]],
            environ=order["environ"],
            programs=order["programs"],
            work=order["work"],
            own=[*order["own"], *shared],
            files=order["files"],
            peers=order.get("peers", ""),
            avoid_mount=order.get("avoid_mount", ""),
            on_origin=lambda url, directories: self._tell("origin", url=url, folders=directories),
            on_digest=lambda digest: self._tell("resolved", digest=digest),
            on_fall_back=lambda why: self._tell("fell-back", why=why),
        )
        try:
            image = open_image(request, self._sandbox)
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
        prepare()

    def say(self, line: str) -> None:
        """Report a line to the user; this process logs with it."""
        self._tell("said", text=line)

    def _tell(self, did: str, **fields: object) -> None:
        self._channel.send({"did": did, **fields})


def main() -> None:
    """Run the service on its standard streams; output of libraries goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # bootrun decides when a job ends
    processes.set_death_signal(signal.SIGTERM)  # also during unpacking, which has no other signal to end
    service = ImageService(Channel.of_standard_input(max_bytes=MAX_LINE_BYTES), ImageSandbox())
    send_to(service.say)
    service.run()


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # threads of libraries are not waited for
