"""Training jobs on a virtual clock, as supervision sees them: healthy ones, and such as stand still at a moment.

A job is a row of phases; in each of them every rank uses cores and bytes at a steady rate, so facts at any moment
are a multiplication. Training, evaluations, checkpoints, stalls of data and compilations follow each other by
chance, all from one seed. Nodes tell of their ranks late, some for a while very late.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from launcher.base.facts import RankFacts

LOOK_S = 2.0
CADENCES_S = (0.05, 2.0, 15.0)
WORLDS = (2, 2, 4, 4, 8, 8, 8, 16, 32, 64)
BLOCK = 2000  # steps whose durations are drawn once for a job and used again and again
MORE_STEPS = 6  # made before a hang may begin
TAIL_S = 1.0  # some threads work on for that long after a hang has begun

HANGS = ("all-idle", "one-idle", "one-busy", "frozen", "stuck", "all-busy")
TRAPS = (
    "rank 0 evaluates, prints and reads nothing",
    "stalls of data, silent and long",
    "long stalls of one rank while the rest spins",
    "generation elsewhere, all ranks idle",
    "evaluation whose ranks end far apart",
    "no rank ends for a while after the last step",
    "prints only, evaluates for long",
    "a server that prints",
    "a silent server",
)


class Plan(NamedTuple):
    """What a job is like."""

    step_s: float
    sigma: float  # of the lognormal durations of steps
    world: int
    per_node: int
    spins: bool  # ranks that wait for others spin, else they sleep
    cores: tuple[float, ...]  # that each rank uses while it trains
    io_bps: tuple[float, ...]
    noise_cores: tuple[float, ...]  # of threads that never end
    noise_bps: tuple[float, ...]
    counted: bool  # steps are counted
    log_every: int  # steps between lines of rank 0
    bar: bool  # a thread prints, whatever else happens
    start_s: float
    compile_s: float  # again after some steps; 0: never
    checkpoint_every: int
    checkpoint_s: float
    checkpoint_by_all: bool
    evaluate_every: int
    evaluate_s: float
    evaluate_by_all: bool
    evaluate_apart: float  # how unlike the ranks' parts are
    evaluate_io: bool
    stalls_per_h: float
    stall_s: float  # median
    stall_sigma: float
    lags_s: tuple[float, ...]  # of each node's reports
    very_late: bool  # now and then
    trap: str = ""


def draw_plan(random: Random, step_s: float, world: int | None = None, trap: str = "") -> Plan:
    """A job of about this cadence."""
    ranks = random.choice(WORLDS) if world is None else world
    per_node = min(random.choice((2, 8)), ranks)
    kind = random.choice(("gpu", "gpu", "cpu", "blocking"))
    low, high = {"gpu": (0.9, 6.0), "cpu": (0.8, 4.0), "blocking": (0.03, 0.2)}[kind]
    base = random.uniform(low, high)
    io = random.choice((0.0, 1e4, 1e6, 5e7))
    counted = random.random() < 0.85
    every_s = random.uniform(60, 1200)
    evaluate_every_s = random.uniform(200, 4000)
    by_all = random.random() < 0.7
    plan = Plan(
        step_s=step_s * random.uniform(0.7, 1.4),
        sigma=random.uniform(0.03, 0.4),
        world=ranks,
        per_node=per_node,
        spins=kind == "gpu",
        cores=tuple(base * random.uniform(0.8, 1.2) for _ in range(ranks)),
        io_bps=tuple(io * random.uniform(0.8, 1.2) for _ in range(ranks)),
        noise_cores=tuple(random.uniform(0.0, 0.002 if kind == "blocking" else 0.006) for _ in range(ranks)),
        noise_bps=tuple(random.uniform(20.0, 1500.0) for _ in range(ranks)),
        counted=counted,
        log_every=max(1, round(random.uniform(1, 20) / step_s)) if counted else max(1, round(10 / step_s)),
        bar=counted and random.random() < 0.2,
        start_s=random.uniform(5, 300),
        compile_s=random.uniform(20, 400) if random.random() < 0.4 else 0.0,
        checkpoint_every=max(5, round(every_s / step_s)),
        checkpoint_s=min(random.lognormvariate(2.3, 0.9), 120.0),
        checkpoint_by_all=random.random() < 0.5,
        evaluate_every=max(7, round(evaluate_every_s / step_s)),
        evaluate_s=min(random.lognormvariate(4.0, 0.9), 600.0),
        evaluate_by_all=by_all,
        evaluate_apart=random.uniform(0.0, 0.25),
        evaluate_io=not by_all or random.random() < 0.5,
        stalls_per_h=random.choice((0.0, 1.0, 6.0)),
        stall_s=random.uniform(0.5, 2.0),
        stall_sigma=0.9,
        lags_s=tuple(random.uniform(0.0, 1.2) for _ in range((ranks + per_node - 1) // per_node)),
        very_late=random.random() < 0.3,
        trap=trap,
    )
    return _trap(plan, random) if trap else plan


def tame(plan: Plan) -> Plan:
    """The job without what nobody tells from a hang: long silent stalls, printing threads as busy as the work."""
    return plan._replace(stall_sigma=0.4, bar=plan.bar and plan.cores[0] > 0.8)


def _trap(plan: Plan, random: Random) -> Plan:
    """Makes a healthy job one that looks like a hang at times."""
    plan = plan._replace(counted=True, spins=False)
    if plan.trap == TRAPS[0]:
        return plan._replace(evaluate_by_all=False, evaluate_io=False, evaluate_s=random.uniform(30, 200))
    if plan.trap == TRAPS[1]:
        return plan._replace(stalls_per_h=6.0, stall_s=8.0, stall_sigma=1.0)
    if plan.trap == TRAPS[2]:
        return plan._replace(stalls_per_h=6.0, stall_s=8.0, stall_sigma=1.0, spins=True)
    if plan.trap == TRAPS[4]:
        return plan._replace(
            evaluate_by_all=True, evaluate_io=False, evaluate_apart=0.6, evaluate_s=random.uniform(60, 400)
        )
    if plan.trap == TRAPS[6]:
        return plan._replace(counted=False, bar=False, evaluate_by_all=True, evaluate_io=True, evaluate_s=500.0)
    if plan.trap in TRAPS[7:]:
        return plan._replace(counted=False, bar=False)
    return plan


class _Phase:
    """A stretch of time with steady rates."""

    __slots__ = (
        *("start_s", "end_s", "cores", "io_bps", "out_bps", "used_cores", "used_io", "used_out"),
        *("steps", "count", "last_s", "states", "waits"),
    )

    def __init__(self, before: _Phase | None, start_s: float, end_s: float, doing: _Doing) -> None:
        self.start_s, self.end_s = start_s, end_s
        self.cores, self.io_bps, self.out_bps = doing.cores, doing.io_bps, doing.out_bps
        self.states, self.waits = doing.states, doing.waits
        self.steps: list[float] = []
        self.count, self.last_s = 0, -1.0
        zeros = [0.0] * len(doing.cores)
        self.used_cores, self.used_io, self.used_out = zeros, zeros, zeros
        if before is not None:
            past_s = before.end_s - before.start_s
            self.used_cores = [u + c * past_s for u, c in zip(before.used_cores, before.cores, strict=True)]
            self.used_io = [u + c * past_s for u, c in zip(before.used_io, before.io_bps, strict=True)]
            self.used_out = [u + c * past_s for u, c in zip(before.used_out, before.out_bps, strict=True)]
            self.count = before.count + len(before.steps)
            self.last_s = before.steps[-1] if before.steps else before.last_s


class _Doing(NamedTuple):
    """What all ranks do in a phase."""

    cores: Sequence[float]
    io_bps: Sequence[float]
    out_bps: Sequence[float]
    states: Sequence[str]
    waits: Sequence[str]


class Hanging(NamedTuple):
    """A hang that was put into a job."""

    kind: str  # of HANGS
    at_s: float
    rank: int  # that is apart from the rest; -1: none
    longest_s: float  # healthy gap before, also the one that it fell into


class Job:
    """One job from its start on, healthy unless `hang` is given."""

    def __init__(self, plan: Plan, random: Random, hang: str = "", hang_after_s: float = 0.0) -> None:
        self.plan = plan
        self.hanging: Hanging | None = None
        self.ended: list[int] = []  # ranks that have ended
        self._random = random
        self._hang, self._hang_after_s, self._hang_at_s = hang, hang_after_s, -1.0
        self._longest_s = 0.0
        draw = random.lognormvariate
        self._each_s = [plan.step_s * draw(0.0, plan.sigma) for _ in range(BLOCK)]
        self._each_at = 0
        self._late_by_s = [
            random.uniform(0.0, 0.2 * plan.step_s) for _ in range(plan.world)
        ]  # of each rank's steps
        self._clock_s = [random.uniform(-0.02, 0.02) for _ in plan.lags_s]
        self._held_until_s = [0.0] * len(plan.lags_s)
        self._facts: list[RankFacts | None] = [None] * plan.world
        self._ending_s: float | None = None
        self._ends_s: list[float] = []
        self._script = self._phases()
        self._live: list[_Phase] = [next(self._script)]

    def look(self, now_s: float) -> list[RankFacts]:
        """The newest facts of all ranks at that moment; moments never fall."""
        plan, live = self.plan, self._live
        while live[-1].end_s <= now_s:
            live.append(next(self._script))
        while len(live) > 1 and live[0].end_s < now_s - 5.0:
            del live[0]
        if self._ending_s is not None:
            self.ended = [rank for rank, end_s in enumerate(self._ends_s) if end_s <= now_s]
        for node, lag_s in enumerate(plan.lags_s):
            if now_s < self._held_until_s[node]:
                continue
            if plan.very_late and self._random.random() < LOOK_S / 3000:
                self._held_until_s[node] = now_s + self._random.uniform(4, 40)
                continue
            at_s = max(now_s - lag_s, 0.0)
            phase = next((phase for phase in reversed(live) if phase.start_s <= at_s), live[0])
            for rank in range(node * plan.per_node, min((node + 1) * plan.per_node, plan.world)):
                self._facts[rank] = self._see(phase, rank, at_s, self._clock_s[node])
        gone = set(self.ended)
        return [facts for rank, facts in enumerate(self._facts) if facts is not None and rank not in gone]

    def finish(self, now_s: float) -> None:
        """The job ends: no more steps, ranks end one after the other."""
        random = self._random
        self._ending_s = now_s
        writes_s = random.uniform(1, 60)
        first_s = now_s + writes_s + random.uniform(0.5, 8)
        if self.plan.trap == TRAPS[5]:
            first_s += random.uniform(10, 60)
        self._ends_s = [first_s + random.uniform(0, 60) for _ in self._ranks()]
        self._ends_s[random.randrange(self.plan.world)] = first_s
        self._cut(now_s)
        self._script = self._wind_down(self._live[-1], writes_s)

    def _see(self, phase: _Phase, rank: int, at_s: float, clock_s: float) -> RankFacts:
        plan = self.plan
        past_s = min(at_s, phase.end_s) - phase.start_s
        late_s = self._late_by_s[rank]
        made = bisect_right(phase.steps, at_s - late_s) if phase.steps else 0
        count = phase.count + made
        step_at_s = phase.steps[made - 1] if made else phase.last_s
        if step_at_s >= 0.0 and step_at_s + late_s > at_s:  # one of the phase before, still on its way
            count, step_at_s = count - 1, step_at_s - plan.step_s
        output = phase.used_out[rank] + phase.out_bps[rank] * past_s
        if rank == 0:
            output += 80 * (count // plan.log_every)
        counted = plan.counted and count > 0
        return RankFacts(
            rank,
            at_s + clock_s,
            count if counted else -1,
            step_at_s + late_s + clock_s if counted else -1.0,
            int(output),
            phase.used_cores[rank] + phase.cores[rank] * past_s,
            int(phase.used_io[rank] + phase.io_bps[rank] * past_s + output),
            phase.states[rank],
            phase.waits[rank],
        )

    # What a job does.

    def _phases(self) -> Iterator[_Phase]:
        """All phases, one after the other, up to a hang."""
        phase: _Phase | None = None
        for doing, for_s, steps in self._life():
            start_s = phase.end_s if phase is not None else 0.0
            phase = _Phase(phase, start_s, start_s + for_s, doing)
            if steps:
                self._add_steps(phase, steps)
            if self._hang:
                if self._hang_at_s < 0.0 and phase.count + len(phase.steps) >= MORE_STEPS:
                    self._hang_at_s = phase.steps[-1] + self._hang_after_s
                if 0.0 <= self._hang_at_s < phase.end_s:
                    yield from self._stand(phase)
                    return
            yield phase

    def _add_steps(self, phase: _Phase, steps: int) -> None:
        at_s, each = phase.start_s, self._each_s
        for _ in range(steps):
            at_s += each[self._each_at]
            phase.steps.append(at_s)
            self._each_at = (self._each_at + 1) % BLOCK
        phase.end_s = at_s
        if self._hang:
            before_s = phase.last_s
            for moment_s in phase.steps:
                if before_s >= 0.0 and (self._hang_at_s < 0.0 or moment_s <= self._hang_at_s):
                    self._longest_s = max(self._longest_s, moment_s - before_s)
                before_s = moment_s

    def _life(self) -> Iterator[tuple[_Doing, float, int]]:
        """What is done, for how long, with how many steps (their time counts then)."""
        plan, random = self.plan, self._random
        if plan.trap in TRAPS[7:]:
            yield from self._serve()
        # Imports and downloads, each rank its own way.
        until_s = plan.start_s
        while until_s > 0:
            for_s = random.uniform(2, 20)
            until_s -= for_s
            yield self._do([random.choice((0.0, 0.3, 1.0)) for _ in self._ranks()], 1e6, out=20.0), for_s, 0
        if plan.compile_s:
            yield from self._compile(plan.compile_s)
        done, next_stall = 0, self._next_stall()
        compile_at = random.randint(1, 3000) if plan.compile_s else -1
        while True:
            events = [plan.checkpoint_every - done % plan.checkpoint_every]
            events.append(plan.evaluate_every - done % plan.evaluate_every)
            events.append(max(1, round(120 / plan.step_s)))
            if next_stall > 0:
                events.append(next_stall)
            if compile_at > done:
                events.append(compile_at - done)
            steps = min(events)
            yield self._train(), 0.0, steps
            done += steps
            if done == compile_at:
                yield from self._compile(plan.compile_s * random.uniform(0.2, 1.0))
            if next_stall > 0:
                next_stall -= steps
                if not next_stall:
                    yield from self._stall()
                    next_stall = self._next_stall()
            if done % plan.checkpoint_every == 0:
                yield from self._checkpoint()
            if done % plan.evaluate_every == 0:
                yield from self._evaluate()

    def _ranks(self) -> range:
        return range(self.plan.world)

    def _do(
        self,
        part: Sequence[float],  # of what each rank uses while it trains; 0: only its noise
        io_bps: float,
        out: float = 0.0,
        state: str = "",
        spinning: bool = False,  # those with 0 spin instead
    ) -> _Doing:
        plan, bar = self.plan, 0.01 if self.plan.bar else 0.0
        cores, io, states = [], [], []
        for rank, share in enumerate(part):
            own = share * plan.cores[rank] if share else self._random.uniform(0.97, 1.0) if spinning else 0.0
            cores.append(own + plan.noise_cores[rank] + bar)
            io.append((io_bps * share if share else 0.0) + plan.noise_bps[rank])
            states.append(state or ("R" if own > 0.5 else "S"))
        waits = ["" if share or spinning else "futex_wait_queue" for share in part]
        outs = [out + (120.0 if plan.bar else 0.0)] * len(part)
        return _Doing(cores, io, outs, states, waits)

    def _train(self) -> _Doing:
        plan, random = self.plan, self._random
        return self._do([random.uniform(0.7, 1.3) for _ in self._ranks()], plan.io_bps[0])

    def _compile(self, for_s: float) -> Iterator[tuple[_Doing, float, int]]:
        cores = [self._random.uniform(0.9, 4.0) / self.plan.cores[rank] for rank in self._ranks()]
        yield self._do(cores, self._random.choice((0.0, 1e5))), for_s, 0

    def _next_stall(self) -> int:
        per_h = self.plan.stalls_per_h
        return max(1, round(self._random.expovariate(per_h) * 3600 / self.plan.step_s)) if per_h else 0

    def _stall(self) -> Iterator[tuple[_Doing, float, int]]:
        """One rank waits for its data, the others for it."""
        plan, random = self.plan, self._random
        for_s = random.lognormvariate(0.0, plan.stall_sigma) * plan.stall_s
        doing = self._do([0.0] * plan.world, 0.0, spinning=plan.spins)
        slow = random.randrange(plan.world)
        cores = list(doing.cores)
        cores[slow] = plan.noise_cores[slow]
        yield doing._replace(cores=cores), for_s, 0

    def _checkpoint(self) -> Iterator[tuple[_Doing, float, int]]:
        plan, random = self.plan, self._random
        for_s = plan.checkpoint_s * random.lognormvariate(0.0, 0.3)
        part = [random.uniform(0.2, 0.8) if plan.checkpoint_by_all or not rank else 0.0 for rank in self._ranks()]
        copying_s = min(0.2 * for_s, 5.0)
        yield self._do(part, 0.0, spinning=plan.spins), copying_s, 0  # from the GPU, before anything is written
        yield self._do(part, random.uniform(5e7, 1e9), spinning=plan.spins), for_s - copying_s, 0

    def _evaluate(self) -> Iterator[tuple[_Doing, float, int]]:
        plan, random = self.plan, self._random
        if plan.trap == TRAPS[3]:
            yield self._do([0.0] * plan.world, 0.0), random.uniform(20, 120), 0
            return
        whole_s = plan.evaluate_s * random.lognormvariate(0.0, 0.15)
        ends_s = [whole_s * (1 - random.uniform(0, plan.evaluate_apart)) for _ in self._ranks()]
        if not plan.evaluate_by_all:
            ends_s = [whole_s, *(0.0 for _ in ends_s[1:])]
        at_s = 0.0
        io = max(plan.io_bps[0], 3e5) if plan.evaluate_io else 0.0
        while at_s < max(ends_s):
            for_s = min(random.uniform(3, 15), max(ends_s) - at_s)
            pause = random.random() < 0.1  # batches of the next part are prepared elsewhere
            part = [0.0 if end_s <= at_s or pause else random.uniform(0.3, 1.2) for end_s in ends_s]
            yield self._do(part, io, spinning=plan.spins), min(for_s, 5.0) if pause else for_s, 0
            at_s += min(for_s, 5.0) if pause else for_s

    def _serve(self) -> Iterator[tuple[_Doing, float, int]]:
        """Requests come for a while, then none for hours; without end."""
        random = self._random
        out = 200.0 if self.plan.trap == TRAPS[7] else 0.0
        while True:
            for _ in range(random.randint(1, 60)):
                yield (
                    self._do([random.uniform(0.2, 1.0) for _ in self._ranks()], 1e5, out),
                    random.uniform(0.2, 5),
                    0,
                )
                yield self._do([0.0] * self.plan.world, 0.0), random.expovariate(1 / 20), 0
            yield self._do([0.0] * self.plan.world, 0.0), random.uniform(100, 7200), 0

    def _wind_down(self, phase: _Phase, writes_s: float) -> Iterator[_Phase]:
        """Rank 0 writes for a while, then all that is left waits for what sends its metrics."""
        random, world = self._random, self.plan.world
        part = [random.uniform(0.2, 0.8), *(0.0 for _ in range(world - 1))]
        phase = _Phase(phase, phase.end_s, phase.end_s + writes_s, self._do(part, 1e8))
        yield phase
        while True:
            phase = _Phase(phase, phase.end_s, phase.end_s + 1000, self._do([0.0] * world, 0.0))
            yield phase

    # How a job hangs.

    def _cut(self, at_s: float) -> None:
        """Nothing of what was planned happens after that moment."""
        for phase in self._live:
            if phase.end_s > at_s:
                phase.end_s = max(at_s, phase.start_s)
                phase.steps = phase.steps[: bisect_right(phase.steps, at_s)]

    def _stand(self, phase: _Phase) -> Iterator[_Phase]:
        """The phase in which it begins, cut, and what comes then."""
        plan, random, kind, at_s = self.plan, self._random, self._hang, self._hang_at_s
        phase.end_s = at_s
        phase.steps = phase.steps[: bisect_right(phase.steps, at_s)]
        yield phase
        last_s = phase.steps[-1] if phase.steps else phase.last_s
        rank = random.randrange(plan.world) if kind not in ("all-idle", "all-busy") else -1
        self.hanging = Hanging(kind, at_s, rank, max(self._longest_s, at_s - last_s))
        frozen = kind == "frozen"
        if frozen:
            self._late_by_s[rank] = 0.0  # it makes no step after that
        if not frozen:
            tail = _Doing(phase.cores, phase.io_bps, phase.out_bps, phase.states, phase.waits)
            phase = _Phase(phase, at_s, at_s + random.uniform(0, TAIL_S), tail)
            yield phase
        spinning = {"all-idle": False, "one-idle": True, "one-busy": False, "all-busy": True}.get(kind, plan.spins)
        doing = self._do([0.0] * plan.world, 0.0, spinning=spinning)
        cores, states, waits = list(doing.cores), list(doing.states), list(doing.waits)
        io, out = list(doing.io_bps), list(doing.out_bps)
        if rank >= 0:
            cores[rank] = 0.0 if frozen else plan.noise_cores[rank] + (kind == "one-busy")
            states[rank] = {"frozen": "T", "stuck": "D", "one-busy": "R", "one-idle": "S"}[kind]
            waits[rank] = {"frozen": "do_signal_stop", "stuck": "rpc_wait_bit_killable", "one-busy": ""}.get(
                kind, "hrtimer_nanosleep"
            )
            if kind in ("frozen", "stuck"):
                io[rank] = out[rank] = 0.0
        yield _Phase(phase, phase.end_s, 1e12, _Doing(cores, io, out, states, waits))
