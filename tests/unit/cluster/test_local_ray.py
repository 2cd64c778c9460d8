"""What the processes of a cluster of our own inherit."""

import os

import pytest

from cluster.local_ray import _set_environment


@pytest.mark.parametrize(
    ("given", "is_elsewhere"), [({"PYTHONDONTWRITEBYTECODE": "1"}, True), ({}, False)]
)
def test_bytecode_is_kept_but_not_beside_the_sources_of_who_does_not_want_it_there(
    given: dict[str, str], is_elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    _set_environment({})
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
    assert ("PYTHONPYCACHEPREFIX" in os.environ) is is_elsewhere
    assert os.environ["RAY_AUTH_MODE"] == "token"
