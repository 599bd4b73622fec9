"""Token intervals of streams beside a long prompt, on a simulated machine with a simulated clock."""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from dataclasses import dataclass

import pytest

from tests.fakes.engine_harness import make_submit
from worker.kv.manager import KVManager
from worker.plan import SampledToken, StepPlan, StepResult
from worker.scheduler.scheduler import Scheduler, SchedulerConfig

PROMPT_TOKENS = 4000


@dataclass(frozen=True)
class Machine:
    """Step costs of a simulated machine.

    Attributes:
        decode_ms: Duration of a step with a few decoding rows.
        token_ms: Additional duration per prompt token.
        attention: Context length at which a prompt token costs twice as much as at the start.
        noise: Maximum relative deviation of a step's duration.
        learned_tokens: Tokens each stream has when the prompt arrives; 0 means that nothing is learned yet.
        hiccup: Factor on the duration of the first step with decoding rows alone.
    """

    decode_ms: float = 8.0
    token_ms: float = 0.7
    attention: float = 8000.0
    noise: float = 0.05
    num_streams: int = 4
    num_prompts: int = 1
    learned_tokens: int = 30
    hiccup: float = 1.0

    @property
    def alone_ms(self) -> float:
        return self.decode_ms * (1 + self.num_streams / 64)

    def run(self, plan: StepPlan, rng: random.Random) -> float:
        chunks = [item for item in plan.scheduled if item.count > 1]
        num_decode = len(plan.scheduled) - len(chunks)
        ms = self.decode_ms * (1 + num_decode / 64)
        ms += sum(item.count * self.token_ms * (1 + (item.start + item.count / 2) / self.attention) for item in chunks)
        return ms * rng.uniform(1 - self.noise, 1 + self.noise)


def _read_beside_streams(machine: Machine, depth: int, seed: int) -> list[float]:
    """Return the intervals between the streams' tokens while prompts are read, in ms."""
    rng = random.Random(seed)
    kv = KVManager(num_pages=20_000, page_size=16, enable_prefix_caching=False)
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=8192)
    scheduler = Scheduler(config, kv, clock=time.time)
    endless = {"ignore_eos": True, "max_tokens": 8000}
    streams = [f"stream{index}" for index in range(machine.num_streams)]
    for index, name in enumerate(streams):
        scheduler.add(make_submit(name, [5 + index] * 20, sampling=endless))
    now = 0.0
    last: dict[str, float] = {}
    counts: dict[str, int] = defaultdict(int)
    gaps: list[float] = []
    flights: deque[StepPlan] = deque()
    num_unread = machine.num_prompts
    asked = hiccupped = False
    while num_unread:
        if not asked and all(counts[name] > machine.learned_tokens for name in streams):
            for index in range(machine.num_prompts):
                prompt = [3 + index] * PROMPT_TOKENS
                scheduler.add(make_submit(f"prompt{index}", prompt, sampling={"max_tokens": 1}))
            asked = True
            gaps.clear()
        plan = scheduler.schedule()
        assert plan is not None
        flights.append(plan)
        if len(flights) < depth:
            continue
        oldest = flights.popleft()
        took = machine.run(oldest, rng)
        if not hiccupped and all(item.count == 1 for item in oldest.scheduled):
            took *= machine.hiccup
            hiccupped = True
        now += took
        sampled = [SampledToken(item.row, 9) for item in oldest.scheduled if item.sample]
        scheduler.apply(oldest, StepResult(step=oldest.step, sampled=sampled), took)
        for _, output in scheduler.take_outputs():
            name = output.request_id
            if output.finish is not None:
                num_unread -= 1
            elif name in last:
                gaps.append(now - last[name])
            last[name] = now
            counts[name] += 1
    return gaps


MACHINES = {
    "a small model on two cores": Machine(),
    "nothing learned yet": Machine(learned_tokens=0),
    "the first measurement is six times too high": Machine(learned_tokens=0, hiccup=6.0),
    "a recent measurement is six times too high": Machine(learned_tokens=5, hiccup=6.0),
    "step times vary by a quarter": Machine(noise=0.25),
    "three prompts at once": Machine(num_prompts=3),
    "one fast stream": Machine(num_streams=1, decode_ms=5.0),
    "prompt tokens expensive beside decoding": Machine(decode_ms=4.0),
    "many streams": Machine(num_streams=16, decode_ms=10.0),
    "prompt tokens cheap": Machine(token_ms=0.05),
    "attention grows steeply": Machine(attention=2000.0),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_slowest_token_intervals_stay_below_four_times_normal(machine: Machine, depth: int) -> None:
    for seed in range(3):
        gaps = _read_beside_streams(machine, depth, seed)
        assert sorted(gaps)[int(len(gaps) * 0.99)] < 4 * machine.alone_ms
