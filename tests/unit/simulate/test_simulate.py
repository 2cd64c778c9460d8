"""The loop around the real core: exact times, exact sums, and nobody lost."""

import dataclasses
from pathlib import Path

import pytest

from cluster.traces import read_trace
from scheduler.simulate import AllRefusedError, SimulationResult, TraceRequest
from tests.unit.simulate.conftest import Run


def figures(result: SimulationResult) -> dict[str, object]:
    return {
        field.name: getattr(result, field.name)
        for field in dataclasses.fields(result)
        if field.name != "timeline"
    }


def test_times_of_one_request(run: Run) -> None:
    """100 prompt tokens at 1,000 a second and 10 ms for each of 5 steps."""
    result = run([TraceRequest(0.0, 100, 5)])
    assert result.time_to_first_token.p50_seconds == pytest.approx(0.11)
    assert result.inter_token_latency.p99_seconds == pytest.approx(0.01)
    assert result.simulated_seconds == pytest.approx(0.15)
    assert (result.finished, result.output_tokens) == (1, 5)
    # The last token is sampled and needs no slot; the others are computed.
    assert result.scheduled_tokens == {"prompt": 100, "output": 4, "recompute": 0}
    assert result.peak_held_blocks == 7


def test_the_clock_jumps_over_idle_time(run: Run) -> None:
    result = run([TraceRequest(0.0, 100, 5), TraceRequest(1000.0, 100, 5)])
    assert result.simulated_seconds == pytest.approx(1000.15)
    assert result.time_to_first_token.p99_seconds == pytest.approx(0.11)
    assert result.peak_running == 1
    assert result.timeline.binned(10).means["running"][1:9].tolist() == [0] * 8


def test_an_arrival_within_a_step_waits_for_its_end(run: Run) -> None:
    """The step [0, 0.11) computes the first prompt; the second arrives in it, at 0.05."""
    result = run([TraceRequest(0.0, 100, 2), TraceRequest(0.05, 50, 1)])
    # Then one step decodes the first and prefills the second: 10 ms + 50 tokens.
    assert result.simulated_seconds == pytest.approx(0.17)
    assert result.inter_token_latency.p50_seconds == pytest.approx(0.06)
    assert result.peak_waiting == 1


@pytest.mark.parametrize(("block_size", "hit"), [(1, 699), (16, 688), (128, 640), (512, 512)])
def test_hits_follow_the_block_size(run: Run, block_size: int, hit: int) -> None:
    """Prompts of 700 tokens with the same prefix ids; the last token is never a hit."""
    requests = [TraceRequest(i * 10.0, 700, 1, prefix_ids=(0, 1)) for i in range(2)]
    result = run(requests, f"cache.block_size={block_size}")
    assert (result.queries_tokens, result.hits_tokens) == (1400, hit)
    assert result.hit_ratio == pytest.approx(hit / 1400)


def test_without_a_cache_there_is_no_ratio(run: Run) -> None:
    requests = [TraceRequest(i * 10.0, 700, 1, prefix_ids=(0, 1)) for i in range(2)]
    result = run(requests, "cache.enable_prefix_caching=false")
    assert result.scheduled_tokens["prompt"] == 1400
    assert result.hit_ratio != result.hit_ratio


def pressed(count: int = 60) -> list[TraceRequest]:
    """More than 1,000 tokens can hold: 60 requests that grow from 64 to 264 tokens."""
    return [TraceRequest(i * 0.05, 64, 200) for i in range(count)]


def test_under_pressure_the_bill_adds_up(run: Run) -> None:
    result = run(pressed(), num_blocks=64)
    assert sum(result.preemptions.values()) > 20
    assert result.finished == 60
    assert result.output_tokens == 60 * 200
    bill = result.recovered_tokens + result.recomputed_tokens + result.dropped_tokens
    assert result.held_tokens == bill > 0
    assert result.recovered_tokens > 0 < result.recomputed_tokens
    assert result.scheduled_tokens["output"] == 60 * 199
    assert result.scheduled_tokens["recompute"] >= result.recomputed_tokens
    assert 0 < result.recompute_tax < 0.5
    counted = result.timeline.binned(50).increments
    assert counted["preemptions"].sum() == sum(result.preemptions.values())
    assert counted["recovered_tokens"].sum() == result.recovered_tokens


