"""The real scheduler core and real workers, joined without Ray: in one process or in several."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from configs import ResolvedConfig
from configs.resolve import resolve
from configs.sections import CacheConfig, Config, ModelConfig, ParallelConfig, SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.messages import (
    Accepted,
    EndReason,
    EndRequest,
    FinishReason,
    SamplingParams,
    StepPlan,
    StepResult,
    SubmitRequest,
    TokenLogprobs,
    Usage,
    decode,
    encode,
    pack_token_ids,
)
from worker.rank import Rank

GREEDY = SamplingParams(max_tokens=64, seed=0, temperature=0.0, eos_token_ids=(2,))
"""As the references were made; 2 ends a text in stories260K and in SmolLM2 alike."""


def worker_config(
    *,
    tp: int = 1,
    pp: int = 1,
    block_size: int = 16,
    num_blocks: int | None = 200,
    max_model_len: int = 1024,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 256,
    steps_in_flight: int | None = None,
    dtype: str = "float32",
    kv_cache_dtype: str = "auto",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    policy: str = "fcfs",
) -> ResolvedConfig:
    """A configuration for CPU workers."""
    config = Config.model_validate(
        {
            "model": ModelConfig.model_validate({"dtype": dtype}),
            "cache": CacheConfig.model_validate(
                {
                    "block_size": block_size,
                    "num_blocks": num_blocks,
                    "kv_cache_dtype": kv_cache_dtype,
                    "k_scale": k_scale,
                    "v_scale": v_scale,
                }
            ),
            "scheduler": SchedulerConfig.model_validate(
                {
                    "max_num_seqs": max_num_seqs,
                    "max_num_batched_tokens": max_num_batched_tokens,
                    "steps_in_flight": steps_in_flight,
                    "policy": policy,
                }
            ),
            "parallel": ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        }
    )
    return resolve(config, "cpu", model_context_tokens=max_model_len)


class Workers(Protocol):
    """A worker group as the scheduler's host sees it."""

    @property
    def num_blocks(self) -> int: ...

    def join(self, epoch: int) -> None: ...

    def submit(self, plan: StepPlan) -> None: ...

    def result(self) -> StepResult: ...


class LocalWorker:
    """A group of one rank in this process. A plan runs when its result is asked for."""

    def __init__(self, config: ResolvedConfig, directory: Path) -> None:
        self.rank = Rank(config, 0)
        self.rank.load(directory)
        self._plans: deque[StepPlan] = deque()
        self.join(0)

    def join(self, epoch: int) -> None:
        self._plans.clear()
        self.num_blocks = self.rank.join(epoch, None).num_blocks

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(decode(encode(plan), StepPlan))

    def result(self) -> StepResult:
        result = self.rank.execute(self._plans.popleft())
        assert result is not None
        return decode(encode(result), StepResult)


@dataclass
class Answer:
    """What a client has received of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None


class Server:
    """Drives a scheduler core and its workers, step by step, and keeps what clients receive."""

    def __init__(self, config: ResolvedConfig, workers: Workers) -> None:
        assert config.model.max_model_len is not None
        self.core = SchedulerCore(
            scheduler=config.scheduler,
            cache=config.cache,
            num_blocks=workers.num_blocks,
            max_model_len=config.model.max_model_len,
            pipeline_stages=config.parallel.pipeline_parallel_size,
        )
        self.workers = workers
        self.answers: dict[str, Answer] = {}
        self.num_steps = 0
        self._now_seconds = 0.0

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        priority: int = 0,
    ) -> None:
        admission = self.core.submit(
            [
                SubmitRequest(
                    request_id,
                    "client",
                    pack_token_ids(prompt),
                    sampling,
                    self._now_seconds,
                    priority,
                )
            ],
            self._now_seconds,
        )
        assert isinstance(admission, Accepted), admission

    def end(self, request_id: str, reason: EndReason) -> None:
        self.core.end(EndRequest(request_id, reason), self._now_seconds)
        self._collect()

    def step(self) -> None:
        """Fill the window with plans, then take one result."""
        self._now_seconds += 0.01
        while (plan := self.core.plan(self._now_seconds)) is not None:
            self.workers.submit(plan)
            self.num_steps += 1
        if self.core.group.window.num_in_flight:
            self.core.apply(self.workers.result(), self._now_seconds)
        self._collect()

    def lose_group(self) -> None:
        """The workers are lost, with what they were computing, and form a new group."""
        self.core.lose_group(self._now_seconds)
        self.workers.join(self.core.group.epoch)
        self._collect()

    def run(self) -> dict[str, Answer]:
        """Step until every request has ended."""
        while not self.core.is_idle:
            self.step()
        return self.answers

    def drain(self) -> None:
        """Take the results that are still out."""
        while self.core.group.window.num_in_flight:
            self.core.apply(self.workers.result(), self._now_seconds)

    def _collect(self) -> None:
        for batch in self.core.take_batches().values():
            for delta in batch.deltas:
                answer = self.answers.setdefault(delta.request_id, Answer())
                assert answer.finish is None, "a delta after the terminal one"
                answer.token_ids.extend(delta.token_ids)
                answer.logprobs.extend(delta.logprobs)
                answer.prompt_logprobs.extend(delta.prompt_logprobs)
                answer.finish = delta.finish
                answer.usage = delta.usage or answer.usage
                answer.error = delta.error


def complete(
    config: ResolvedConfig,
    workers: Workers,
    prompts: Iterable[Sequence[int]],
    sampling: SamplingParams = GREEDY,
) -> list[Answer]:
    """The answers to `prompts`, submitted at once, in their order."""
    server = Server(config, workers)
    ids = []
    for number, prompt in enumerate(prompts):
        ids.append(f"request{number}")
        server.submit(ids[-1], prompt, sampling)
    answers = server.run()
    return [answers[request_id] for request_id in ids]
