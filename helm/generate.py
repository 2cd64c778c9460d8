"""`python -m helm.generate`: makes the files of the chart that follow from code."""

import json
from pathlib import Path

import yaml

from helm.alerts import rules
from helm.config_schema import config_schema
from helm.dashboard import dashboard

FOLDER = Path(__file__).parent
CHART = FOLDER / "palimpsest"


def contents() -> dict[Path, str]:
    """What each generated file has to hold."""
    schema = yaml.safe_load((FOLDER / "schema.yaml").read_text())
    schema["properties"]["config"] = config_schema()
    made = "# Made by `python -m helm.generate` from helm/alerts.py.\n"
    return {
        CHART / "values.schema.json": _json(schema),
        CHART / "files" / "dashboard.json": _json(dashboard()),
        CHART / "files" / "rules.yaml": made + yaml.safe_dump(rules(), sort_keys=False, width=100),
    }


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


if __name__ == "__main__":
    for path, text in contents().items():
        path.write_text(text)
