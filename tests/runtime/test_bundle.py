"""The bundle refuses everything that is not exactly what was written."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from runtime.bundle import MANIFEST, Bundle, _sealed, pack_golden, write_bundle
from runtime.errors import AlteredFile, BundleError, NewerFormat, OutputExists

from ..helpers import edgekit, gemm_model, leftovers


def files_of(bundle: Path) -> list[Path]:
    return [path for path in sorted(bundle.rglob("*")) if path.is_file()]


def reseal(bundle: Path, change: object) -> None:
    """Alter the manifest and seal it again, as someone with bad intent would."""
    document = json.loads((bundle / MANIFEST).read_text())
    document.pop("seal")
    change(document)  # type: ignore[operator]
    (bundle / MANIFEST).write_bytes(_sealed(document))


def test_a_bundle_opens_and_says_what_is_in_it(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    assert opened.manifest.task == "tensors"
    assert opened.graph()[0] == "model"
    assert opened.graph_bytes == (bundle / "model.onnx").stat().st_size
    assert len(list(opened.goldens())) == 3
    assert opened.manifest.lineage[0]["step"] == "export"


def test_flipping_any_byte_of_any_file_is_refused_with_its_name(bundle: Path) -> None:
    chance = random.Random(0)
    for path in files_of(bundle):
        original = path.read_bytes()
        positions = {0, len(original) - 1, *(chance.randrange(len(original)) for _ in range(40))}
        for position in positions:
            altered = bytearray(original)
            altered[position] ^= chance.randrange(1, 256)
            path.write_bytes(altered)
            with pytest.raises(BundleError, match=path.name):
                Bundle.open(bundle)
        path.write_bytes(original)
    Bundle.open(bundle)


def test_every_byte_of_the_manifest_is_sealed(bundle: Path) -> None:
    path = bundle / MANIFEST
    original = path.read_bytes()
    for position in range(len(original)):
        altered = bytearray(original)
        altered[position] ^= 0x20
        path.write_bytes(altered)
        with pytest.raises(BundleError):
            Bundle.open(bundle)


def test_a_missing_file_is_named(bundle: Path) -> None:
    (bundle / "goldens" / "model-1.npz").unlink()
    with pytest.raises(AlteredFile, match=r"goldens/model-1.npz is missing"):
        Bundle.open(bundle)


def test_a_longer_file_is_refused_by_its_size(bundle: Path) -> None:
    with (bundle / "model.onnx").open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(AlteredFile, match=r"bytes but the manifest lists"):
        Bundle.open(bundle)


@pytest.mark.parametrize("name", ["../outside.npz", "/etc/passwd", "a/../../b", "C:evil", "a\\b", ""])
def test_a_path_outside_the_bundle_is_refused(bundle: Path, name: str) -> None:
    reseal(bundle, lambda document: document["files"].update({name: {"sha256": "0" * 64, "bytes": 1}}))
    with pytest.raises(BundleError, match="outside the bundle"):
        Bundle.open(bundle)


def test_a_link_that_leaves_the_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.npz"
    shutil.move(bundle / "goldens" / "model-0.npz", outside)
    os.symlink(outside, bundle / "goldens" / "model-0.npz")
    with pytest.raises(BundleError, match="leaves the bundle"):
        Bundle.open(bundle)


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "unlisted.bin"])
def test_external_data_that_is_not_the_bundles_own_is_refused(bundle: Path, location: str) -> None:
    path = bundle / "model.onnx"
    model = onnx.load(str(path))
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], location)
    model.graph.initializer[0].ClearField("raw_data")
    path.write_bytes(model.SerializeToString())
    import hashlib

    entry = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
    reseal(bundle, lambda document: document["files"].update({"model.onnx": entry}))
    with pytest.raises(BundleError, match=r"outside the bundle|does not list"):
        Bundle.open(bundle)


def test_a_newer_format_asks_for_an_upgrade(bundle: Path) -> None:
    reseal(bundle, lambda document: document.update(format=2))
    with pytest.raises(NewerFormat, match="upgrade edgekit"):
        Bundle.open(bundle)


@pytest.mark.parametrize("field", ["graphs", "goldens", "lineage", "task"])
def test_a_manifest_without_a_field_says_so(bundle: Path, field: str) -> None:
    reseal(bundle, lambda document: document.pop(field))
    with pytest.raises(BundleError, match="lacks or misuses a field"):
        Bundle.open(bundle)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["goldens"][0].update(graph="other"),
        lambda document: document["tolerance"].clear(),
        lambda document: document["tolerance"]["model"].clear(),
        lambda document: document["graphs"].clear(),
        lambda document: document["files"]["model.onnx"].pop("bytes"),
        lambda document: document.update(files=[]),
        lambda document: document.update(format=0),
        lambda document: document.update(format="1"),
        lambda document: document.update(task="cooking"),
        lambda document: document["graphs"]["model"].update(signature={}),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(bundle: Path, change: object) -> None:
    reseal(bundle, change)
    with pytest.raises(BundleError, match=r"manifest\.json|task"):
        Bundle.open(bundle)


def test_a_golden_that_is_not_one_is_refused(bundle: Path) -> None:
    import hashlib
    import pickle

    path = bundle / "goldens" / "model-0.npz"
    path.write_bytes(pickle.dumps({"input.x": 1}))
    entry = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
    reseal(bundle, lambda document: document["files"].update({"goldens/model-0.npz": entry}))
    with pytest.raises(BundleError, match="is not a golden"):
        list(Bundle.open(bundle).goldens())


def test_a_manifest_that_is_a_link_to_elsewhere_is_refused(bundle: Path, tmp_path: Path) -> None:
    shutil.move(bundle / MANIFEST, tmp_path / "elsewhere.json")
    os.symlink(tmp_path / "elsewhere.json", bundle / MANIFEST)
    with pytest.raises(BundleError, match="leaves the bundle"):
        Bundle.open(bundle)


def test_what_is_not_a_bundle_says_so(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no bundle at"):
        Bundle.open(tmp_path / "nowhere")
    with pytest.raises(BundleError, match=r"has no manifest.json"):
        Bundle.open(tmp_path)


def test_writing_never_replaces_unasked(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    files = {name: bundle / name for name in opened.manifest.files}
    with pytest.raises(OutputExists, match="--force"):
        write_bundle(bundle, opened.manifest, files)
    again = write_bundle(bundle, opened.manifest, files, force=True)
    assert again.seal == opened.seal
    assert leftovers(bundle.parent) == []


def test_force_does_not_replace_what_edgekit_did_not_write(bundle: Path, tmp_path: Path) -> None:
    opened = Bundle.open(bundle)
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter1.txt").write_text("years of work")
    with pytest.raises(OutputExists, match="will not replace it"):
        write_bundle(precious, opened.manifest, {}, force=True)
    assert (precious / "chapter1.txt").exists()


def test_a_bundle_that_could_not_be_opened_is_not_written(bundle: Path, tmp_path: Path) -> None:
    opened = Bundle.open(bundle)
    with pytest.raises(BundleError):
        write_bundle(tmp_path / "new.bundle", opened.manifest, {"model.onnx": gemm_model().SerializeToString()})  # no goldens
    assert not (tmp_path / "new.bundle").exists()
    assert leftovers(tmp_path) == []


def test_a_golden_survives_packing() -> None:
    import io

    inputs, outputs = {"x": np.arange(3.0)}, {"y": np.array([1], np.int64)}
    with np.load(io.BytesIO(pack_golden(inputs, outputs)), allow_pickle=False) as archive:
        np.testing.assert_array_equal(archive["input.x"], inputs["x"])
        np.testing.assert_array_equal(archive["output.y"], outputs["y"])


def test_both_verify_commands_fail_with_the_name_of_a_flipped_file(bundle: Path) -> None:
    import subprocess
    import sys

    from ..helpers import ROOT

    for path in files_of(bundle):
        original = path.read_bytes()
        path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        first = edgekit("verify", bundle)
        second = subprocess.run(
            [sys.executable, "-m", "runtime", "verify", str(bundle)], cwd=ROOT, capture_output=True, text=True
        )
        for result in (first, second):
            assert result.returncode == 1
            assert path.name in result.stderr
            assert "Traceback" not in result.stderr
        path.write_bytes(original)
    assert edgekit("verify", bundle).returncode == 0