def test_a_pool_of_the_peak_demand_preempts_less_and_a_larger_one_never(run: Run) -> None:
    tight = run(pressed(), "scheduler.max_num_seqs=16", num_blocks=64)
    assert tight.peak_demand_blocks > 64
    asked_for = run(pressed(), "scheduler.max_num_seqs=16", num_blocks=tight.peak_demand_blocks)
    assert sum(asked_for.preemptions.values()) < sum(tight.preemptions.values())
    roomy = run(pressed(), "scheduler.max_num_seqs=16", num_blocks=16 * 17 + 1)
    assert (sum(roomy.preemptions.values()), roomy.peak_demand_blocks) == (0, 0)


def test_a_run_can_be_repeated_exactly(run: Run) -> None:
    first, second = (run(pressed(), num_blocks=64) for _ in range(2))
    assert figures(first) == figures(second)


@pytest.mark.parametrize("steps_in_flight", [2, 3])
def test_look_ahead_loses_no_token(run: Run, steps_in_flight: int) -> None:
    setting = f"scheduler.steps_in_flight={steps_in_flight}"
    result = run(pressed(), setting, num_blocks=64)
    assert sum(result.preemptions.values()) > 0
    assert (result.finished, result.output_tokens) == (60, 60 * 200)
    assert result.scheduled_tokens["output"] == 60 * 199


def test_a_pipeline_overlaps_steps(run: Run) -> None:
    requests = [TraceRequest(0.0, 16, 300) for _ in range(12)]
    alone = run(requests)
    staged = run(requests, "scheduler.steps_in_flight=4", pipeline_stages=3)
    # A token still takes a whole step of 10 ms, but three steps are on their way at once, each
    # with a third of the requests.
    assert staged.output_tokens == alone.output_tokens
    assert staged.simulated_seconds == pytest.approx(alone.simulated_seconds, rel=0.05)
    assert staged.steps > 2.8 * alone.steps


def test_refusals_are_counted_by_reason(run: Run) -> None:
    requests = [
        TraceRequest(0.0, 100, 5),
        TraceRequest(0.0, 2000, 5),
        TraceRequest(0.0, 5000, 5),
        TraceRequest(0.0, 1000, 700),
    ]
    progress: list[int] = []
    result = run(requests, num_blocks=101, on_progress=progress.append)
    assert result.refused == {"NeverFits": 2, "BadRequest": 1}
    assert (result.requests, result.finished) == (4, 1)
    assert progress == [4]


def test_what_the_context_cuts_short_is_counted(run: Run) -> None:
    result = run([TraceRequest(0.0, 100, 50)], max_model_len=110)
    assert (result.cut_short, result.finished, result.output_tokens) == (1, 1, 10)


def test_a_queue_limit_refuses_only_if_it_is_set(run: Run) -> None:
    requests = [TraceRequest(0.0, 100, 5) for _ in range(10)]
    assert run(requests).refused == {}
    limited = run(requests, "scheduler.max_waiting_requests=3")
    assert limited.refused == {"QueueFull": 7}


def test_if_all_are_refused_the_reason_is_named(run: Run) -> None:
    with pytest.raises(AllRefusedError, match=r"all 2 requests were refused.*100 tokens.* 16;"):
        run([TraceRequest(0.0, 100, 5)] * 2, num_blocks=2)


def test_recorded_conversations(test_data_dir: Path | None, example_trace: Path, run: Run) -> None:
    """Without the recording, the made-up trace of the same shape stands in for it."""
    path = example_trace
    if test_data_dir is not None:
        path = test_data_dir / "mooncake" / "conversation_trace.jsonl.gz"
    requests = read_trace(path, limit=60).requests
    result = run(requests, num_blocks=6001, max_model_len=131_072)
    assert result.finished == 60
    assert result.output_tokens == sum(request.output_tokens for request in requests)
    assert result.queries_tokens == sum(request.prompt_tokens for request in requests)
    assert 0 < result.hits_tokens < result.queries_tokens
