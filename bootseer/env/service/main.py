"""The environment service of a job: `python -P -m bootseer.env.service.main`. One per job and node.

bootrun starts it, sends orders on its standard input and receives answers on its standard output, as JSON lines.
So command lines and URLs never appear in argv. It ends with its input, but first completes a publication, within
`env.publish_s` of `tuning`.
    start  ... (job.Job)                   -> looked key tree why is_silent  what this node has, or could have;
                                              is_silent: the store does not answer
    use    tree                            -> fetched tree, or unfetched why damaged (the tree, or "") is_silent
    show   tree                            -> ready ...                      the fetched environment is in place
    build  is_urgent damaged (a tree)      -> ready ... then published tree, or unpublished why; or found tree
    own, again                             -> ready ...                      set-up was run, if necessary
    image  prefix set unset python                                           set-up can run in the open image
    first-step                                                               ends the access trace of the start
    touched files (path, ranges (offset, bytes), none: all) imports          the same, for a built environment
    any time:  fell-back why (a stored environment is not used, or more slowly)
               | origin url folders (of the store: nodes of the job may share the files below)
               | said text | setup-began | line text (of set-up) | lost | alive (progress)
               | failed why tail could_enter (false: the image could probably not be entered for a command)
               | waiting, waited (for another process at the targets)
"""

from __future__ import annotations

import signal
import sys
import threading
from importlib import import_module

from bootseer.env.connection import Connection, end_at_once
from bootseer.tuning import current


def main() -> None:
    """Run the service. The sandbox process is forked first, while there is only one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # bootrun decides when a job ends
    connection = Connection()
    if "--early" in sys.argv:
        import_module("bootseer.env.service.work")
    order = connection.first()
    if order is None:
        return
    from bootseer.env.service.mount import begin_spares, fork_sandbox

    begin_spares(order)
    sandbox = fork_sandbox() if "mount" in order["ways"] else None
    from bootseer.env.service.work import EnvService
    from bootseer.logs import send_to

    if sandbox is not None:
        import_module("bootseer.env.restore.mounted")  # imported while no process waits for it

    work = EnvService(order, connection, sandbox)
    send_to(work.say)

    def on_gone() -> None:
        if not work.is_publishing:
            work.give_up()
            end_at_once()
        end_later()

    connection.listen(on_gone)
    work.run()


def end_later() -> threading.Timer:
    """End this process when it may no longer publish."""
    timer = threading.Timer(current().env.publish_s, end_at_once)
    timer.daemon = True
    timer.start()
    return timer


if __name__ == "__main__":
    main()
    end_at_once()  # without waiting for threads of libraries
