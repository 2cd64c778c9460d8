"""Where values come from, which one wins, and what is said about wrong ones."""

import pickle
import traceback
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import SecretStr

from configs import Config, ConfigError, LoadedConfig, load
from configs.settings import all_settings

CANARY = "canary-7f3a"


def write(folder: Path, text: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(text)
    return path


def loaded(*overrides: str, environ: Mapping[str, str] | None = None) -> LoadedConfig:
    return load(None, overrides, environ or {})


def problem(*overrides: str, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(*overrides, environ=environ)
    return str(caught.value)


def problem_in_file(folder: Path, text: str) -> str:
    """The message, with `FILE` for the path of the file."""
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load(path, (), {})
    return str(caught.value).replace(str(path), "FILE")


class TestSources:
    def test_nothing_given_is_all_defaults(self) -> None:
        result = loaded()
        assert result.config == Config()
        assert set(result.sources) == set(all_settings())
        assert {str(source) for source in result.sources.values()} == {"default"}

    def test_later_ones_win_and_each_source_is_told(self, tmp_path: Path) -> None:
        path = write(
            tmp_path,
            "cache:\n  num_blocks: 100\n  block_size: 32\nserver:\n  api_keys: [from-file]\n",
        )
        result = load(
            path,
            ["cache.num_blocks=7", "cache.num_blocks=200"],
            {"PALIMPSEST_API_KEYS": " a , b,"},
        )
        assert result.config.cache.num_blocks == 200
        assert result.config.cache.block_size == 32
        assert result.config.server.api_keys == (SecretStr("a"), SecretStr("b"))
        assert str(result.sources["cache.num_blocks"]) == "--set"
        assert str(result.sources["cache.block_size"]) == f"{path}:3"
        assert str(result.sources["server.api_keys"]) == "PALIMPSEST_API_KEYS"
        assert str(result.sources["server.port"]) == "default"

    @pytest.mark.parametrize("text", ["", "# nothing\n", "cache:\n", "cache: {}\n", "---\n"])
    def test_empty_files_and_sections_are_fine(self, tmp_path: Path, text: str) -> None:
        assert load(write(tmp_path, text), (), {}).config == Config()

    def test_null_brings_the_default_back(self, tmp_path: Path) -> None:
        path = write(tmp_path, "cache:\n  num_blocks: 100\n")
        assert load(path, ["cache.num_blocks=null"], {}).config.cache.num_blocks is None

    def test_the_environment_of_the_process_is_the_default(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PALIMPSEST_ADMIN_KEY", CANARY)
        assert load().config.server.admin_key == SecretStr(CANARY)


class TestOverrides:
    @pytest.mark.parametrize(
        ("override", "value"),
        [
            ("cache.num_blocks=4096", 4096),
            ("cache.num_blocks = 4_096", 4096),
            ("cache.kv_cache_memory=1GiB", 1 << 30),
            ("cache.kv_cache_memory=4096", 4096),
            ("cache.gpu_memory_utilization=1", 1.0),
            ("cache.gpu_memory_utilization=5e-1", 0.5),
            ("cache.enable_prefix_caching=off", False),
            ("scheduler.policy=priority", "priority"),
            ("model.revision=1234567", "1234567"),
            ("model.model=a=b", "a=b"),
            ("model.served_model_name=1.5", ("1.5",)),
            ("model.served_model_name=[a, 1.5]", ("a", "1.5")),
        ],
    )
    def test_values_are_read_as_the_setting_asks(self, override: str, value: object) -> None:
        section, _, key = override.partition("=")[0].strip().partition(".")
        assert getattr(getattr(loaded(override).config, section), key) == value

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("cache.num_blocks", "--set cache.num_blocks must have the form section.key=value."),
            ("=3", "--set =3 must have the form section.key=value."),
            (
                "cache.num_blocks=",
                "--set cache.num_blocks= gives no value; null unsets a setting.",
            ),
            (
                "cache.num_block=3",
                "cache.num_block (--set) is unknown: did you mean cache.num_blocks?",
            ),
            (
                "scheduler.block_size=3",
                "scheduler.block_size (--set) is unknown: did you mean cache.block_size?",
            ),
            (
                "kache.num_blocks=3",
                "kache.num_blocks (--set) is unknown (the sections are model, cache, scheduler, "
                "parallel, server): did you mean cache.num_blocks?",
            ),
            (
                "cache.frobnicate=3",
                "cache.frobnicate (--set) is unknown: `palimpsest config` lists all settings.",
            ),
            (
                "cache=3",
                "cache (--set) is a section: it holds settings such as cache.block_size, and has "
                "no value of its own.",
            ),
            (
                "cache.block_size=2048",
                "cache.block_size is 2048 (--set), but must be a whole number from 1 to 1024.",
            ),
            (
                "cache.block_size=null",
                "cache.block_size is null (--set), but must be a whole number from 1 to 1024.",
            ),
            (
                "cache.block_size=many",
                'cache.block_size is the text "many" (--set), but must be a whole number from 1 '
                "to 1024.",
            ),
            (
                "cache.hash=sha265",
                "cache.hash is sha265 (--set), but must be auto, xxh3_128 or sha256 (did you mean "
                "sha256?).",
            ),
            (
                "server.port=true",
                "server.port is true (--set), but must be a whole number from 1 to 65535.",
            ),
        ],
    )
    def test_wrong_ones_are_explained(self, override: str, message: str) -> None:
        assert problem(override) == message

    def test_each_problem_has_its_line(self) -> None:
        message = problem("cache.block_size=0", "server.port=0", "scheduler.policy=priority")
        assert [line.partition(" ")[0] for line in message.splitlines()] == [
            "cache.block_size",
            "server.port",
        ]

    @pytest.mark.parametrize("name", ["server.api_keys", "server.admin_key"])
    def test_keys_do_not_come_from_the_command_line(self, name: str) -> None:
        message = problem(f"{name}={CANARY}")
        assert message.startswith(f"{name} cannot be given on the command line")
        assert "PALIMPSEST_" in message
        assert CANARY not in message


class TestFiles:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "cache:\n  num_blocks: 3\n  num_blocks: 4\n",
                "FILE:3: num_blocks appears twice in cache, before in line 2: keep one of them.",
            ),
            (
                "cache:\n  num_blocks: 3\nserver:\ncache:\n  block_size: 4\n",
                "FILE:4: cache appears twice, before in line 1: keep one of them.",
            ),
            (
                "cache:\n  num_blocks: 3\n bad",
                "FILE:3: this is no valid YAML: expected <block end>, but found '<scalar>'.",
            ),
            (
                "cache:\n\tnum_blocks: 3",
                "FILE:2: this is no valid YAML: found character '\\t' that cannot start any token.",
            ),
            (
                "- cache\n",
                "FILE:1: a configuration file holds sections (model:, cache:, …) with settings in "
                "them, and nothing else.",
            ),
            ("[a]: 3", "FILE:1: the name of a section or setting must be a text."),
            (
                "cache: 5",
                "cache (FILE:1) is a section: it holds settings such as cache.block_size, and has "
                "no value of its own.",
            ),
            (
                "modle:\n  dtype: float16\n",
                "modle.dtype (FILE:2) is unknown (the sections are model, cache, scheduler, "
                "parallel, server): did you mean model.dtype?",
            ),
            ("kache:\n", "kache (FILE:1) is unknown: `palimpsest config` lists all settings."),
            (
                "cache:\n  block_size: '16'\n",
                'cache.block_size is the text "16" (FILE:2), but must be a whole number from 1 to '
                "1024: leave the quotes out.",
            ),
            (
                "model:\n  revision: 1234567\n",
                "model.revision is 1234567 (FILE:2), but must be a text, not empty, or null: put "
                "it in quotes.",
            ),
            (
                "cache:\n  num_blocks: 2024-13-45\n",
                "FILE:2: this value cannot be read: month must be in 1..12.",
            ),
            (
                "cache:\n  num_blocks: !!python/object:os.system x\n",
                "FILE:2: this value cannot be read: could not determine a constructor for the tag.",
            ),
            (
                "cache: {block_size: 8}\n---\ncache: {block_size: 8}\n",
                "FILE:2: this is no valid YAML: but found another document.",
            ),
        ],
    )
    def test_wrong_ones_are_explained(self, tmp_path: Path, text: str, message: str) -> None:
        assert problem_in_file(tmp_path, text) == message

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        binary = tmp_path / "binary.yaml"
        binary.write_bytes(b"cache:\xff\n")
        missing = tmp_path / "missing.yaml"
        for path, message in [
            (missing, f"Cannot read {missing}: No such file or directory."),
            (tmp_path, f"Cannot read {tmp_path}: Is a directory."),
            (binary, f"{binary} is no text in UTF-8, at byte 6."),
        ]:
            with pytest.raises(ConfigError) as caught:
                load(path, (), {})
            assert str(caught.value) == message

    @pytest.mark.parametrize(
        "value",
        [f"*{CANARY}", f"!{CANARY}", f"@{CANARY}", f"[{CANARY}", f"{{{CANARY}: 1}}", f'"{CANARY}'],
    )
    @pytest.mark.parametrize("key", ["api_keys", "admin_key"])
    def test_no_traceback_contains_a_key(self, tmp_path: Path, key: str, value: str) -> None:
        path = write(tmp_path, f"server:\n  {key}: {value}\n")
        with pytest.raises(ConfigError) as caught:
            load(path, (), {})
        assert CANARY not in "".join(traceback.format_exception(caught.value))


