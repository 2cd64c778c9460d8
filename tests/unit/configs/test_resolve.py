"""Defaults that depend on the device, and settings that contradict each other."""

import pytest

from configs import (
    CacheConfig,
    Config,
    ConfigError,
    Device,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    check,
    resolve,
)


@pytest.mark.parametrize(
    ("device", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory"),
    [("cpu", 64, 512, 1 << 30), ("cuda", 256, 8192, None)],
)
def test_defaults_of_a_device(
    device: Device,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_cache_memory: int | None,
) -> None:
    config = resolve(Config(), device)
    assert config.scheduler.max_num_seqs == max_num_seqs
    assert config.scheduler.max_num_batched_tokens == max_num_batched_tokens
    assert config.cache.kv_cache_memory == kv_cache_memory
    assert None not in dict(config.scheduler).values()


@pytest.mark.parametrize(("num_stages", "steps_in_flight"), [(1, 2), (2, 3), (5, 6)])
def test_steps_in_flight_follow_the_stages(num_stages: int, steps_in_flight: int) -> None:
    config = Config(parallel=ParallelConfig(pipeline_parallel_size=num_stages))
    assert resolve(config, "cpu").scheduler.steps_in_flight == steps_in_flight


def test_what_was_given_stays() -> None:
    config = Config(
        cache=CacheConfig(num_blocks=11, hash="sha256"),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=7, steps_in_flight=1),
    )
    resolved = resolve(config, "cuda")
    assert resolved.scheduler.model_dump() == config.scheduler.model_dump()
    assert resolved.cache.model_dump() == config.cache.model_dump()
    assert (
        config.model_dump()
        == resolve(config, "cpu")
        .model_copy(update={"cache": config.cache, "scheduler": config.scheduler})
        .model_dump()
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_resolving_twice_changes_nothing(device: Device) -> None:
    once = resolve(Config(), device, model_context_tokens=8192)
    assert resolve(once, device, model_context_tokens=8192) == once


@pytest.mark.parametrize(
    ("num_keys", "hash_name"), [(0, "xxh3_128"), (1, "xxh3_128"), (2, "sha256"), (3, "sha256")]
)
def test_hash_is_safe_among_strangers(num_keys: int, hash_name: str) -> None:
    keys = [f"key-{i}" for i in range(num_keys)]
    config = Config(server=ServerConfig.model_validate({"api_keys": keys}))
    assert resolve(config, "cpu").cache.hash == hash_name
    forced = config.model_copy(update={"cache": CacheConfig(hash="xxh3_128")})
    assert resolve(forced, "cpu").cache.hash == "xxh3_128"


@pytest.mark.parametrize("key", ["k_scale", "v_scale"])
def test_scales_belong_to_fp8(key: str) -> None:
    fp8 = {"kv_cache_dtype": "fp8_e4m3", key: 0.5}
    assert getattr(resolve(Config(cache=CacheConfig.model_validate(fp8)), "cpu").cache, key) == 0.5
    plain = Config(cache=CacheConfig.model_validate({key: 0.5}))
    with pytest.raises(ConfigError) as caught:
        resolve(plain, "cpu")
    assert str(caught.value) == (
        f"cache.{key} is 0.5, but with cache.kv_cache_dtype auto nothing is scaled: set the dtype "
        f"to fp8_e4m3, or leave the scale out."
    )


class TestContextLength:
    def test_it_comes_from_the_model(self) -> None:
        assert resolve(Config(), "cpu").model.max_model_len is None
        resolved = resolve(Config(), "cpu", model_context_tokens=8192)
        assert resolved.model.max_model_len == 8192

    def test_less_than_the_model_has_is_fine(self) -> None:
        config = Config(model=ModelConfig(max_model_len=100))
        assert resolve(config, "cpu", model_context_tokens=8192).model.max_model_len == 100

    def test_more_is_not(self) -> None:
        config = Config(model=ModelConfig(max_model_len=8193))
        with pytest.raises(ConfigError) as caught:
            resolve(config, "cpu", model_context_tokens=8192)
        assert str(caught.value) == (
            "model.max_model_len is 8193, but the model was made for at most 8192 tokens: set it "
            "to 8192 or less, or leave it out."
        )


class TestChunkedPrefillOff:
    def config(self, max_model_len: int | None, max_num_batched_tokens: int | None) -> Config:
        return Config(
            model=ModelConfig(max_model_len=max_model_len),
            scheduler=SchedulerConfig(
                enable_chunked_prefill=False, max_num_batched_tokens=max_num_batched_tokens
            ),
        )

    def test_a_whole_context_has_to_fit_into_a_step(self) -> None:
        resolve(self.config(1024, 1024), "cpu")
        with pytest.raises(ConfigError) as caught:
            resolve(self.config(1024, 1023), "cpu")
        assert str(caught.value).startswith(
            "scheduler.max_num_batched_tokens is 1023, but with scheduler.enable_chunked_prefill "
            "off it must be at least the context length of 1024 tokens: "
        )

    def test_the_default_of_the_device_counts(self) -> None:
        resolve(self.config(4096, None), "cuda")
        with pytest.raises(ConfigError, match="is 512, but"):
            resolve(self.config(4096, None), "cpu")

    def test_one_device_that_can_is_enough(self) -> None:
        config = self.config(4096, None)
        check(config)
        check(config.model_copy(update={"parallel": ParallelConfig(device="cuda")}))
        with pytest.raises(ConfigError, match="is 512, but"):
            check(config.model_copy(update={"parallel": ParallelConfig(device="cpu")}))
        with pytest.raises(ConfigError, match="is 512, but"):
            check(self.config(10_000, None))

    def test_the_length_of_the_model_counts_once_it_is_known(self) -> None:
        resolve(self.config(None, 1000), "cpu")
        with pytest.raises(ConfigError, match="context length of 8192 tokens"):
            resolve(self.config(None, 1000), "cpu", model_context_tokens=8192)

    def test_a_prompt_limit_makes_no_sense(self) -> None:
        config = Config(
            scheduler=SchedulerConfig(enable_chunked_prefill=False, long_prefill_token_threshold=48)
        )
        with pytest.raises(ConfigError, match="long_prefill_token_threshold is 48"):
            resolve(config, "cpu")


class TestServer:
    def test_chaos_needs_an_admin_key(self) -> None:
        with pytest.raises(ConfigError, match="set PALIMPSEST_ADMIN_KEY too"):
            check(Config.model_validate({"server": {"enable_chaos": True}}))
        check(Config.model_validate({"server": {"enable_chaos": True, "admin_key": "a"}}))

    def test_the_admin_key_is_another_one(self) -> None:
        server = {"api_keys": ["a", "b"], "admin_key": "b"}
        with pytest.raises(ConfigError, match="admin_key is also one of"):
            resolve(Config(server=ServerConfig.model_validate(server)), "cpu")

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
    def test_this_machine_needs_no_keys(self, host: str) -> None:
        resolve(Config(server=ServerConfig(host=host)), "cpu")

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
    def test_others_need_keys_or_consent(self, host: str) -> None:
        with pytest.raises(ConfigError, match=f"server.host is {host}"):
            resolve(Config(server=ServerConfig(host=host)), "cpu")
        resolve(Config(server=ServerConfig(host=host, allow_no_auth=True)), "cpu")
        keys = {"host": host, "api_keys": ["a"]}
        resolve(Config(server=ServerConfig.model_validate(keys)), "cpu")
