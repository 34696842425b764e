"""Which library is a sentence from? Sentences of the docstrings of installed libraries, labelled by library.

The libraries are those that Edgekit's own dependencies bring, and the standard library. Their source is read with `ast`;
nothing is imported. A docstring gives the sentences of its opening prose: the paragraphs before the first that is indented, a
list, a section or an example. Of these:

    sentences of 5 to 40 words are kept, test code aside;
    a library's name, its own or another's ("numpy", "np", "torch", …), is replaced by "library": the answer is not in the text;
    a sentence that stands twice in a library is one; one that two libraries have is dropped (compared by letters alone);
    a library gives at most `LIMIT` sentences, from files in an order that is fixed and unrelated to their contents.

Other versions of the libraries give other sentences; the fingerprint of the data tells.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.util
import os
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from runtime.errors import DataError, MissingDependency

from .text_data import LabelledTexts

LIMIT = 2000  # every one of the libraries has as many, so that the classes are equal
_MODULES = {
    "networkx": "networkx",
    "numpy": "numpy",
    "onnxscript": "onnxscript",
    "python": "",  # the standard library
    "scikit-learn": "sklearn",
    "scipy": "scipy",
    "sympy": "sympy",
    "torch": "torch",
}
_SKIPPED_FOLDERS = {"test", "tests", "testing", "_testing", "site-packages", "dist-packages", "idlelib", "lib2to3", "externals"}
_NAMES = re.compile(
    r"\b(?:networkx|nx|numpy|np|onnx\w*|c?python\d*|py|scikits?[-.]?learn|sklearn|scipy|sympy|(?:py)?torch\w*)\b", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_NOT_PROSE = re.compile(r"^\s|^[-*+:.>|@#$=]|^\d+[.)]|^\w+:$|>>>|::|^[-=~^*#]{3,}$", re.MULTILINE)
_BYTES_A_DOCSTRING = 1500  # a file with fewer quotes than this asks for is not worth the time to parse it
_SPARE = 1.1  # of the sentences wanted, read more, since those that two libraries have are dropped


def load(limit: int = LIMIT) -> LabelledTexts:
    return label_sentences({label: _folder(label) for label in sorted(_MODULES)}, limit=limit)


def label_sentences(folders: Mapping[str, Path], *, limit: int) -> LabelledTexts:
    """The sentences of the source files in each folder, labelled by the folder's key."""
    with _no_garbage_collection():
        found = {label: _sentences_of_folder(folder, limit=round(limit * _SPARE)) for label, folder in folders.items()}
    libraries = Counter(key for sentences in found.values() for key in sentences)
    kept = {
        label: [text for key, text in sentences.items() if libraries[key] == 1][:limit] for label, sentences in found.items()
    }
    for label, texts in kept.items():
        if not texts:
            raise DataError(
                f"no sentences were found in the source of {label} at {folders[label]}; install it with its .py files"
            )
    targets = np.repeat(np.arange(len(kept), dtype=np.int64), [len(texts) for texts in kept.values()])
    return LabelledTexts("docstrings", tuple(text for texts in kept.values() for text in texts), targets, tuple(kept))


def opening_sentences(docstring: str) -> Iterator[str]:
    """The sentences of the prose a docstring starts with."""
    for paragraph in re.split(r"\n\s*\n", docstring.strip()):
        if _NOT_PROSE.search(paragraph):
            return
        yield from _SENTENCE_END.split(" ".join(paragraph.split()))


def _folder(label: str) -> Path:
    module = _MODULES[label]
    if not module:
        return Path(sysconfig.get_path("stdlib"))
    found = importlib.util.find_spec(module)  # says where a package is without running it
    if found is None or not found.submodule_search_locations:
        raise MissingDependency.of(label, "all", "the docstrings data")
    return Path(found.submodule_search_locations[0])


def _sentences_of_folder(folder: Path, *, limit: int) -> dict[str, str]:
    """At most `limit` different sentences, by their letters."""
    sentences: dict[str, str] = {}
    for name in sorted(_source_files(folder), key=lambda name: hashlib.sha256(name.encode()).digest()):
        for docstring in _docstrings(folder / name):
            for sentence in opening_sentences(docstring):
                text = _NAMES.sub("library", sentence)
                if 5 <= len(text.split()) <= 40:
                    sentences.setdefault(re.sub(r"[\W\d_]+", "", text.lower()), text)
        if len(sentences) >= limit:
            break
    return dict(list(sentences.items())[:limit])


def _source_files(folder: Path) -> Iterator[str]:
    """Paths of the source files within `folder`, with / between their parts."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for name in files:
            if name.endswith(".py") and not name.startswith("test_"):
                yield (Path(place) / name).relative_to(folder).as_posix()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Syntax trees are many small objects without cycles; looking for cycles among them doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _docstrings(path: Path) -> Iterator[str]:
    try:
        source = path.read_bytes()
        if source.count(b'"""') * _BYTES_A_DOCSTRING < len(source):
            return
        with warnings.catch_warnings():  # of other people's escapes
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, OSError, RecursionError):
        return  # a template or a file for another Python
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if docstring := ast.get_docstring(node):
                yield docstring
            pending += reversed(node.body)
        elif isinstance(node, ast.If | ast.Try):
            pending += reversed(node.body)
