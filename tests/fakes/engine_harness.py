"""Scheduler with a fake executor, driven step by step without a socket."""

from __future__ import annotations

from collections import defaultdict, deque

from shared.messages import Finish, FinishReason, Output, Submit
from shared.sampling_params import SamplingParams
from tests.fakes.fake_executor import EOS_TOKEN_ID, FakeExecutor, FakeHandle, generate
from worker.kv.manager import KVManager
from worker.plan import StepPlan
from worker.requests.constraint import Constraints
from worker.scheduler.scheduler import Scheduler, SchedulerConfig
from worker.scheduler.speculator import SpeculationConfig


def make_submit(request_id: str, token_ids: list[int], **fields) -> Submit:
    """Return a Submit; `sampling` may be a dict."""
    sampling = fields.pop("sampling", {})
    return Submit(
        request_id=request_id,
        model="fake",
        token_ids=token_ids,
        num_prompt_tokens=fields.pop("num_prompt_tokens", len(token_ids)),
        sampling=SamplingParams(**sampling) if isinstance(sampling, dict) else sampling,
        **fields,
    )


class Harness:
    """Loop that runs steps as the engine does, checks integrity after each one and collects the outputs of each
    choice.
    """

    def __init__(
        self,
        *,
        depth: int = 1,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 96,
        target_step_ms: float = 100.0,
        num_pages: int = 32,
        page_size: int = 4,
        num_groups: int = 1,
        enable_prefix_caching: bool = True,
        clock=lambda: 0.0,
        corrupt=lambda plan: set(),
        kv_class=KVManager,
        constraints: Constraints | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> None:
        self.kv = kv_class(
            num_pages=num_pages,
            page_size=page_size,
            num_groups=num_groups,
            enable_prefix_caching=enable_prefix_caching,
        )
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            target_step_ms=target_step_ms,
            eos_token_ids=(EOS_TOKEN_ID,),
        )
        self.scheduler = Scheduler(config, self.kv, clock=clock, constraints=constraints, speculation=speculation)
        self.executor = FakeExecutor(
            max_num_seqs=max_num_seqs,
            num_pages=num_pages,
            page_size=page_size,
            num_groups=num_groups,
            depth=depth,
            corrupt=corrupt,
        )
        # Called between any two phases of a step, where requests may arrive or be aborted.
        self.interrupt = lambda: None
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.finishes: dict[tuple[str, int], Finish] = {}
        self.outputs: dict[tuple[str, int], list[Output]] = defaultdict(list)
        self._flights: deque[tuple[StepPlan, FakeHandle]] = deque()

    def add(self, submit: Submit, owner: bytes = b"") -> None:
        self.scheduler.add(submit, owner)
        self._collect()

    def abort(self, request_id: str, choice: int | None = None, owner: bytes = b"") -> None:
        self.scheduler.abort(request_id, choice, owner)
        self._collect()

    def step(self, milliseconds: float = 1.0) -> StepPlan | None:
        """Run one pass of the engine loop.

        It submits at most one plan, and applies the oldest result if the pipeline is full.
        """
        plan = self.scheduler.schedule() if len(self._flights) < self.executor.depth else None
        assert plan is not None or self._flights or not self.scheduler.has_computable, (
            "requests wait, but no step is in flight"
        )
        self._pause()
        if plan is not None:
            self._flights.append((plan, self.executor.submit(plan)))
        if self._flights and (plan is None or len(self._flights) == self.executor.depth):
            self._pause()
            oldest, handle = self._flights.popleft()
            self.scheduler.apply(oldest, handle.result(), milliseconds)
        self._pause()
        return plan

    def _pause(self) -> None:
        self.scheduler.check_integrity()
        self.interrupt()
        self.scheduler.check_integrity()
        self._collect()

    def drain(self, limit: int = 5000) -> None:
        """Run steps until no request is left, then check that all pages were freed."""
        for _ in range(limit):
            if not self.scheduler.has_requests and not self._flights:
                break
            self.step()
        assert not self.scheduler.has_requests, "requests do not finish"
        assert self.scheduler.num_running == self.scheduler.num_waiting == self.scheduler.num_waiting_tokens() == 0
        assert self.kv.pages_in_use == self.kv.num_live == 0

    def run(self, *submits: Submit) -> None:
        """Add requests and run steps until all requests have ended."""
        for submit in submits:
            self.add(submit)
        self.drain()

    def run_solo(self, *submits: Submit) -> None:
        """Run requests to their end and compare each with the text when it runs alone."""
        self.run(*submits)
        for submit in submits:
            self.expect_solo(submit)

    def expect_solo(self, submit: Submit) -> None:
        """Check that each choice finished normally, with the same text as when the request runs alone."""
        config = self.scheduler.config
        for choice in range(submit.choice, submit.choice + submit.num_choices):
            key = (submit.request_id, choice)
            text = generate(submit.token_ids, submit.sampling, choice, config.max_model_len, submit.num_prompt_tokens)
            assert self.tokens[key] == text, key
            finish = self.finishes[key]
            assert finish.reason in (FinishReason.STOP, FinishReason.LENGTH), (key, finish)
            if finish.reason is FinishReason.STOP:
                assert finish.stop_token_id == text[-1]

    def _collect(self) -> None:
        for _, output in self.scheduler.take_outputs():
            key = (output.request_id, output.choice)
            assert key not in self.finishes, f"{key} has an output after its finish"
            self.tokens[key] += output.token_ids
            self.outputs[key].append(output)
            if output.finish is not None:
                self.finishes[key] = output.finish
