"""Greedy continuations by transformers' `generate`, which our decoders must repeat.

Recorded once, in float32, with `python -m tests.support.references DATA_DIR`, which writes
`tests/data/greedy_references.json`. Prompts are those of DATA_DIR/prompts (in SmolLM2's chat
template) and, for stories260K, openings written here. A prompt is passed over where the model
ends before 64 tokens, or where its two likeliest tokens come closer than 1e-3 in logit: there
rounding may decide, and equality would prove nothing.

Where the data folder is missing, a prompt of SmolLM2 is known by its token ids alone, which are
part of the recording; stories260K is replaced by a seeded random model of the same shape, whose
references are made on the spot.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.models import make_stories_stand_in, quiet_transformers

REFERENCES_FILE = Path(__file__).parents[1] / "data" / "greedy_references.json"
NUM_PROMPTS = 20
OUTPUT_TOKENS = 64
MAX_PROMPT_TOKENS = 200
MIN_GAP = 1e-3

_STORY_OPENINGS = (
    "Once upon a time, there was a little girl named Lily.",
    "Tom had a red ball. He liked to play with it",
    "The big dog ran to the park and saw",
    "One day, a boy found a shiny stone.",
    'Mom said to Ben, "Let\'s go to the store."',
    "The cat was very sad because",
    "It was a sunny day. Sara and Max went to",
    "A small bird sat in the tree.",
    "Once there was a brave frog who wanted to",
    "Lucy loved her blue dress. She wore it",
    "There was an old man with a big hat.",
    '"Can I have a cookie?" asked Tim.',
    "The bunny hopped into the garden and",
    "At night the moon was bright.",
    "Jack and his sister built a tower.",
    "The little train was slow, but",
    "In the box there was a toy car.",
    "Anna did not want to share her",
    "The rain came down and the children",
    "One morning, a bear woke up hungry.",
    "Sam was scared of the dark.",
    "They made a cake for grandma.",
    "The duck could not find his mom.",
    "Mia drew a picture of a",
)


@dataclass(frozen=True, slots=True)
class Reference:
    """One prompt and the 64 token ids that follow it, greedily, in float32."""

    source: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]


def smollm2_references() -> list[Reference]:
    return _recorded("smollm2-135m")


def stories_references(directory: Path, data_dir: Path | None) -> list[Reference]:
    """For the model in `directory`: the recorded ones where `data_dir` holds the real model."""
    if data_dir is not None:
        return _recorded("stories260K")
    return _references_of(directory, _stand_in_prompts(), ends_early=True)


def stories_directory(data_dir: Path | None, scratch: Path) -> Path:
    """The real stories260K, or a stand-in written to `scratch`."""
    if data_dir is not None:
        return data_dir / "stories260K"
    return make_stories_stand_in(scratch)


def _recorded(model: str) -> list[Reference]:
    recording = json.loads(REFERENCES_FILE.read_text())
    return [Reference(**entry) for entry in recording[model]]


def _stand_in_prompts() -> Iterator[tuple[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    for number in range(10 * NUM_PROMPTS):
        length = int(torch.randint(5, 40, (), generator=generator))
        ids = torch.randint(3, 512, (length,), generator=generator)
        yield f"stand-in:{number}", ids.tolist()


def _references_of(
    directory: Path, prompts: Iterable[tuple[str, list[int]]], *, ends_early: bool = False
) -> list[Reference]:
    """The first 20 prompts that qualify; `ends_early` also takes those that end before 64."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    references: list[Reference] = []
    for source, prompt in prompts:
        if len(references) == NUM_PROMPTS:
            break
        if len(prompt) > MAX_PROMPT_TOKENS:
            continue
        output, gap = _generate(model, prompt)
        if gap >= MIN_GAP and (ends_early or len(output) == OUTPUT_TOKENS):
            references.append(Reference(source, prompt, output))
    if len(references) < NUM_PROMPTS:
        raise ValueError(f"only {len(references)} of {NUM_PROMPTS} prompts qualify")
    return references


def _generate(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """The greedy continuation, and the smallest distance of its two likeliest tokens."""
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=OUTPUT_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    likeliest = torch.cat(generated.logits).topk(2).values
    return generated.sequences[0, len(prompt) :].tolist(), float(likeliest.diff().abs().min())


def _smollm2_prompts(data_dir: Path, tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    """Chat questions and arithmetic word problems in turn."""
    chats = (data_dir / "prompts" / "mt_bench_question.jsonl").read_text().splitlines()
    sums = (data_dir / "prompts" / "gsm8k_test.jsonl").read_text().splitlines()
    for number, (chat, problem) in enumerate(zip(chats, sums, strict=False), start=1):
        for file, text in (
            ("mt_bench_question.jsonl", json.loads(chat)["turns"][0]),
            ("gsm8k_test.jsonl", json.loads(problem)["question"]),
        ):
            message = [{"role": "user", "content": text}]
            ids = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_dict=False
            )
            yield f"{file}:{number}", ids


def _record(data_dir: Path) -> None:
    from transformers import AutoTokenizer

    from worker.pull import pull

    torch.set_num_threads(1)
    smollm2 = pull("smollm2-135m")
    stories = data_dir / "stories260K"
    story_tokenizer = AutoTokenizer.from_pretrained(stories)
    recording = {
        "smollm2-135m": _references_of(
            smollm2, _smollm2_prompts(data_dir, AutoTokenizer.from_pretrained(smollm2))
        ),
        "stories260K": _references_of(
            stories,
            (
                (f"opening:{number}", story_tokenizer.encode(text))
                for number, text in enumerate(_STORY_OPENINGS)
            ),
        ),
    }
    lines = [
        f"{json.dumps(model)}: [\n"
        + ",\n".join(json.dumps(asdict(reference)) for reference in references)
        + "\n]"
        for model, references in recording.items()
    ]
    REFERENCES_FILE.parent.mkdir(exist_ok=True)
    REFERENCES_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    _record(Path(sys.argv[1]))
