"""The supervisor: a small process that is the parent of all ranks and outlives bootrun only to end them.

bootrun -> watchdog -> supervisor -> ranks. bootrun forks the watchdog before any heavy import; the watchdog forks
the supervisor and waits for it. Both are subreapers. The supervisor execs ranks on request, reports their exits
and stops whole process trees. When the pipe from bootrun closes, it stops all processes and ends. If it is killed,
ranks get a death signal, and the watchdog kills the rest, also processes in sessions of their own.
Stdlib only, no threads. Requests and events are marshalled tuples over two pipes between forks of one interpreter;
no other process can write to them. The other end of the pipes is client.py.
The fork server, which has imported the framework, can also fork ranks (fork_server_link.py).
"""

from __future__ import annotations

import errno
import gc
import marshal
import os
import select
import time

from bootseer.light_stdlib import signal
from bootseer.light_typing import TYPE_CHECKING, Any, Collection, Iterable, NamedTuple, NoReturn
from launcher.base import inherited
from launcher.base.inherited import Inherited, Limits

if TYPE_CHECKING:
    from bootseer.linux.processes import Process
    from launcher.supervisor.fork_server_link import ForkServerProcess
    from launcher.supervisor.helpers import Helper

# A process that survives SIGKILL for so long waits in the kernel (state D); it is reported, not awaited.
UNKILLABLE_AFTER_S = 5.0
# Period at which a stop searches for processes that ended ranks have left. A process that was just forked may lose
# a signal, so it gets one when it is found for the second time.
LOOK_EVERY_S, SETTLED_AFTER_S = 0.05, 0.01
SERVICE_GRACE_S = 5.0  # of a service that has received SIGTERM
_JOB_CONTROL = (signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP)


class Pipes(NamedTuple):
    """bootrun's ends of the pipes to a started supervisor."""

    watchdog_pid: int
    requests_fd: int
    events_fd: int


def start_supervisor() -> Pipes:
    """Fork watchdog and supervisor; call this before any heavy import and before any thread starts."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # Closed: the pipes must not get its number. Ranks find it closed, as it is not inherited.
            os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    state = inherited.normalise_state()
    requests_read, requests_write = os.pipe2(os.O_CLOEXEC)
    events_read, events_write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(requests_write)
        os.close(events_read)
        _be_watchdog(requests_read, events_write, state)
    os.close(requests_read)
    os.close(events_write)
    return Pipes(pid, requests_write, events_read)


def pack(message: tuple[Any, ...]) -> bytes:
    """Encode a request or event: length, then the marshalled tuple."""
    data = marshal.dumps(message)
    return len(data).to_bytes(4, "little") + data


def unpack(buffer: bytearray) -> list[tuple[Any, ...]]:
    """Remove the complete messages from the front of `buffer`, and return them."""
    messages: list[tuple[Any, ...]] = []
    while len(buffer) >= 4:
        end = 4 + int.from_bytes(buffer[:4], "little")
        if len(buffer) < end:
            break
        messages.append(marshal.loads(bytes(buffer[4:end])))  # noqa: S302 (from a fork of this very process)
        del buffer[:end]
    return messages


def _be_watchdog(requests_fd: int, events_fd: int, state: Inherited) -> NoReturn:
    status = 1
    try:
        os.setsid()
        for signum in inherited.IGNORED_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        inherited.unblock()
        inherited.close_others({0, 1, 2, requests_fd, events_fd})
        limits = inherited.raise_limits()
        from bootseer.linux import processes
        from launcher.supervisor import cgroup

        processes.become_subreaper()
        processes.set_name(b"bootrun-sentinel")
        group = cgroup.make()
        guard_pid = os.fork()
        if guard_pid == 0:
            _be_supervisor(requests_fd, events_fd, group, state, limits)
        os.close(requests_fd)
        os.close(events_fd)
        _release_console()
        cgroup.remove_left(group)
        status = _await_supervisor(guard_pid)
        _kill_descendants()
        cgroup.remove(group)
    finally:
        os._exit(status)


def _release_console() -> None:
    """Close the console: readers of bootrun's output must see its end while the watchdog still runs."""
    null_fd = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null_fd, fd)
    os.close(null_fd)


