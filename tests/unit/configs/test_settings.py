"""How settings are put into words."""

import pytest
from pydantic import ByteSize, SecretStr

from configs.settings import all_settings, nearest_name, show


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("model.model", "a text, not empty"),
        ("model.revision", "a text, not empty, or null"),
        ("model.dtype", "auto, float32, bfloat16 or float16"),
        ("cache.block_size", "a whole number from 1 to 1024"),
        ("cache.enable_prefix_caching", "true or false"),
        ("cache.gpu_memory_utilization", "a number above 0 and at most 1"),
        (
            "cache.kv_cache_memory",
            "a number of bytes above 0, or a text with a unit such as 1GiB, or null",
        ),
        ("scheduler.max_num_seqs", "a whole number of at least 1, or null"),
        ("scheduler.policy", "fcfs or priority"),
        ("server.api_keys", "a list of texts, none of them empty"),
        ("server.drain_seconds", "a number of at least 0"),
    ],
)
def test_what_is_allowed_is_told_from_the_definition(name: str, allowed: str) -> None:
    assert all_settings()[name].allowed == allowed


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("cache.num_block", "cache.num_blocks"),
        ("cache.num-blocks", "cache.num_blocks"),
        ("num_blocks", "cache.num_blocks"),
        ("scheduler.block_size", "cache.block_size"),
        ("kache.num_blocks", "cache.num_blocks"),
        ("sheduler.max_num_seq", "scheduler.max_num_seqs"),
        ("parallel.tensor_parallel", "parallel.tensor_parallel_size"),
        ("server.frobnicate", None),
        ("x", None),
    ],
)
def test_nearest_name(written: str, meant: str | None) -> None:
    assert nearest_name(written) == meant


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "unset"),
        ((), "unset"),
        (True, "true"),
        (16, "16"),
        (0.9, "0.9"),
        ("auto", "auto"),
        (("a", "b"), "a, b"),
        (ByteSize(1 << 30), "1.0GiB"),
        (SecretStr("canary"), "set (not shown)"),
        ((SecretStr("canary"), SecretStr("canary2")), "2 set (not shown)"),
        ("x" * 100, "x" * 59 + "…"),
    ],
)
def test_values_are_shown(value: object, text: str) -> None:
    assert show(value) == text
