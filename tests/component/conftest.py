"""What component tests share: threads set on purpose, and the small trained model."""

from pathlib import Path

import pytest
import torch

from tests.support.references import stories_directory


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Several test processes share the cores; each takes one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def stories(test_data_dir: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of stories260K, or of its stand-in."""
    return stories_directory(test_data_dir, tmp_path_factory.mktemp("stories"))
