"""Random requests that share much: documents, whole prompts, earlier answers."""

import random
from collections import deque
from dataclasses import dataclass

from msgspec import structs

from scheduler.messages import SamplingParams, SubmitRequest, Usage, pack_token_ids
from tests.support.episode_config import EpisodeConfig
from tests.support.fake_model import VOCABULARY, SoloRun, run_solo

EOS_TOKEN_IDS = (1, 5)
STOP_TOKEN_IDS = (2, 9)

_TOKEN_OF_BYTE = bytes(byte % VOCABULARY for byte in range(256))


@dataclass(frozen=True, slots=True)
class Job:
    """A request and what must come of it."""

    message: SubmitRequest
    prompt: tuple[int, ...]
    solo: SoloRun


def _of_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    return structs.replace(sampling, seed=sampling.seed + choice * 7907)


class Workload:
    """Draws requests that share much: documents, whole prompts, earlier answers."""

    def __init__(self, rng: random.Random, config: EpisodeConfig) -> None:
        self._rng = rng
        self._block_size = config.block_size
        self._climbs = config.climbs
        self._has_priorities = config.scheduler.policy == "priority"
        self._max_model_len = config.max_model_len
        self._max_prompt_tokens = min(80, config.max_model_len - 1)
        self._usual_prompt_tokens = min(self._max_prompt_tokens, config.prompt_tokens)
        self._usual_output_tokens = config.output_tokens
        self._documents = [self._tokens(80) for _ in range(2)]
        self._recent: deque[Job] = deque(maxlen=6)
        self._count = 0

    def draw(self, now: float, *, is_first: bool = False) -> list[Job]:
        """The requests of one submission: one, or several choices of one prompt. `is_first`: no
        other request lives."""
        rng = self._rng
        self._count += 1
        num_choices = 1 if self._climbs or rng.random() < 0.85 else rng.randint(2, 4)
        prompt = self._climbing_prompt(is_first) if self._climbs else self._prompt()
        sampling = self._sampling()
        priority = 0
        if self._has_priorities:
            priority = -self._count if self._climbs else rng.choice((0, 0, 1, 2, -1))
        salt = "" if rng.random() < 0.8 else rng.choice(("blue", "red"))
        jobs = []
        for choice in range(num_choices):
            jobs.append(
                self._job(
                    f"r{self._count}/{choice}",
                    prompt,
                    _of_choice(sampling, choice),
                    priority,
                    salt,
                    now,
                )
            )
        if num_choices == 1 and rng.random() < 0.03:
            jobs = [self._continuation(jobs[0])]
        self._recent.append(jobs[0])
        return jobs

    def _job(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        priority: int,
        salt: str,
        now: float,
    ) -> Job:
        message = SubmitRequest(
            request_id=request_id,
            client_id="left" if self._rng.random() < 0.5 else "right",
            prompt_token_ids=pack_token_ids(prompt),
            sampling=sampling,
            arrival_seconds=now,
            priority=priority,
            cache_salt=salt,
        )
        return Job(message, prompt, run_solo(prompt, sampling, self._max_model_len))

    def _continuation(self, job: Job) -> Job:
        """The same request, some of whose tokens came from an earlier scheduler."""
        old = job.message
        num_known = self._rng.randrange(len(job.solo.token_ids))
        message = SubmitRequest(
            request_id=old.request_id,
            client_id=old.client_id,
            prompt_token_ids=old.prompt_token_ids,
            sampling=old.sampling,
            arrival_seconds=old.arrival_seconds - self._rng.uniform(0, 5),
            priority=old.priority,
            cache_salt=old.cache_salt,
            output_token_ids=pack_token_ids(job.solo.token_ids[:num_known]),
            usage_so_far=Usage(len(job.prompt), num_known, 0),
        )
        return Job(message, job.prompt, job.solo)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randbytes(count).translate(_TOKEN_OF_BYTE))

    def _length(self) -> int:
        """A prompt length, often one that fills its last block, rarely one that cannot fit."""
        rng = self._rng
        limit = self._max_prompt_tokens if rng.random() < 0.03 else self._usual_prompt_tokens
        length = rng.randint(1, limit)
        if rng.random() < 0.3:
            length -= length % self._block_size
        return max(length, 1)

    def _climbing_prompt(self, is_first: bool) -> tuple[int, ...]:
        """One that nearly fills the pool, and then short ones, which get in beside it."""
        if is_first:
            return self._tokens(self._usual_prompt_tokens)
        shared = self._documents[0][: self._rng.choice((0, 0, 2, 4))]
        return shared + self._tokens(self._rng.randint(1, 4))

    def _prompt(self) -> tuple[int, ...]:
        rng = self._rng
        kind = rng.random()
        length = self._length()
        if rng.random() < 0.2 or not self._recent:
            return self._tokens(length)
        if kind < 0.4:
            shared = rng.choice(self._documents)[:length]
            num_own = 0 if rng.random() < 0.3 else rng.randint(0, 6)
            return (shared + self._tokens(num_own))[: self._max_prompt_tokens]
        earlier = rng.choice(self._recent)
        if kind < 0.7:
            return earlier.prompt
        if kind < 0.9:
            turn = earlier.solo.token_ids[: rng.randint(1, len(earlier.solo.token_ids))]
            return (earlier.prompt + turn + self._tokens(rng.randint(0, 4)))[
                : self._usual_prompt_tokens
            ]
        return earlier.prompt[:length]

    def _sampling(self) -> SamplingParams:
        rng = self._rng
        usual = self._usual_output_tokens
        max_tokens = 1 if rng.random() < 0.1 else rng.randint(1 + usual // 4, usual)
        return SamplingParams(
            seed=rng.getrandbits(32),
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.2 else 0,
            eos_token_ids=EOS_TOKEN_IDS if rng.random() < 0.5 else (),
            stop_token_ids=STOP_TOKEN_IDS if rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.1,
            logprobs=rng.randint(0, 2) if rng.random() < 0.1 else None,
            prompt_logprobs=rng.randint(0, 2) if rng.random() < 0.1 else None,
        )
