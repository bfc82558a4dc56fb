"""The composition root of bootrun: command line in, exit status out; it makes and connects all objects.

Modules that the first rank does not need (report, start line, networking in single-node jobs) are imported after
the ranks run, or never.
"""

from __future__ import annotations

import os
import time

from bootseer.errors import BootseerError
from bootseer.light_stdlib import signal
from bootseer.light_typing import TYPE_CHECKING
from bootseer.secret import find_secret
from launcher.agent.agent import Agent
from launcher.agent.node import Node
from launcher.base.children import reap_orphans
from launcher.base.helper_process import has_detached, kill_ending_processes, wait_for_detached
from launcher.base.loop import Loop
from launcher.cli.quick_parse import parse
from launcher.ranks.output.console import Console
from launcher.ranks.port import NextPort
from launcher.rendezvous import messages
from launcher.spec import LaunchSpec, build_spec
from launcher.supervisor.client import SupervisorClient, SupervisorEvents
from launcher.supervisor.supervisor import Pipes

if TYPE_CHECKING:
    from launcher.agent.networked import Networked

# The coordinator waits up to 5 s until its members have received the end.
LINK_CLOSE_S = 6.0


def main(argv: list[str], pipes: Pipes) -> int:
    """Run a job and return bootrun's exit status."""
    began_ns = time.monotonic_ns()
    loop = Loop()
    console = Console(loop)
    guard = SupervisorClient(loop, pipes)
    try:
        spec = build_spec(parse(argv, os.environ), os.environ)
        os.environ.update(spec.tuning)  # helper processes inherit it
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
        is_awaited = os.getpid() == 1 and has_detached()
        if is_awaited:
            console.say(
                "bootrun is process 1 of this container: waiting for uploads to finish (SIGTERM ends them)"
            )
        console.drain()
        console.close()
        if is_awaited:
            wait_for_detached()


def run_job(loop: Loop, console: Console, guard: SupervisorClient, spec: LaunchSpec, began_ns: int) -> int:
    """Connect agent, supervisor and coordinator, and run the loop until the agent has ended."""
    node = Node(loop, console, guard, spec, began_ns)
    agent = Agent(loop, spec, node, NextPort(spec.port_range))
    node.agent = agent
    provisions = node.provisions
    guard.listen(
        SupervisorEvents(
            spawned=agent.processes.on_spawned,
            spawn_failed=agent.processes.on_spawn_failed,
            exited=agent.processes.on_exited,
            lingering=agent.processes.on_lingering,
            tree_ended=agent.processes.on_tree_ended,
            stopped=agent.on_stopped,
            gone=agent.on_supervisor_gone,
            preload_ready=provisions.preloader.on_ready,
            preload_ended=provisions.preloader.on_ended,
            forked=agent.processes.on_forked,
            exec_instead=provisions.preloader.on_exec_instead,
            service_ended=provisions.on_service_ended,
            helper_ended=provisions.on_helper_ended,
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
        kill_ending_processes()
    return agent.status


def install_signals(loop: Loop, spec: LaunchSpec, agent: Agent) -> None:
    """Handle signals that end the job, forward others to the ranks; keep SIGHUP ignored under nohup."""
    for signum in spec.signals_to_handle:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            loop.add_signal_handler(signum, agent.on_signal, signum)
    for signum in spec.forward_signals:
        loop.add_signal_handler(signum, agent.on_forward, signum)
    if os.getpid() == 1:
        # First process of a container: orphans of other processes become bootrun's children.
        loop.add_signal_handler(signal.SIGCHLD, reap_orphans)


def connect(
    loop: Loop,
    console: Console,
    spec: LaunchSpec,
    agent: Agent,
    guard: SupervisorClient,
    node: Node,
    secret: bytes | None,
) -> Networked | None:
    """Join the job: in this process, or over the network."""
    provisions = node.provisions
    join = messages.Join(
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
        from launcher.agent.networked import Networked
        from launcher.rendezvous.same_job import describe

        join = join._replace(runs=describe(*spec.entry, node.host))
        networked = Networked(
            loop,
            console,
            spec,
            agent,
            guard,
            join,
            provisions.resolve,
            provisions.spoiled,
            provisions.environment.when_known,
            provisions.environment.look_again,
            node.event_file,
            provisions.peers,
            secret,
        )
        provisions.readiness = networked.head_start
        node.job = networked
        return networked
    from launcher.coordinator.host import JobHost, LocalLink
    from launcher.coordinator.job import Job

    job = Job(spec.job_rules())
    node.job = job
    link = LocalLink(
        loop, JobHost(loop, job, resolve=provisions.resolve, spoiled=provisions.spoiled), agent.on_message
    )
    agent.connect(guard, link)
    link.send(join)
    return None
