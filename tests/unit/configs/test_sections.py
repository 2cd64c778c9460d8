"""The definitions themselves: strict, frozen, described."""

import pickle

import pytest
from pydantic import ValidationError

from configs import CacheConfig, Config, SchedulerConfig, ServerConfig
from configs.settings import Setting, all_settings, sections

CANARY = "canary-7f3a"


def test_sections_are_frozen() -> None:
    config = Config()
    with pytest.raises(ValidationError):
        config.cache.block_size = 32  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.cache = CacheConfig()  # type: ignore[misc]


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="extra"):
        CacheConfig.model_validate({"blocks": 3})


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (CacheConfig, {"block_size": True}),
        (CacheConfig, {"block_size": "16"}),
        (CacheConfig, {"block_size": 16.0}),
        (CacheConfig, {"num_blocks": 1}),
        (CacheConfig, {"enable_prefix_caching": 1}),
        (CacheConfig, {"gpu_memory_utilization": float("nan")}),
        (CacheConfig, {"gpu_memory_utilization": 0}),
        (CacheConfig, {"kv_cache_memory": "1 parsec"}),
        (SchedulerConfig, {"policy": "lifo"}),
        (SchedulerConfig, {"steps_in_flight": 0}),
        (ServerConfig, {"port": 65536}),
        (ServerConfig, {"api_keys": ("",)}),
        (ServerConfig, {"drain_seconds": float("inf")}),
    ],
)
def test_values_are_checked_strictly(section: type[CacheConfig], values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        section.model_validate(values)


def test_sizes_take_units() -> None:
    assert CacheConfig.model_validate({"kv_cache_memory": "1GiB"}).kv_cache_memory == 1 << 30
    assert CacheConfig.model_validate({"kv_cache_memory": "1.5 MB"}).kv_cache_memory == 1_500_000
    assert CacheConfig.model_validate({"kv_cache_memory": 4096}).kv_cache_memory == 4096


def test_one_text_is_a_list_of_one() -> None:
    server = ServerConfig.model_validate({"allowed_origins": "*", "api_keys": ["a", "b"]})
    assert server.allowed_origins == ("*",)
    assert [key.get_secret_value() for key in server.api_keys] == ["a", "b"]


@pytest.mark.parametrize("setting", all_settings().values(), ids=lambda setting: setting.name)
def test_every_setting_is_described_and_its_default_is_legal(setting: Setting) -> None:
    assert setting.description.endswith((".", '"'))
    sections()[setting.section].model_validate({setting.key: setting.default})


@pytest.mark.parametrize("setting", all_settings().values(), ids=lambda setting: setting.name)
def test_descriptions_name_only_settings_that_exist(setting: Setting) -> None:
    named = [word.strip(".,:;`") for word in setting.description.split() if "`" in word]
    for name in named:
        section, dot, _ = name.partition(".")
        if dot and section in sections():
            assert name in all_settings()


def test_secrets_do_not_print() -> None:
    server = ServerConfig.model_validate({"api_keys": [CANARY], "admin_key": CANARY})
    config = Config(server=server)
    for text in (repr(config), str(config), config.model_dump_json(), str(config.model_dump())):
        assert CANARY not in text


def test_configurations_survive_pickling() -> None:
    config = Config(cache=CacheConfig(num_blocks=11), server=ServerConfig(allowed_origins=("*",)))
    assert pickle.loads(pickle.dumps(config)) == config
