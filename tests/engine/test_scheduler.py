from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from genai.engine.scheduler import CacheDemand, GroupDemand, Pending, Scheduler, StepPlan, peak_blocks, plan_step
from genai.kvcache.groups import CacheGroup, GroupKind
from genai.kvcache.pool import BlockPool, CacheFull
from genai.kvcache.sequence_cache import ONE_GROUP, SequenceCache
from tests.integrity import check_pool


def plan_steps(pending: list[Pending], budget: int) -> list[StepPlan]:
    left, steps = list(pending), []
    while step := plan_step(left, budget):
        steps.append(step)
        for index, count, prefill in step:
            assert prefill == left[index].prefill
            left[index] = Pending(left[index].num_tokens - count, prefill)
    return steps


@pytest.mark.parametrize("seed", range(50))
def test_every_pending_token_is_planned_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    counts = [rng.choice([0, 1, 1, rng.randint(2, 40)]) for _ in range(rng.randint(1, 12))]
    pending = [Pending(count, rng.random() < 0.5) for count in counts]
    budget = rng.randint(1, 24)
    steps = plan_steps(pending, budget)
    done = [0] * len(pending)
    for step in steps:
        assert 0 < sum(part.num_tokens for part in step) <= budget
        assert len({part.sequence for part in step}) == len(step)
        assert [part.prefill for part in step] == sorted(part.prefill for part in step)
        for index, count, _ in step:
            assert count > 0
            done[index] += count
    assert done == counts


def test_decode_goes_before_prefill() -> None:
    decode = [Pending(count, False) for count in (5, 1, 1)]
    assert plan_steps(decode, 4) == [[(1, 1, False), (2, 1, False), (0, 2, False)], [(0, 3, False)]]


def test_decode_rows_go_before_prefill() -> None:
    runs = [Pending(40, True), Pending(3, False), Pending(1, True), Pending(1, False)]
    (step,) = plan_steps(runs, 100)
    assert [part.sequence for part in step] == [3, 1, 0, 2]


def test_full_steps_are_as_few_as_the_budget_allows() -> None:
    assert len(plan_steps([Pending(100, True), Pending(28, False)], 32)) == 4


def test_nothing_pending_is_no_step() -> None:
    assert plan_steps([Pending(0, True), Pending(0, False)], 8) == []


# --- who runs ----------------------------------------------------------------------------------------------------


