"""docs/configuration.md is what the definitions say."""

from pathlib import Path

from configs import Config, SchedulerConfig
from configs.reference import markdown, show_by_device, value_by_device
from configs.sections import ModelConfig
from configs.settings import all_settings

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == f"{markdown()}\n", (
        "run: .venv/bin/palimpsest config --markdown > docs/configuration.md"
    )


def test_every_setting_has_a_row() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    assert len(rows) == len(all_settings())
    assert all(row.count(" | ") == 3 for row in rows)


def test_values_that_depend_on_the_device_name_it() -> None:
    setting = all_settings()["scheduler.max_num_seqs"]
    assert show_by_device(value_by_device(Config(), setting)) == "64 on cpu, 256 on cuda"
    given = Config(scheduler=SchedulerConfig(max_num_seqs=5))
    assert show_by_device(value_by_device(given, setting)) == "5"


def test_a_device_that_the_settings_rule_out_is_left_out() -> None:
    config = Config(
        model=ModelConfig(max_model_len=4096),
        scheduler=SchedulerConfig(enable_chunked_prefill=False),
    )
    setting = all_settings()["scheduler.max_num_batched_tokens"]
    assert value_by_device(config, setting) == {"cuda": 8192}
