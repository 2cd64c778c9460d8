"""Prints what pyproject.toml requires, with the extras that are named: `requirements.py serve`."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
requirements = list(project["dependencies"])
for extra in sys.argv[1:]:
    requirements += project["optional-dependencies"][extra]
sys.stdout.write("\n".join(dict.fromkeys(requirements)) + "\n")