def _await_supervisor(guard_pid: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == guard_pid:
            return os.waitstatus_to_exitcode(status) & 0xFF


def _kill_descendants() -> None:
    """Send SIGKILL to all descendants until none or only unkillable ones are left."""
    from bootseer.linux import processes

    give_up_s = time.monotonic() + UNKILLABLE_AFTER_S
    while time.monotonic() < give_up_s:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for process in processes.list_descendants(os.getpid()):
            processes.send(process, signal.SIGKILL)
        time.sleep(0.002)


def _be_supervisor(
    requests_fd: int, events_fd: int, group: str | None, state: Inherited, limits: Limits
) -> NoReturn:
    status = 1
    try:
        from bootseer.linux import processes
        from launcher.supervisor import cgroup

        watchdog_pid = os.getppid()
        processes.become_subreaper()
        processes.set_name(b"bootrun-guard")
        cgroup.enter(group)
        gc.enable()  # bootrun has disabled it for its start
        _Supervisor(requests_fd, events_fd, state, limits).run()
        status = 0
        if os.getppid() != watchdog_pid:
            cgroup.leave(group)  # the watchdog was killed
    except BaseException as error:
        os.write(2, f"bootrun: the supervisor failed: {error!r}\n".encode())
        if not isinstance(error, Exception):
            raise
    finally:
        os._exit(status)


class _Rank:
    """A process started on request."""

    __slots__ = ("alive", "exec_fd", "key", "killed", "linger_until_s", "number", "pid")

    def __init__(self, key: int, pid: int, exec_fd: int, number: bytes) -> None:
        self.key = key
        self.pid = pid
        self.exec_fd = exec_fd  # pipe that reports a failed exec, -1 once known
        self.number = number  # its RANK, which identifies descendants in other sessions
        self.alive = True
        self.linger_until_s: float | None = None  # it has succeeded; its descendants have until then
        self.killed: dict[int, str] = {}  # of its descendants, after that


class _Service:
    """A process that serves the job on this node and is not a rank: it survives stops, and ends with the job."""

    __slots__ = ("exec_fd", "kill_at_s", "number", "pid")

    def __init__(self, number: int, pid: int, exec_fd: int) -> None:
        self.number = number
        self.pid = pid
        self.exec_fd = exec_fd
        self.kill_at_s: float | None = None  # it has received SIGTERM


class _Supervisor:
    """State and loop of the supervisor process."""

    def __init__(self, requests_fd: int, events_fd: int, state: Inherited, limits: Limits) -> None:
        self._requests_fd = requests_fd
        self._events_fd = events_fd
        self._of_ranks = state
        self._of_services = Inherited(state.umask & ~0o700)
        self._limits = limits  # of ranks
        self._handled: Collection[int] = inherited.HANDLED
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._ranks: dict[int, _Rank] = {}
        self._by_pid: dict[int, _Rank] = {}
        self._poll = select.poll()
        self._ending = False
        self._grace_s = 30.0
        self._stop_signum = 0
        self._kill_at_s: float | None = None  # a stop runs; SIGKILL from then on
        self._give_up_at_s = 0.0
        self._look_at_s = 0.0  # during a stop
        self._signalled: set[tuple[int, int]] = set()  # pid and start; not of ranks, during a stop
        self._seen: set[tuple[int, int]] = set()  # found at its last search
        self._shells: set[int] = set()  # ranks that are shells
        self._killed: dict[int, str] = {}  # in a stop
        self._fork_server: ForkServerProcess | None = None
        self._services: dict[int, _Service] = {}  # by pid
        self._helpers: dict[int, Helper] = {}  # by pid
        self._to_remove: list[str] = []

    # ---- loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        wakeup_read, wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        os.set_blocking(self._events_fd, False)
        self._poll.register(self._requests_fd, select.POLLIN)
        self._poll.register(wakeup_read, select.POLLIN)
        while True:
            ready = self._poll.poll(self._wait_ms())
            for fd, _ in ready:
                if fd == self._requests_fd:
                    self._read_requests()
                elif fd == wakeup_read:
                    os.read(wakeup_read, 4096)
                elif fd == self._events_fd:
                    self._flush()
                elif self._fork_server is not None and fd == self._fork_server.fd:
                    self._advance_fork_server()
                else:
                    self._read_exec(fd)
            self._advance_fork_server()
            no_children = self._reap()
            # Before the next read of the fork server: `_reap` has not searched for ranks that it reports then.
            no_children = no_children and not self._is_forking()
            self._advance_fork_server()
            self._advance(no_children)
            self._kill_services()
            if self._ending and self._kill_at_s is None:
                for path in self._to_remove:
                    try:
                        os.unlink(path)
                    except OSError:
                        pass  # already removed
                self._flush_at_end()
                return

    def _wait_ms(self) -> float | None:
        now_s = time.monotonic()
        moments = [
            # During killing, /proc is read repeatedly.
            rank.linger_until_s if now_s < rank.linger_until_s else now_s + 0.01
            for rank in self._ranks.values()
            if rank.linger_until_s is not None
        ]
        if self._kill_at_s is not None:
            # During killing, /proc is read repeatedly: children of a dying process become the supervisor's.
            moments.append(min(self._kill_at_s, self._look_at_s) if now_s < self._kill_at_s else now_s + 0.01)
        if self._fork_server is not None and (deadline_s := self._fork_server.deadline_s) is not None:
            moments.append(deadline_s)
        moments += [each.kill_at_s for each in self._services.values() if each.kill_at_s is not None]
        if not moments:
            return None
        return max(0.0, (min(moments) - time.monotonic()) * 1000 + 1)

    # ---- pipes -----------------------------------------------------------------------------------------------

    def _read_requests(self) -> None:
        data = os.read(self._requests_fd, 1 << 20)
        if not data:
            self._poll.unregister(self._requests_fd)
            self._ending = True
            self._do_unload()
            for service in self._services.values():
                os.close(service.exec_fd)
            self._services.clear()  # stopped with the rest
            for pid in self._helpers:
                os.kill(pid, signal.SIGKILL)  # not reaped, so the pid is its own
            earlier_s = self._kill_at_s
            self._begin_stop(signal.SIGTERM, self._grace_s)
            if earlier_s is not None:
                self._set_kill_time(min(earlier_s, self._kill_at_s or earlier_s))
            return
        self._incoming += data
        for name, *values in unpack(self._incoming):
            getattr(self, "_do_" + name)(*values)

    def _tell(self, *event: Any) -> None:
        self._outgoing += pack(event)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._events_fd, self._outgoing)]
        except BlockingIOError:
            self._poll.register(self._events_fd, select.POLLOUT)
            return
        except OSError:
            self._outgoing.clear()  # bootrun is gone
        try:
            self._poll.unregister(self._events_fd)
        except KeyError:
            pass

    def _flush_at_end(self) -> None:
        try:
            os.set_blocking(self._events_fd, True)
            while self._outgoing:
                del self._outgoing[: os.write(self._events_fd, self._outgoing)]
        except OSError:
            pass

    # ---- requests --------------------------------------------------------------------------------------------

    def _do_grace(self, grace_s: float) -> None:
        self._grace_s = grace_s

    def _do_handled(self, signals: list[int]) -> None:
        self._handled = signals

    def _do_remove_at_end(self, paths: list[str]) -> None:
        self._to_remove = paths

    def _do_spawn(
        self,
        key: int,
        argv: list[str],
        environ: dict[str, str],
        unset: list[str],
        stdout: str | None,
        stderr: str | None,
    ) -> None:
        try:
            pid, exec_read = self._fork_exec(argv, environ, unset, stdout, stderr)
        except OSError as error:
            self._tell("spawn_failed", key, error.errno or 0, "fork")
            return
        rank = _Rank(key, pid, exec_read, environ.get("RANK", "").encode())
        self._ranks[key] = self._by_pid[pid] = rank
        self._poll.register(exec_read, select.POLLIN)

    def _fork_exec(
        self,
        argv: list[str],
        environ: dict[str, str],
        unset: list[str],
        stdout: str | None = None,
        stderr: str | None = None,
        fds: Iterable[tuple[int, int]] = (),
        is_service: bool = False,
    ) -> tuple[int, int]:
        """Start a process; return its pid and the pipe that reports a failed exec.

        Args: fds: (own, the child's) descriptors; the child's are standard streams or 4 and above;
            is_service: it is a process of Bootseer.
        """
        parent = os.getpid()
        # A signal between fork and exec must wait for the rank; the supervisor ignores it, so it would be lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, inherited.IGNORED_SIGNALS)
        try:
            exec_read, exec_write = os.pipe2(os.O_CLOEXEC)
            try:
                pid = os.fork()
            except OSError:
                os.close(exec_read)
                os.close(exec_write)
                raise
            if pid == 0:
                self._be_rank(argv, environ, unset, stdout, stderr, fds, is_service, exec_write, parent)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(exec_write)
        return pid, exec_read

    def _be_rank(
        self,
        argv: list[str],
        environ: dict[str, str],
        unset: Iterable[str],
        stdout: str | None,
        stderr: str | None,
        fds: Iterable[tuple[int, int]],
        is_service: bool,
        exec_fd: int,
        parent: int,
    ) -> NoReturn:
        what = ""
        try:
            from bootseer.linux import processes

            os.setsid()
            processes.die_with_parent(signal.SIGKILL, parent)
            signal.set_wakeup_fd(-1)
            for path, fd in ((stdout, 1), (stderr, 2)):
                if path is not None:
                    what = path
                    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                    os.dup2(opened, fd)
            # Above the target numbers.
            above = [(_copy_above(ours), fd) for ours, fd in fds]
            exec_fd = os.dup2(exec_fd, 3, inheritable=False)
            for copy, fd in above:
                os.dup2(copy, fd)
            inherited.close_others({0, 1, 2, 3, *(fd for _, fd in above)})
            state = self._of_services if is_service else self._of_ranks
            inherited.restore(state, self._handled, self._limits)
            full = _make_environ(environ, unset)
            what = argv[0]
            os.execvpe(argv[0], argv, full)
        except OSError as error:
            os.write(exec_fd, marshal.dumps((error.errno or 0, what)))
        except BaseException as error:
            os.write(exec_fd, marshal.dumps((errno.EINVAL, f"{what} ({error!r})")))
        finally:
            os._exit(127)  # also if no process reads the pipe any more

    # ---- the fork server -------------------------------------------------------------------------------------

    def _do_preload(
        self, number: int, argv: list[str], environ: dict[str, str], unset: list[str], modules: list[str]
    ) -> None:
        """Start the fork server; end an earlier one."""
        from launcher.supervisor.fork_server_link import start

        self._drop_fork_server()
        closed = [name for fd, name in enumerate(("stdin", "stdout", "stderr")) if not os.get_inheritable(fd)]
        if closed:
            self._tell("preload_ended", number, "", f"{closed[0]} is closed", False, False)
            return
        try:
            self._fork_server = start(
                number, modules, lambda fds: self._fork_exec(argv, environ, unset, fds=fds), self._tell
            )
        except OSError as error:
            why = f"it cannot be started: {os.strerror(error.errno or 0).lower()}"
            self._tell("preload_ended", number, "", why, False, True)
            return
        self._poll.register(self._fork_server.fd, self._fork_server.wanted)

    def _do_preload_rest(self, number: int, changes: list[str], modules: list[str]) -> None:
        """Send the fork server more modules, and variables that are known by now."""
        if self._fork_server is not None and self._fork_server.number == number:
            self._fork_server.send("rest", str(len(changes)), *changes, *modules)

    def _drop_fork_server(self) -> None:
        """End the fork server and stop reading from it; it may take a while to end."""
        process, self._fork_server = self._fork_server, None
        if process is None:
            return
        process.kill()
        self._poll.unregister(process.fd)
        process.close()
        module = process.importing
        self._tell("preload_ended", process.number, module, "it was stopped", False, not module)
        if process.asked:
            self._exec_instead(process.asked, "the fork server was stopped")

    def _do_unload(self) -> None:
        """End the fork server; ranks continue."""
        self._drop_fork_server()

    def _do_prepare(self, count: int) -> None:
        """Let the fork server prepare for `count` ranks."""
        if self._fork_server is not None:
            self._fork_server.ask_prepare(count)

    def _do_fork(self, port: int, spare: int, ranks: list[Any]) -> None:
        """Fork ranks (each as for `_do_spawn`) from the fork server; exec them if that fails."""
        if self._fork_server is None:
            self._exec_instead(ranks, "the fork server has ended")
            return
        unset = ranks[0][3]
        self._fork_server.ask_fork(port, spare, _make_environ({}, unset), ranks)
        self._advance_fork_server()

    def _exec_instead(self, ranks: list[Any], reason: str) -> None:
        if self._kill_at_s is not None:
            return  # a stop came before they ran
        self._tell("exec_instead", reason)
        for rank in ranks:
            self._do_spawn(*rank)

    def _is_forking(self) -> bool:
        return self._fork_server is not None and bool(self._fork_server.asked)

    def _advance_fork_server(self) -> None:
        """Read from and write to the fork server; handle its end and its timeout."""
        process = self._fork_server
        if process is None:
            return
        for key, pid, time_ns, number in process.read():
            rank = _Rank(key, pid, -1, number.encode())
            self._ranks[key] = self._by_pid[pid] = rank
            self._tell("forked", key, pid, time_ns)
            if self._kill_at_s is not None:
                self._signal_rank(pid)
        process.write()
        refused, reason = process.take_refused()
        if process.is_gone:
            self._poll.unregister(process.fd)
            process.close()
            self._fork_server = None
            self._end_orphans(process.pid)
            why, is_of_process = process.end
            of = process.number, process.importing
            self._tell("preload_ended", *of, why, process.is_to_blame, is_of_process)
        else:
            self._poll.modify(process.fd, process.wanted)
        if refused:
            self._exec_instead(refused, reason)

    # ---- services --------------------------------------------------------------------------------------------

    def _do_serve(
        self, number: int, argv: list[str], environ: dict[str, str], unset: list[str], address: bytes
    ) -> None:
        """Start a service; its standard input and output are a connection to the Unix socket `address`."""
        from _socket import AF_UNIX, SOCK_CLOEXEC, SOCK_STREAM, socket

        try:
            connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
            try:
                connection.connect(address)
                fd = connection.fileno()
                pid, exec_read = self._fork_exec(argv, environ, unset, fds=[(fd, 0), (fd, 1)], is_service=True)
            finally:
                connection.close()
        except OSError as error:
            self._tell("service_ended", number, f"it cannot be started: {os.strerror(error.errno or 0).lower()}")
            return
        self._services[pid] = _Service(number, pid, exec_read)

    def _do_end_service(self, number: int) -> None:
        """End a service if it runs; kill it if it hangs."""
        for service in self._services.values():
            if service.number == number and service.kill_at_s is None:
                os.kill(service.pid, signal.SIGTERM)  # a child, not reaped, so the pid is its own
                service.kill_at_s = time.monotonic() + SERVICE_GRACE_S

    def _kill_services(self) -> None:
        """Kill services that have not ended after SIGTERM."""
        for service in self._services.values():
            if service.kill_at_s is not None and time.monotonic() >= service.kill_at_s:
                service.kill_at_s = None
                os.kill(service.pid, signal.SIGKILL)

    def _note_service_exit(self, service: _Service, status: int) -> None:
        failed = os.read(service.exec_fd, 4096)
        os.close(service.exec_fd)
        if failed:
            number, what = marshal.loads(failed)  # noqa: S302 (from our own fork)
            why = f"{what} cannot be started: {os.strerror(number).lower()}"
        else:
            why = f"it ended with status {status}" if status >= 0 else f"it was ended by signal {-status}"
        self._tell("service_ended", service.number, why)

    def _end_orphans(self, session: int) -> None:
        """Kill processes that imports of an ended fork server have started: they would count as a rank's."""
        from bootseer.linux import processes

        for process in processes.list_descendants(os.getpid()):
            if process.session in self._services or process.session in self._helpers:
                continue
            if process.pid in self._by_pid:
                continue  # a rank that it has forked, and that has no session of its own yet
            if process.session == session or not self._ranks:
                processes.send(process, signal.SIGKILL)

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _do_help(self, number: int, name: str, module: str, texts: list[str]) -> None:
        """Fork a helper, which sends one answer at its end."""
        from launcher.supervisor import helpers as supervisor_helpers

        try:
            helper = supervisor_helpers.start(number, name, module, texts)
        except OSError as error:
            self._tell("helper_ended", number, 0.0, {"error": os.strerror(error.errno or 0).lower()})
            return
        self._helpers[helper.pid] = helper

    def _do_end_help(self, number: int) -> None:
        """Send SIGTERM to a helper, if it runs."""
        for helper in self._helpers.values():
            if helper.number == number:
                os.kill(helper.pid, signal.SIGTERM)  # not reaped, so the pid is its own

    def _note_helper_exit(self, helper: Helper, cpu_s: float) -> None:
        from launcher.supervisor.helpers import read_answer

        self._tell("helper_ended", helper.number, cpu_s, read_answer(helper))

    def _do_signal(self, keys: list[int], signum: int) -> None:
        """Send a signal to ranks, also through shells; job control signals go to their process groups."""
        from bootseer.linux import processes

        for key in keys:
            rank = self._ranks.get(key)
            if rank is None or not rank.alive:
                continue
            if signum in _JOB_CONTROL:
                _kill_group(rank.pid, signum)
                continue
            below = processes.run_by_shell(rank.pid)
            if not below or processes.has_handler(rank.pid, signum):
                os.kill(rank.pid, signum)  # not reaped, so the pid is its own
            for process in below:
                processes.send(process, signum)

    def _do_stop(self, signum: int, grace_s: float) -> None:
        self._begin_stop(signum, grace_s)

    def _do_hasten(self, grace_s: float) -> None:
        """Shorten the wait of the current stop."""
        if self._kill_at_s is not None:
            self._set_kill_time(min(self._kill_at_s, time.monotonic() + grace_s))

    # ---- exits -----------------------------------------------------------------------------------------------

    def _read_exec(self, fd: int) -> None:
        for rank in self._ranks.values():
            if rank.exec_fd == fd:
                data = os.read(fd, 65536)
                self._poll.unregister(fd)
                os.close(fd)
                rank.exec_fd = -1
                if data:
                    number, what = marshal.loads(data)  # noqa: S302 (from our own fork)
                    self._tell("spawn_failed", rank.key, number, what)
                else:
                    self._tell("spawned", rank.key, rank.pid, time.monotonic_ns())
                return

    def _read_ready_execs(self) -> None:
        """Report all ranks that run by now: the agent knows of them before one ends."""
        starting = {rank.exec_fd for rank in self._ranks.values() if rank.exec_fd >= 0}
        for fd, _ in self._poll.poll(0) if starting else ():
            if fd in starting:
                self._read_exec(fd)

    def _reap(self) -> bool:
        """Reap ended children; return whether no relevant descendant is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if not pid:
                return self._only_apart()
            self._look_at_s = 0.0  # processes that it has left get the signal now
            if self._fork_server is not None and pid == self._fork_server.pid:
                self._fork_server.note_exit(os.waitstatus_to_exitcode(status))
                continue
            if (helper := self._helpers.pop(pid, None)) is not None:
                self._note_helper_exit(helper, usage.ru_utime + usage.ru_stime)
                continue
            if (service := self._services.pop(pid, None)) is not None:
                self._note_service_exit(service, os.waitstatus_to_exitcode(status))
                continue
            if self._is_forking() and pid not in self._by_pid:
                self._advance_fork_server()  # a rank ended at once; the fork server reported its pid before
            rank = self._by_pid.pop(pid, None)
            if rank is None:
                continue
            self._read_ready_execs()
            if rank.exec_fd >= 0:
                self._read_exec(rank.exec_fd)
            rank.alive = False
            code = os.waitstatus_to_exitcode(status)
            if code == 0:
                rank.linger_until_s = time.monotonic() + self._grace_s
            self._tell(
                "exited", rank.key, pid, code, time.monotonic_ns(), time.time(),
                usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024,
            )  # fmt: skip
            if code == 0 and (left := self._find_left(rank)):
                self._tell("lingering", rank.key, [(p.pid, p.name) for p in left])

    def _only_apart(self) -> bool:
        """Return whether only the fork server, services and helpers are left."""
        from bootseer.linux import processes

        if self._fork_server is None and not self._services and not self._helpers:
            return False
        children = set(processes.list_children(os.getpid()))
        return not children - self._list_apart()

    def _list_apart(self) -> set[int]:
        """Return the pids of services, helpers, the fork server and its standby processes.

        Call this after listing processes: the fork server reports standby processes before they become children.
        """
        self._advance_fork_server()
        apart = {*self._services, *self._helpers}
        if self._fork_server is not None:
            apart.update((self._fork_server.pid, *self._fork_server.parked))
        return apart

    def _list_below(self) -> list[Any]:
        """Return all descendants except those of `_list_apart` and their children."""
        from bootseer.linux import processes

        below = processes.list_descendants(os.getpid())
        apart = self._list_apart()
        if not apart:
            return below
        for process in below:  # parents come before their children
            if process.parent in apart:
                apart.add(process.pid)
        return [process for process in below if process.pid not in apart]

    def _find_left(self, rank: _Rank) -> list[Any]:
        """Return descendants of an ended rank: its session, or orphans that were started with its RANK."""
        from bootseer.linux import processes

        live = {other.pid for other in self._by_pid.values()}
        children = processes.list_children(os.getpid())
        if (live | self._list_apart()).issuperset(children):
            return []  # orphans of the rank would be children of the supervisor; saves listing all processes
        below = self._list_below()
        ended = [each for each in self._ranks.values() if each.linger_until_s is not None and each is not rank]
        if not live and not ended:
            return below  # their rank does not matter any more
        sessions, numbers = live | {each.pid for each in ended}, {each.number for each in ended}
        killed = {pid for each in ended for pid in each.killed}  # without an environment while they end
        found = [p for p in below if p.session == rank.pid]
        for process in below:
            if process.session not in (rank.pid, *sessions) and process.pid not in killed:
                number = processes.read_environ(process.pid).get(b"RANK", b"")
                # A process of an unknown rank is left by any of the ranks, once all have ended.
                if (number and number == rank.number) or not (live or number in numbers):
                    found.append(process)
        return found

    def _advance(self, no_children: bool) -> None:
        now_s = time.monotonic()
        if self._kill_at_s is not None:
            self._advance_stop(now_s, no_children)
            return
        for rank in list(self._ranks.values()):
            if rank.linger_until_s is None:
                continue
            left = [] if no_children else self._find_left(rank)
            if left and now_s >= rank.linger_until_s + UNKILLABLE_AFTER_S:
                left = []  # they wait in the kernel
            if left and now_s >= rank.linger_until_s:
                from bootseer.linux import processes

                for process in left:
                    rank.killed[process.pid] = process.name
                    processes.send(process, signal.SIGKILL)
            if not left:
                del self._ranks[rank.key]
                self._tell("tree_ended", rank.key, list(rank.killed.items()))

    # ---- stop ------------------------------------------------------------------------------------------------
    #
    # Only ranks get the signal: until they have ended they may need their children (data loader workers, savers
    # of checkpoints). Processes that a rank leaves become children of the supervisor, and get the signal then.

    def _begin_stop(self, signum: int, grace_s: float) -> None:
        for rank in self._ranks.values():
            rank.linger_until_s = None
            self._killed.update(rank.killed)
        self._stop_signum = signum
        self._set_kill_time(time.monotonic() + grace_s)
        self._look_at_s = 0.0
        self._signalled.clear()
        self._seen.clear()
        self._shells = set()
        for pid in self._by_pid:
            self._signal_rank(pid)

    def _signal_rank(self, pid: int) -> None:
        """Send the signal of the stop to a rank that is not reaped."""
        from bootseer.linux import processes

        if processes.is_shell(pid):
            self._shells.add(pid)
        try:
            os.kill(pid, self._stop_signum)
            os.kill(pid, signal.SIGCONT)  # a stopped process could not act on it
        except OSError:
            pass  # a rank that has changed its user
        _kill_group(pid, signal.SIGCONT)  # its children may have been stopped with it

    def _set_kill_time(self, moment_s: float) -> None:
        self._kill_at_s = moment_s
        self._give_up_at_s = moment_s + UNKILLABLE_AFTER_S

    def _advance_stop(self, now_s: float, no_children: bool) -> None:
        assert self._kill_at_s is not None
        if no_children:
            self._end_stop([])
        elif now_s >= self._kill_at_s:
            self._kill_all(now_s)
        elif now_s >= self._look_at_s:
            self._signal_left(now_s)

    def _signal_left(self, now_s: float) -> None:
        """Send the signal of the stop to processes that ended ranks have left."""
        from bootseer.linux import processes

        due = {(process.pid, process.start_ticks): process for process in self._list_due()}
        is_new = False
        for which in due.keys() - self._signalled:
            if which not in self._seen:
                is_new = True
                continue
            self._signalled.add(which)
            processes.send(due[which], self._stop_signum)
            processes.send(due[which], signal.SIGCONT)
        self._look_at_s = now_s + (SETTLED_AFTER_S if is_new else LOOK_EVERY_S)
        self._seen = set(due)

    def _list_due(self) -> list[Process]:
        """Return the processes besides ranks that get the signal: left by ended ranks, or run by shells."""
        from bootseer.linux import processes

        due = []
        numbers = {rank.number for rank in self._by_pid.values()}
        orphans = set(processes.list_children(os.getpid())) - self._by_pid.keys()
        for pid in orphans - self._list_apart() if orphans else ():
            process = processes.read_process(pid)
            if process is None or process.session in self._by_pid:
                continue
            # The environment of a daemon in its own session identifies its rank.
            if not numbers or processes.read_environ(pid).get(b"RANK", b"") not in {*numbers, b""}:
                due += [process, *processes.run_by_shell(pid)]
        for pid in self._shells & self._by_pid.keys():
            due += processes.run_by_shell(pid)
        return due

    def _kill_all(self, now_s: float) -> None:
        from bootseer.linux import processes

        below = self._list_below()
        if now_s >= self._give_up_at_s:
            self._end_stop([(p.pid, p.name, processes.wait_channel(p.pid)) for p in below])
            return
        numbers = {pid: rank.number for pid, rank in self._by_pid.items()}
        for process in below:  # parents come before their children
            if process.pid not in self._by_pid:
                number = numbers.get(process.parent) or numbers.get(process.session)
                number = number or processes.read_environ(process.pid).get(b"RANK", b"")
                numbers[process.pid] = number
                whose = f" of rank {number.decode(errors='replace')}" if number.isdigit() else ""
                # A later pass knows less: its rank is gone, and so is the environment of what is ending.
                self._killed.setdefault(process.pid, process.name + whose)
            processes.send(process, signal.SIGKILL)

    def _end_stop(self, stuck: list[tuple[int, str, str]]) -> None:
        if self._is_forking():
            self._drop_fork_server()  # ranks of this attempt must not start later
        self._kill_at_s = None
        for rank in self._ranks.values():
            if rank.exec_fd >= 0:  # it hangs before its program; the pipe's end would wake the loop for ever
                self._poll.unregister(rank.exec_fd)
                os.close(rank.exec_fd)
        self._ranks.clear()
        self._by_pid.clear()
        self._tell("stopped", list(self._killed.items()), stuck)
        self._killed.clear()


def _make_environ(environ: dict[str, str], unset: Iterable[str]) -> dict[str, str]:
    full = dict(os.environ)
    for name in unset:
        full.pop(name, None)
    full.update(environ)
    return full


def _copy_above(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 8)


def _kill_group(leader: int, signum: int) -> None:
    try:
        os.killpg(leader, signum)
    except OSError:
        pass
