"""`python -m scheduler replay FILE…`: does the scheduler decide as it was recorded?"""

import argparse
import gzip
import json
import sys
import zlib
from pathlib import Path
from typing import Any

from configs import ConfigError
from scheduler.replay import RecordingError, first_difference, replay


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    same = True
    for path in arguments.files:
        try:
            recording = _read(path)
            if arguments.json:
                print(json.dumps(replay(recording)))
                continue
            difference = first_difference(recording)
        except (OSError, EOFError, zlib.error, RecordingError, ConfigError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        print(f"{path.name}: {difference or 'ok'}")
        same = same and difference is None
    return 0 if same else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scheduler",
        description="Run the scheduler core without workers.",
        epilog="Exit code: 0 all decisions are the same, 1 some differ, 2 a file is unusable.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "replay",
        help="replay recorded workloads and compare every decision",
        description="Replays each recording (JSON, also gzipped) through the real core and"
        " prints 'ok', or the first difference: step, field, expected, got.",
    )
    command.add_argument("files", nargs="+", type=Path, metavar="FILE")
    command.add_argument(
        "--json", action="store_true", help="print our own trace instead, one line per file"
    )
    return parser


def _read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    try:
        recording = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"is not JSON: {error}") from None
    if not isinstance(recording, dict):
        raise RecordingError("is not a recording: it must be a JSON object")
    return recording


if __name__ == "__main__":
    sys.exit(main())