def simulated_most(held: int, growing: list[tuple[CacheDemand, int]], block_size: int, pool: int) -> int:
    """Simulates the peak token by token."""
    groups = [
        (demand.tokens, group, steps) for demand, steps in growing for group in demand.groups if group.pool == pool
    ]
    most, blocks = held, [group.blocks for _, group, _ in groups]
    for step in range(1, max((steps for _, steps in growing), default=0) + 1):
        for index, (tokens, group, steps) in enumerate(groups):
            if step <= steps:
                needed = -(-(tokens + step) // block_size)
                if group.most is not None:
                    needed = group.most if group.fixed else min(needed, group.most)
                held += max(needed - blocks[index], 0)
                blocks[index] = max(needed, blocks[index])
        most = max(most, held)
        for index, (_, group, steps) in enumerate(groups):
            if step == steps:
                held -= blocks[index] - group.blocks + group.own
    return most


def random_groups(rng: random.Random, tokens: int, size: int) -> tuple[GroupDemand, ...]:
    """One to three cache groups: some with windows that hold fewer blocks than there are tokens, some with states."""
    groups = []
    for _ in range(rng.randint(1, 3)):
        most = rng.choice([None, rng.randint(1, 12)])
        blocks, fixed = min(-(-tokens // size), most or tokens), most is not None and rng.random() < 0.3
        groups.append(GroupDemand(blocks, rng.randint(0, blocks), most, int(fixed), fixed))
    return tuple(groups)


@pytest.mark.parametrize("seed", range(200))
def test_the_most_blocks_are_those_of_a_simulation_token_by_token(seed: int) -> None:
    rng = random.Random(seed)
    size, growing = rng.choice([1, 4, 16]), []
    for _ in range(rng.randint(1, 8)):
        tokens = rng.randint(1, 60)
        growing.append((CacheDemand(tokens, tokens, 1000, random_groups(rng, tokens, size)), rng.randint(1, 50)))
    for pool in (0, 1):
        held = sum(group.blocks for demand, _ in growing for group in demand.groups if group.pool == pool)
        assert peak_blocks(held, growing, size, pool) == simulated_most(held, growing, size, pool)


@dataclass(eq=False)
class SimulatedJob:
    """Asks for `limit` tokens after its prompt and ends after `count` of them."""

    prompt: int
    limit: int
    count: int
    priority: int = 0
    cache: SequenceCache | None = None
    tokens: int = 0
    cancelled_at: int = 10**9
    preempted: int = 0
    ended: bool = False

    def demand(self) -> CacheDemand:
        assert self.cache is not None
        demands = []
        for group, table in zip(self.cache.groups, self.cache.tables, strict=True):
            most = (
                group.most_blocks(10**9, self.tokens - self.cache.length, table.block_size)
                if group.is_bounded
                else None
            )
            demands.append(GroupDemand(table.usable_blocks - table.num_gone, table.own_blocks, most))
        return CacheDemand(self.tokens, self.prompt, self.prompt + self.limit, tuple(demands))


KINDS = ((GroupKind.FULL, 0), (GroupKind.WINDOW, 3), (GroupKind.WINDOW, 9), (GroupKind.CHUNKED, 10))


class Simulation:
    """The engine's loop without a model: every running request gets a token per step if its prompt is computed."""

    def __init__(
        self,
        blocks: int,
        most: int = 8,
        block_size: int = 4,
        budget: int = 16,
        groups: tuple[CacheGroup, ...] = ONE_GROUP,
    ) -> None:
        self.groups = groups
        self.pool, self.block_size, self.budget = BlockPool(blocks), block_size, budget
        self.scheduler = Scheduler[SimulatedJob]([self.pool], block_size, most, SimulatedJob.demand)
        self.requests: list[SimulatedJob] = []
        self.most, self.preemptions, self.steps = most, 0, 0

    def submit(self, request: SimulatedJob) -> None:
        self.requests.append(request)
        self.scheduler.submit(request, priority=request.priority)

    def end(self, request: SimulatedJob) -> None:
        assert not request.ended
        request.ended = True
        self.scheduler.remove(request)
        if request.cache is not None:
            request.cache.release()

    def step(self) -> None:
        self.steps += 1
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if self.steps >= request.cancelled_at:
                self.end(request)
        for request in self.scheduler.running:
            assert request.cache is not None
            request.cache.leave_behind(request.cache.length)
        while (request := self.scheduler.candidate()) is not None:
            if request.cache is None:
                request.cache = SequenceCache(self.pool, self.block_size, self.groups)
                request.tokens = request.prompt
            if not self.scheduler.admit(request):
                break
        computed = self.compute()
        for request in computed:
            assert request.cache is not None
            if request.cache.length == request.tokens:
                request.tokens += 1
                if request.tokens - request.prompt >= request.count:
                    self.end(request)
        tables = [
            request.cache.held_blocks for request in self.requests if request.cache is not None and not request.ended
        ]
        check_pool(self.pool, tables)
        assert len(self.scheduler.running) <= self.most
        assert {*self.scheduler.running, *self.scheduler.waiting} == {
            request for request in self.requests if not request.ended
        }

    def compute(self) -> list[SimulatedJob]:
        while self.scheduler.running:
            running = list(self.scheduler.running)
            pending = [
                Pending(request.tokens - request.cache.length, False)
                for request in running
                if request.cache is not None
            ]
            taken: list[tuple[SimulatedJob, int]] = []
            try:
                for part in plan_step(pending, self.budget):
                    request = running[part.sequence]
                    assert request.cache is not None
                    taken.append((request, request.cache.length))
                    request.cache.append(part.num_tokens)
                return [request for request, _ in taken]
            except CacheFull:
                for request, length in taken:
                    assert request.cache is not None
                    request.cache.undo(length)
                victim = self.scheduler.preempt()
                if victim is None:
                    self.end(running[0])  # alone, and still no room: it fails
                else:
                    assert victim.cache is not None
                    self.preemptions += 1
                    victim.preempted += 1
                    victim.cache.release()
        return []


def test_ten_thousand_random_jobs() -> None:
    """Tiny caches, cancellations, priorities: every request ends once, all blocks are returned, no request starves."""
    rng, total = random.Random(0), 0
    while total < 10_000:
        kinds = [rng.choice(KINDS) for _ in range(rng.choice([1, 1, 2, 3]))]
        groups = tuple(CacheGroup((layer,), *kind) for layer, kind in enumerate(kinds))
        blocks, budget = len(groups) * rng.randint(6, 60), rng.choice([1, 7, 16, 256])
        simulation = Simulation(blocks, most=rng.randint(1, 8), budget=budget, groups=groups)
        for _ in range(rng.randint(1, 60)):
            limit = rng.choice([1, 5, 20, 300])
            request = SimulatedJob(rng.randint(1, 30), limit, rng.randint(1, min(limit, 40)), rng.choice([0, 0, 0, 1]))
            if rng.random() < 0.2:
                request.cancelled_at = rng.randint(1, 400)
            simulation.submit(request)
            for _ in range(rng.choice([0, 0, 1, 5])):
                simulation.step()
        work = sum(request.prompt + request.count for request in simulation.requests)
        while simulation.scheduler.running or simulation.scheduler.waiting:
            simulation.step()
            assert simulation.steps < 40 * work + 1000, "somebody waits for ever"
        assert all(request.ended for request in simulation.requests)
        assert simulation.pool.num_free == simulation.pool.num_blocks
        total += len(simulation.requests)


def test_limits_that_are_kept_are_never_preempted() -> None:
    """Requests that use all of a short limit, for which the pool is too small at the same time."""
    simulation = Simulation(40, budget=256)
    for _ in range(30):
        simulation.submit(SimulatedJob(10, 50, 50))
    while simulation.scheduler.running or simulation.scheduler.waiting:
        simulation.step()
    assert simulation.preemptions == 0
    assert simulation.steps <= 30 * 50 / 2  # two ran side by side all the time


def test_jobs_overtake_only_by_priority() -> None:
    simulation = Simulation(8, budget=256)
    first, second, urgent = SimulatedJob(8, 20, 20), SimulatedJob(1, 1, 1), SimulatedJob(8, 20, 20, priority=1)
    blocking = SimulatedJob(12, 12, 12)
    simulation.submit(blocking)
    simulation.step()
    for request in (first, second, urgent):
        simulation.submit(request)
    order: list[SimulatedJob] = []
    while simulation.scheduler.running or simulation.scheduler.waiting:
        simulation.step()
        order += [request for request in simulation.requests if request.cache is not None and request not in order]
    assert order == [blocking, urgent, first, second]


def test_the_last_by_priority_and_arrival_is_preempted_and_keeps_its_place() -> None:
    scheduler = Scheduler[SimulatedJob]([], 1, 4, SimulatedJob.demand)
    requests = [SimulatedJob(1, 300, 1) for _ in range(4)]
    for request, priority in zip(requests, (1, 0, 0, 1), strict=True):
        request.cache = SequenceCache(BlockPool(1), 1)
        scheduler.submit(request, priority=priority)
    while (candidate := scheduler.candidate()) is not None:
        assert scheduler.admit(candidate)
    assert [requests.index(request) for request in scheduler.running] == [0, 3, 1, 2]
    assert scheduler.preempt() is requests[2]
    assert scheduler.preempt() is requests[1]
    assert scheduler.waiting == [requests[1], requests[2]]
    assert scheduler.candidate() is None  # the pool is full until somebody leaves
    scheduler.remove(requests[0])
    assert scheduler.candidate() is requests[1]


def test_copies_stand_beside_what_they_are_copies_of() -> None:
    scheduler = Scheduler[SimulatedJob]([], 1, 2, SimulatedJob.demand)
    leader, other, *copies = [SimulatedJob(1, 300, 1) for _ in range(4)]
    scheduler.submit(leader)
    scheduler.submit(other)
    assert scheduler.admit(leader)
    assert scheduler.admit_copy(copies[0], leader)
    assert not scheduler.admit_copy(copies[1], leader)
    assert scheduler.waiting == [copies[1], other]
