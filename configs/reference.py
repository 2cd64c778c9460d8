"""The reference page of all settings, made from their definitions."""

from collections.abc import Iterator
from typing import get_args

from configs.errors import ConfigError
from configs.resolve import Device, resolve
from configs.sections import Config
from configs.settings import Setting, all_settings, sections, show

INTRODUCTION = """\
# Configuration

<!-- Made by `palimpsest config --markdown`. Change the definitions in configs/sections.py. -->

Settings are given in a YAML file (`--config FILE`), whose sections are the headings below, and
one at a time on the command line, which wins over the file:

    palimpsest config --config FILE --set cache.num_blocks=4096 --set scheduler.policy=priority

Keys come from the file or from the environment (`PALIMPSEST_API_KEYS`, `PALIMPSEST_ADMIN_KEY`),
which wins over the file; never from the command line. No other environment variable is read.
`null` gives a setting its default back where that default is "unset". `palimpsest config` prints
every value that holds and where it came from. Files to copy are in `configs/examples/`.
"""


def markdown() -> str:
    """The whole page."""
    return "\n".join(_lines())


def value_by_device(config: Config, setting: Setting) -> dict[Device, object]:
    """What `setting` comes to on each kind of device; raises ConfigError if on none.

    A device on which the settings contradict each other is left out.
    """
    values: dict[Device, object] = {}
    problem: ConfigError | None = None
    for device in get_args(Device):
        try:
            values[device] = value_of(resolve(config, device), setting)
        except ConfigError as error:
            problem = error
    if not values and problem is not None:
        raise problem
    return values


def show_by_device(values: dict[Device, object]) -> str:
    """One text if all devices agree, else the text of each."""
    texts = {device: show(value) for device, value in values.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{text} on {device}" for device, text in texts.items())


def value_of(config: Config, setting: Setting) -> object:
    """The value of `setting` in `config`."""
    value: object = getattr(getattr(config, setting.section), setting.key)
    return value


def _lines() -> Iterator[str]:
    yield INTRODUCTION
    for section, model in sections().items():
        yield f"## {section}"
        yield ""
        yield " ".join((model.__doc__ or "").split())
        yield ""
        yield "| setting | allowed | default | meaning |"
        yield "|---|---|---|---|"
        for setting in all_settings().values():
            if setting.section == section:
                cells = (
                    f"`{setting.key}`",
                    setting.allowed,
                    _default(setting),
                    setting.description,
                )
                yield f"| {' | '.join(cells)} |"
        yield ""


def _default(setting: Setting) -> str:
    if setting.default is not None:
        return show(setting.default)
    return show_by_device(value_by_device(Config(), setting))
