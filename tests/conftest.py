"""One thread for small models, and runs that many tests look at and none changes, made once."""

import os
from pathlib import Path

import pytest
import torch
from hub_server import hub  # before anything that imports huggingface_hub
from hypothesis import settings
from program import sequence, tmx

__all__ = ["hub", "sequence", "tmx"]

settings.register_profile("any machine", deadline=None)  # a busy one takes longer than 200 ms
settings.load_profile("any machine")
os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of triton: its programs run on the CPU
# Programs that tests start with another home need not compile all loops again.
os.environ.setdefault("NUMBA_CACHE_DIR", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Models of tests are so small that threads only wait for each other: eight times the work on a busy machine.

    Sums in another order differ in the last bit, too: runs that are compared have the same number of threads.
    """
    torch.set_num_threads(1)


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch):
    """What a test writes need not outlive a crash of the machine."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def image_run(tmp_path_factory):
    """Two tasks on an encoder of images."""
    return _built(tmp_path_factory, "vit")


@pytest.fixture(scope="session")
def text_run(tmp_path_factory):
    """Two tasks on an encoder of texts."""
    return _built(tmp_path_factory, "bert")


@pytest.fixture(params=["image_run", "text_run"])
def any_run(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def done(tmp_path_factory):
    """The experiment in miniature, done once."""
    from experiments.miniature import reproduced  # slow, too

    return reproduced(tmp_path_factory.mktemp("experiment"))


def _built(tmp_path_factory, kind):
    import labelled_run  # slow, and most rooms do without

    return labelled_run.build(tmp_path_factory.mktemp(kind) / "run", kind)