class TestEnvironment:
    @pytest.mark.parametrize("value", ["", " ", ",", " , "])
    def test_set_but_empty_is_an_error(self, value: str) -> None:
        for variable in ("PALIMPSEST_API_KEYS", "PALIMPSEST_ADMIN_KEY"):
            if variable == "PALIMPSEST_ADMIN_KEY" and value.strip():
                continue
            message = problem(environ={variable: value})
            assert message.startswith(f"{variable} is set but")

    @pytest.mark.parametrize(
        ("variable", "meant"),
        [
            ("PALIMPSEST_API_KEY", "PALIMPSEST_API_KEYS"),
            ("PALIMPSEST_ADMINKEY", "PALIMPSEST_ADMIN_KEY"),
        ],
    )
    def test_a_misspelt_key_variable_is_an_error(self, variable: str, meant: str) -> None:
        message = problem(environ={variable: CANARY})
        assert message == (
            f"The environment variable {variable} means nothing here: did you mean {meant}?"
        )

    def test_other_variables_are_left_alone(self) -> None:
        others = {
            "PALIMPSEST_SERVICE_HOST": "10.0.0.1",
            "PALIMPSEST_PORT": "tcp://10.0.0.1:8000",
            "PALIMPSEST_TEST_DATA": "somewhere",
            "API_KEYS": "x",
        }
        assert loaded(environ=others).config == Config()


def test_errors_survive_pickling() -> None:
    with pytest.raises(ConfigError) as caught:
        loaded("cache.block_size=0")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, ConfigError)
    assert str(copy) == str(caught.value)
