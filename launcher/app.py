"""The composition root of bootrun: command line in, exit status out; every object is made and joined here.

What the first rank does not need (report, start line, networking of jobs on one node) is imported after the ranks
run, or never.
"""

from __future__ import annotations

import gc
import os
import signal
import time

from bootseer.errors import BootseerError
from bootseer.light_typing import TYPE_CHECKING
from bootseer.secret import find_secret
from launcher.agent import Agent
from launcher.cli import parse
from launcher.guard import Pipes
from launcher.guard_client import GuardClient, GuardEvents
from launcher.loop import Loop
from launcher.node import Node
from launcher.ranks.console import Console
from launcher.ranks.port import hold_any
from launcher.rendezvous.messages import Join
from launcher.service import has_left, wait_for_left
from launcher.spec import LaunchSpec, build_spec

if TYPE_CHECKING:
    from launcher.networked import Networked

# The coordinator waits up to 5 s for its members to hear the end.
LINK_CLOSE_S = 6.0


def main(argv: list[str], pipes: Pipes) -> int:
    """Runs a job and returns bootrun's exit status."""
    began_ns = time.monotonic_ns()
    gc.disable()  # a start allocates little and keeps all of it
    loop = Loop()
    console = Console(loop)
    guard = GuardClient(loop, pipes)
    try:
        spec = build_spec(parse(argv, os.environ), os.environ)
        for warning in () if spec.quiet else spec.warnings:
            console.say(f"warning: {warning}")
        for note in () if spec.quiet else spec.notes:
            console.say(note)
        return run_job(loop, console, guard, spec, began_ns)
    except BootseerError as error:
        console.say(f"error: {error}")
        return error.exit_status
    finally:
        guard.close()
        is_awaited = os.getpid() == 1 and has_left()
        if is_awaited:
            console.say(
                "bootrun is the first process here, and waits for what is being published (SIGTERM ends that)"
            )
        console.drain()
        console.close()
        if is_awaited:
            wait_for_left()


def run_job(loop: Loop, console: Console, guard: GuardClient, spec: LaunchSpec, began_ns: int) -> int:
    """Joins agent, guard and coordinator, and runs the loop until the agent has ended."""
    node = Node(loop, console, guard, spec, began_ns)
    agent = Agent(loop, spec, node, hold_any(spec.port_range))
    node.agent = agent
    guard.listen(
        GuardEvents(
            spawned=agent.on_spawned,
            spawn_failed=agent.on_spawn_failed,
            exited=agent.on_exited,
            lingering=agent.on_lingering,
            tree_ended=agent.on_tree_ended,
            stopped=agent.on_stopped,
            gone=agent.on_guard_gone,
            preload_ready=node.preloader.on_ready,
            preload_ended=node.preloader.on_ended,
            forked=agent.on_forked,
            exec_instead=node.preloader.on_exec_instead,
            service_ended=node.on_service_ended,
            helper_ended=node.on_helper_ended,
        )
    )
    guard.set_grace(spec.shutdown_timeout_s)
    guard.set_handled(spec.signals_to_handle)
    install_signals(loop, spec, agent)
    networked: Networked | None = None
    try:
        node.make_run_dir()
        secret = None if spec.is_single else find_secret(os.environ, spec.conf.get("secret_file"))
        node.begin(secret)
        networked = connect(loop, console, spec, agent, guard, node, secret)
        while not agent.is_ended:
            loop.run_once()
        give_up_s = loop.time() + LINK_CLOSE_S
        while not agent.is_link_closed and loop.time() < give_up_s:
            loop.run_once(0.1)
    finally:
        if networked is not None:
            networked.close()
        node.close()
    return agent.status


def install_signals(loop: Loop, spec: LaunchSpec, agent: Agent) -> None:
    """Handled signals end the job, forwarded ones go to the ranks; SIGHUP that nohup ignores stays ignored."""
    for signum in spec.signals_to_handle:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            loop.add_signal_handler(signum, agent.on_signal, signum)
    for signum in spec.forward_signals:
        loop.add_signal_handler(signum, agent.on_forward, signum)
    if os.getpid() == 1:
        # First process of a container: orphans of others become our children.
        loop.add_signal_handler(signal.SIGCHLD, _reap_orphans)


def _reap_orphans() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def connect(
    loop: Loop,
    console: Console,
    spec: LaunchSpec,
    agent: Agent,
    guard: GuardClient,
    node: Node,
    secret: bytes | None,
) -> Networked | None:
    """Joins the job: alone in this process, or over the network."""
    join = Join(
        run_id=spec.run_id,
        host=node.host,
        address=spec.local_addr or ("localhost" if spec.is_single else ""),
        pid=os.getpid(),
        node_rank=-1 if spec.node_rank is None else spec.node_rank,
        role=spec.role,
        local_world_size=spec.nproc,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        max_restarts=spec.max_restarts,
        master_port=agent.port,
        has_identity=spec.max_nodes > 1 and (spec.entry.mode != "program" or spec.image is not None),
    )
    if not spec.is_single:
        from launcher.networked import Networked
        from launcher.rendezvous.same_job import describe

        join = join._replace(runs=describe(*spec.entry, node.host))
        networked = Networked(
            loop,
            console,
            spec,
            agent,
            guard,
            join,
            node.resolve,
            node.spoiled,
            node.when_program_known,
            node.workplace.look_again,
            node.event_file,
            node.peers,
            secret,
        )
        node.head_start = networked.head_start
        node.job_statistics = networked.statistics
        return networked
    from launcher.job import Job
    from launcher.rendezvous.host import JobHost, LocalLink

    job = Job(spec.job_rules())
    node.job_statistics = job.statistics
    link = LocalLink(loop, JobHost(loop, job, resolve=node.resolve, spoiled=node.spoiled), agent.on_message)
    agent.connect(guard, link)
    link.send(join)
    return None
