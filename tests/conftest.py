"""Fixtures that are costly to make: each is made once for all test processes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from .helpers import gemm_bundle

# Some machines announce AMX and forbid it; training refuses bf16 there and names this way out. Read when torch is first used.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """In PyTorch, where test processes share the cores: at sizes as small as here a second thread takes more than it gives."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def short_races() -> Iterator[None]:
    """Of variants: tests ask that there is one, not who wins it, and on a busy machine each would be run again."""
    from runtime.bench import bench

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exporters.race._LAUNCHES", (1,))
        patch.setattr("exporters.race._LAUNCH_SECONDS", 0.1)
        patch.setattr("toolkit.deployment.bench", partial(bench, launches=1, seconds=0.1))
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """shared("name", make): the folder `make` filled, made by whichever process needs it first."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if base.name.startswith("popen-") else base

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder = root / f"shared-{name}"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "done").exists():
                folder.mkdir(exist_ok=True)
                make(folder)
                (folder / "done").touch()
        return folder

    return get


def _train(name: str, folder: Path, settings: dict[str, object]) -> None:
    from toolkit.training import loop
    from toolkit.training.recipe import load_recipe

    # One thread: test processes share two cores, and waiting threads of one would starve the other.
    run, parts = loop.start(load_recipe(name).with_settings({"threads": 1} | settings), folder / "run")
    loop.train(run, parts, folder / "run")


@pytest.fixture(scope="session")
def trained(shared: Callable[[str, Callable[[Path], object]], Path]) -> Callable[..., Path]:
    """trained("lenet"): the run directory of the shared recipe, trained to its end, or with other settings."""
    return lambda name, **settings: shared(_name("run", name, settings), lambda folder: _train(name, folder, settings)) / "run"


@pytest.fixture(scope="session")
def exported(shared: Callable[[str, Callable[[Path], object]], Path], trained: Callable[..., Path]) -> Callable[..., Path]:
    """exported("lenet"): the bundle of that run."""

    def make(name: str, folder: Path, settings: dict[str, object]) -> None:
        from exporters.export import export
        from exporters.source import find_source

        export(find_source(str(trained(name, **settings))), folder / f"{name}.bundle")

    return lambda name, **settings: (
        shared(_name("bundle", name, settings), lambda folder: make(name, folder, settings)) / f"{name}.bundle"
    )


def _name(kind: str, name: str, settings: dict[str, object]) -> str:
    return "-".join([kind, name, *(f"{key}={value}" for key, value in settings.items())])


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A small bundle of the test's own, to be altered at will."""
    return gemm_bundle(tmp_path)
