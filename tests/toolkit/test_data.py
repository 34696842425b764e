"""The user's own data: read as meant, or refused with the place and the fix."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from runtime.errors import DataError, FeedError, OptionError, UnknownName
from runtime.signature import GraphSignature, TensorSpec
from toolkit.data.arrays import load_arrays, load_feeds
from toolkit.data.catalog import load_data
from toolkit.data.dataset import Dataset, DataSettings, split
from toolkit.data.image_folder import load_folder, read_image
from toolkit.data.table import load_table, read_columns

BOTH = ("classification", "regression")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def table(path: Path, target: str | None = None, tasks: tuple[str, ...] = BOTH, columns: tuple[str, ...] = ()) -> Dataset:
    return load_table(path, target=target, columns=columns, tasks=tasks)


def test_a_table_of_classes(tmp_path: Path) -> None:
    data = table(write(tmp_path / "t.csv", "a,b,label\n1,2,cat\n3,4,dog\n\n5,6,cat\n"))
    assert (data.task, data.labels, data.columns) == ("classification", ("cat", "dog"), ("a", "b"))
    np.testing.assert_array_equal(data.inputs, [[1, 2], [3, 4], [5, 6]])
    assert data.targets.tolist() == [0, 1, 0]


def test_a_table_of_quantities_with_tabs_and_a_byte_order_mark(tmp_path: Path) -> None:
    data = table(write(tmp_path / "t.tsv", "\ufeffa\tprice\n1\t2.5\n3\t4.25\n"), target="price")
    assert (data.task, data.targets.tolist()) == ("regression", [2.5, 4.25])


def test_whole_numbers_are_classes_when_few_and_quantities_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "a,target\n1,10\n2,9\n3,10\n")
    assert table(path).labels == ("9", "10")
    assert table(path, tasks=("regression",)).targets.tolist() == [10, 9, 10]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "is empty; expected a header and rows"),
        ("a,b,label\n", {}, "has a header but no rows"),
        ("a,b,c\n1,2,3\n", {}, r"no column 'target' or 'label'; .*--set data.target=COLUMN \(it has a, b, c\)"),
        ("a,b,label\n1,2,x\n", {"target": "prise"}, "no column 'prise'; it has: a, b, label"),
        ("a,b,label\n1,2,x\n", {"columns": ("a", "z")}, "no column 'z'"),
        ("a,b,label\n1,2,x\n3,Paris,y\n", {}, r"line 3, column 'b' has 'Paris', expected a number; .*data.columns"),
        ("a,b,label\n1,,x\n", {}, "line 2, column 'b' has '', expected a number"),
        ("a,b,label\n1,nan,x\n", {}, "has 'nan', expected a number"),
        ("a,b,label\n1,2\n", {}, "line 2 has 2 values but the header has 3"),
        ("a,a,label\n1,2,x\n", {}, "two columns named 'a'"),
        ("a,label\n1,x\n2,x\n", {}, "single value, 'x'"),
        ("a,label\n1,x\n2, \n", {}, "line 3 has nothing in column 'label'"),
        ("a,label\n1,x\n", {"tasks": ("regression",)}, "column 'label' has 'x', expected a number"),
        ("label\nx\ny\n", {}, "cannot be the only column"),
        ("a,label\n\n\n1,x\n1e300,y\n", {}, "line 5, column 'a' has '1e300'"),
        ("a,label\n" + "".join(f"1,{i}.5\n" for i in range(30)), {"tasks": ("classification",)}, "too many to be classes"),
    ],
)
def test_faults_of_a_table_are_told_with_their_place(text: str, options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        table(write(tmp_path / "t.csv", text), **options)


def test_a_binary_file_is_not_a_table(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(bytes(range(256)))
    with pytest.raises(DataError, match="cannot be read as text"):
        table(tmp_path / "t.csv")


def test_columns_are_read_by_name_in_the_models_order(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "b,note,a\n2,hello,1\n4,world,3\n")
    np.testing.assert_array_equal(read_columns(path, ["a", "b"]), [[1, 2], [3, 4]])


def images(folder: Path, mode: str = "L") -> Path:
    for label, shade in (("dark", 10), ("light", 240)):
        (folder / label).mkdir(parents=True)
        for index in range(3):
            Image.new(mode, (20, 10 + index), shade if mode == "L" else (shade, 0, 255)).save(folder / label / f"{index}.png")
    return folder


def test_an_image_folder_has_a_class_a_folder(tmp_path: Path) -> None:
    data = load_folder(images(tmp_path / "i"), size=16)
    assert (data.labels, data.inputs.shape, data.targets.tolist()) == (("dark", "light"), (6, 1, 16, 16), [0, 0, 0, 1, 1, 1])
    assert data.inputs[0].max() == 10
    colour = load_folder(images(tmp_path / "c", "RGB"), size=16)
    assert colour.inputs.shape == (6, 3, 16, 16)
    assert colour.inputs[0, 2].min() == 255


def test_faults_of_an_image_folder_are_told(tmp_path: Path) -> None:
    folder = images(tmp_path / "i")
    (folder / "dark" / "broken.png").write_bytes(b"\x89PNG not really")
    with pytest.raises(DataError, match=r"broken.png cannot be read: it is not an image"):
        load_folder(folder, size=8)
    whole = (folder / "light" / "0.png").read_bytes()
    (folder / "dark" / "broken.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"broken.png cannot be read"):
        load_folder(folder, size=8)
    with pytest.raises(DataError, match="has 0 folders"):
        load_folder(folder / "light", size=8)
    (tmp_path / "i" / "empty").mkdir()
    (folder / "dark" / "broken.png").unlink()
    with pytest.raises(DataError, match="holds no images"):
        load_folder(folder, size=8)


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 32768, np.uint16)).save(tmp_path / "grey.png")
    assert read_image(tmp_path / "grey.png", channels=1, height=4, width=4).mean() == 128


def test_one_image_is_read_at_the_models_size(tmp_path: Path) -> None:
    Image.new("RGB", (9, 5), (255, 0, 0)).save(tmp_path / "red.png")
    assert read_image(tmp_path / "red.png", channels=3, height=4, width=6).shape == (3, 4, 6)
    assert read_image(tmp_path / "red.png", channels=1, height=4, width=6).shape == (1, 4, 6)
    with pytest.raises(DataError, match="takes 2 channels"):
        read_image(tmp_path / "red.png", channels=2, height=4, width=6)


def test_arrays_of_images_and_of_columns(tmp_path: Path) -> None:
    np.savez(tmp_path / "i.npz", inputs=np.zeros((12, 6, 6), np.uint8), targets=np.arange(12) % 3)
    data = load_arrays(tmp_path / "i.npz", tasks=BOTH)
    assert (data.task, data.kind, data.inputs.shape, data.labels) == ("classification", "image", (12, 1, 6, 6), ("0", "1", "2"))
    np.savez(tmp_path / "c.npz", x=np.zeros((12, 6)), y=np.linspace(0, 1, 12))
    data = load_arrays(tmp_path / "c.npz", tasks=BOTH)
    assert (data.task, data.kind) == ("regression", "columns")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3)}, "expected 'inputs' and 'targets'"),
        ({"inputs": np.zeros((3, 2)), "targets": np.zeros(4)}, "one target a row"),
        ({"inputs": np.zeros(3), "targets": np.zeros(3)}, "expected numbers of"),
        ({"inputs": np.array([[np.nan]] * 3), "targets": np.zeros(3)}, "NaN or infinite values, first in row 0"),
        ({"inputs": np.zeros((3, 2)), "targets": np.array([1, 1, 1])}, "single class"),
        ({"inputs": np.zeros((3, 2)), "targets": np.array([1.0, np.nan, 1])}, "finite numbers"),
    ],
)
def test_faults_of_arrays_are_told(arrays: dict, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load_arrays(tmp_path / "a.npz", tasks=BOTH)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=np.array([{"a": 1}], dtype=object), targets=np.zeros(1))
    with pytest.raises(DataError, match=r"cannot be read as .npz"):
        load_arrays(tmp_path / "a.npz", tasks=BOTH)
    (tmp_path / "b.npz").write_bytes(pickle.dumps({"inputs": 1}))
    with pytest.raises(DataError, match=r"cannot be read as .npz"):
        load_arrays(tmp_path / "b.npz", tasks=BOTH)


def test_feeds_for_any_graph(tmp_path: Path) -> None:
    signature = GraphSignature((TensorSpec("x", "float32", ("batch", 2)),), ())
    np.savez(tmp_path / "f.npz", x=np.zeros((3, 2)))
    assert load_feeds(tmp_path / "f.npz", signature)["x"].dtype == np.float32
    np.savez(tmp_path / "g.npz", y=np.zeros((3, 2)))
    with pytest.raises(DataError, match=r"expected one for each input: x: float32\[batch, 2\]"):
        load_feeds(tmp_path / "g.npz", signature)
    np.savez(tmp_path / "h.npz", x=np.zeros((3, 5)))
    with pytest.raises(FeedError, match="must be 2"):
        load_feeds(tmp_path / "h.npz", signature)


@pytest.mark.parametrize("name", ["diabetes", "digits"])
def test_a_shared_data_set_splits_the_same_way_every_time(name: str) -> None:
    data = load_data(DataSettings(name=name), tasks=BOTH)
    first, second = split(data, DataSettings()), split(data, DataSettings())
    other = split(data, DataSettings(seed=1))
    assert first.test.fingerprint == second.test.fingerprint != other.test.fingerprint
    assert len(first.train) + len(first.validation) + len(first.test) == len(data)
    rows = [row.tobytes() for part in (first.train, first.validation, first.test) for row in part.inputs]
    assert sorted(rows) == sorted(row.tobytes() for row in data.inputs)


def test_statistics_come_from_the_training_part_alone() -> None:
    data = load_data(DataSettings(name="diabetes"), tasks=BOTH)
    parts = split(data, DataSettings())
    np.testing.assert_allclose(parts.statistics.mean, parts.train.inputs.astype(np.float64).mean(axis=0))
    np.testing.assert_allclose(parts.statistics.deviation, parts.train.inputs.astype(np.float64).std(axis=0))
    assert parts.statistics.target_mean == pytest.approx(float(parts.train.targets.mean()))
    assert not np.allclose(parts.statistics.mean, data.inputs.mean(axis=0), rtol=1e-6)


def test_classes_are_spread_evenly() -> None:
    parts = split(load_data(DataSettings(name="digits"), tasks=BOTH), DataSettings())
    for part in (parts.train, parts.validation, parts.test):
        shares = np.bincount(part.targets, minlength=10) / len(part)
        assert np.all(np.abs(shares - 0.1) < 0.02)


def test_a_constant_column_is_left_alone() -> None:
    data = Dataset("x", "regression", "columns", np.ones((20, 2), np.float32), np.arange(20, dtype=np.float32))
    assert split(data, DataSettings()).statistics.deviation == (1.0, 1.0)


def test_choices_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean 'digits'"):
        load_data(DataSettings(name="digit"), tasks=BOTH)
    with pytest.raises(DataError, match="data for regression, but this network does classification"):
        load_data(DataSettings(name="diabetes"), tasks=("classification",))
    with pytest.raises(DataError, match="there is no"):
        load_data(DataSettings(path=str(tmp_path / "no.csv")), tasks=BOTH)
    with pytest.raises(DataError, match="not of a known kind"):
        load_data(DataSettings(path=str(write(tmp_path / "a.xlsx", ""))), tasks=BOTH)
    with pytest.raises(OptionError, match="sum is below 1"):
        DataSettings(validation=0.5, test=0.5)
    few = Dataset("few", "regression", "columns", np.ones((5, 2), np.float32), np.ones(5, np.float32))
    with pytest.raises(DataError, match="few has 5 rows, expected at least 10"):
        split(few, DataSettings())
