"""The laws that every decoder obeys (see the design), over every generating network of the catalogue and every
precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from runtime.errors import FeedError, OptionError
from runtime.generation import rows as rows_module
from runtime.generation import scheduler as scheduler_module
from runtime.generation.beam import BeamSearch
from runtime.generation.rows import Rows
from runtime.text import BOS, EOS, PAD

from .networks import FIRST_LETTER, ROOM, VOCABULARY, Tiny, flat, generating, prompts, some_of
from .quantized import OF_ONE_FORM, PRECISIONS

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"beams": 4, "n_best": 3},
    "beam, filtered": {"beams": 3, "n_best": 3, "no_repeat_ngram": 2, "repetition_penalty": 1.3, "length_penalty": 0.6},
    "groups": {"beams": 4, "n_best": 4, "groups": 2, "diversity": 0.7},
    "sampled": {"temperature": 1.0, "seed": 5},
    "sampled, several": {"temperature": 1.3, "top_p": 0.9, "n_best": 3, "seed": 6},
    "sampled beams": {"temperature": 0.8, "beams": 3, "seed": 7},
}
modes = pytest.mark.parametrize("mode", MODES)


language_models = some_of(generating("language-model"))


@pytest.fixture(params=PRECISIONS)
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_greedy_is_what_pytorchs_arg_max_gives_and_texts_do_end(exact: Tiny) -> None:
    found = exact.model.generate(some := prompts(24), max_new_tokens=ROOM)
    for prompt, result in zip(some, found, strict=True):
        chosen = [*result.tokens, *([EOS] if result.finish == "eos" else [])]
        scores = exact.logprobs(prompt, chosen)[:-1]
        taken = scores[range(len(chosen)), chosen]
        scores[:, PAD] = -torch.inf  # is never generated
        assert (scores.amax(dim=-1) - taken).max() <= 2 * exact.noise, "two within their noise are equally likely"
        assert result.token_logprobs == pytest.approx(taken[: len(result.tokens)].tolist(), abs=exact.noise)
        assert result.finish == "eos" or len(result.tokens) == ROOM
    finishes = Counter(result.finish for result in found)
    assert finishes["eos"] >= 4, "the other tests need texts that end"
    assert any(result.finish == "eos" and result.tokens for result in found)


@pytest.mark.parametrize("filtered", [False, True])
def test_beams_1_equals_greedy(tiny: Tiny, filtered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One beam is decoded greedily, so a beam search of one has to be smuggled in."""
    options: dict[str, Any] = {"max_new_tokens": ROOM, "length_penalty": 0.6}
    options |= {"no_repeat_ngram": 2, "min_new_tokens": 2} if filtered else {}
    some = prompts(12)
    expected = tiny.model.generate(some, **options)
    made = []

    class OneBeam:
        def __new__(cls, *arguments: Any) -> Any:
            made.append(BeamSearch(*arguments))
            return made[-1]

    monkeypatch.setattr(scheduler_module, "Independent", OneBeam)
    actual = tiny.model.generate(some, **options)
    assert len(made) == len(some)
    for one, other in zip(actual, expected, strict=True):
        tiny.assert_same(one, other)


@modes
def test_a_row_in_a_batch_equals_the_row_alone(tiny: Tiny, mode: str) -> None:
    some = prompts(9, seed=1)
    together = tiny.model.generate(some, max_new_tokens=ROOM, **MODES[mode])
    assert len({len(result.tokens) for found in together for result in flat(found)}) > 1, "rows leave the batch one by one"
    for prompt, found in zip(some, together, strict=True):
        tiny.assert_same(found, tiny.model.generate(prompt, max_new_tokens=ROOM, **MODES[mode]))


@pytest.mark.parametrize("mode", ["greedy", "beam"])
def test_a_beginning_that_prompts_share_changes_nothing(tiny: Tiny, mode: str) -> None:
    beginning = prompts(1, longest=1)[0] * 3 + prompts(4, seed=2)[3] * 8
    some = [beginning[:20] + end for end in prompts(5, seed=3)]
    together = tiny.model.generate(some, max_new_tokens=ROOM, **MODES[mode])
    for prompt, found in zip(some, together, strict=True):
        tiny.assert_same(found, tiny.model.generate(prompt, max_new_tokens=ROOM, **MODES[mode]))


@language_models
def test_prefill_equals_single_steps(tiny: Tiny) -> None:
    for prompt in prompts(6, longest=9, seed=4):
        whole = tiny.model.generate(prompt, max_new_tokens=ROOM, beams=3)
        steps = tiny.model.read(prompt[:1])
        for token in prompt[1:]:
            steps.read([token])
        assert steps.tokens == tuple(prompt)
        tiny.assert_same(steps.generate(max_new_tokens=ROOM, beams=3), whole)
        pieces = tiny.model.read(prompt[:4])
        pieces.read(prompt[4:6])
        tiny.assert_same(pieces.generate(prompt[6:], max_new_tokens=ROOM, beams=3), whole)
        tiny.assert_same(pieces.generate(prompt[6:], max_new_tokens=ROOM, beams=3), whole)  # it was not used up


@some_of(generating("seq2seq"))
def test_a_source_is_read_as_a_whole(tiny: Tiny) -> None:
    with pytest.raises(OptionError, match="read is for language models; an encoder–decoder reads its source as a whole"):
        tiny.model.read([5])


def test_a_chunked_prompt_equals_the_whole(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    some = prompts(6, longest=12, seed=5)
    whole = [tiny.model.generate(prompt, max_new_tokens=ROOM, beams=2, prefix=[5, 6, 7, 5]) for prompt in some]
    for module in (rows_module, scheduler_module):
        monkeypatch.setattr(module, "PIECE", 3)
    for prompt, expected in zip(some, whole, strict=True):
        tiny.assert_same(tiny.model.generate(prompt, max_new_tokens=ROOM, beams=2, prefix=[5, 6, 7, 5]), expected)
    for found, expected in zip(
        tiny.model.generate(some, max_new_tokens=ROOM, beams=2, prefix=[5, 6, 7, 5]), whole, strict=True
    ):
        tiny.assert_same(found, expected)


@pytest.mark.parametrize("precision", OF_ONE_FORM)
def test_a_forced_prefix_of_a_text_gives_that_text(tiny: Tiny) -> None:
    for prompt in prompts(8, seed=6):
        whole = tiny.model.generate(prompt, max_new_tokens=ROOM)
        for length in range(1, min(ROOM - 1, len(whole.tokens))):
            tiny.assert_same(tiny.model.generate(prompt, max_new_tokens=ROOM, prefix=whole.tokens[:length]), whole)


@pytest.mark.parametrize("mode", ["greedy", "beam"])
def test_padding_changes_nothing(tiny: Tiny, mode: str) -> None:
    """On the left of a language model's prompt, on the right of a source."""
    some = prompts(6, seed=8)
    longest = max(map(len, some)) + 2
    padding = [[PAD] * (longest - len(prompt)) for prompt in some]
    if tiny.is_language_model:
        padded = [[*pads, *prompt] for pads, prompt in zip(padding, some, strict=True)]
    else:
        padded = [[*prompt, *pads] for pads, prompt in zip(padding, some, strict=True)]
    together = tiny.model.generate(padded, max_new_tokens=ROOM, **MODES[mode])
    for prompt, pads, found in zip(some, padded, together, strict=True):
        expected = tiny.model.generate(prompt, max_new_tokens=ROOM, **MODES[mode])
        tiny.assert_same(found, expected)
        tiny.assert_same(tiny.model.generate(pads, max_new_tokens=ROOM, **MODES[mode]), expected)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_a_beams_score_is_the_sum_pytorch_gives(exact: Tiny, length_penalty: float) -> None:
    for prompt in prompts(6, seed=9):
        for found in exact.model.generate(
            prompt, max_new_tokens=ROOM, beams=5, n_best=5, length_penalty=length_penalty, early_stopping="never"
        ):
            logprobs = exact.rescored(prompt, found)
            assert found.score == pytest.approx(sum(logprobs) / len(logprobs) ** length_penalty, abs=2 * exact.noise)
            assert found.token_logprobs == pytest.approx(logprobs[: len(found.tokens)], abs=exact.noise)


@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 0.6, 1.0, 2.0])
def test_enough_beams_equal_exhaustive_search(exact: Tiny, length_penalty: float) -> None:
    """All texts of up to three tokens: at most 8 x 8 go on at a time."""
    ended = 0
    for prompt in prompts(2, longest=4, seed=10):
        scores = exhaustive(exact, prompt, length_penalty)
        found = exact.model.generate(
            prompt, max_new_tokens=3, beams=72, n_best=12, length_penalty=length_penalty, early_stopping="never"
        )
        ended += sum(result.finish == "eos" for result in found)
        texts = [(result.tokens, result.finish) for result in found]
        assert len(set(texts)) == 12
        best = sorted(scores.values(), reverse=True)[:12]
        for expected in (best, [scores[text] for text in texts]):  # where two are equally good, either may come first
            assert [result.score for result in found] == pytest.approx(expected, abs=2 * exact.noise)
    assert ended or length_penalty > 1


def exhaustive(exact: Tiny, prompt: Sequence[int], length_penalty: float) -> dict[tuple[tuple[int, ...], str], float]:
    """(tokens, finish) of every text there is → its score, by PyTorch."""
    letters = [token for token in range(VOCABULARY) if token not in (PAD, EOS)]
    ended = [(*text, EOS) for length in range(3) for text in product(letters, repeat=length)]
    found = {}
    for text in [*ended, *product(letters, repeat=3)]:
        scores = _logprobs_of(exact, tuple(prompt), text[:-1])
        total = sum(scores[place][token] for place, token in enumerate(text))
        finish = "eos" if text[-1] == EOS else "length"
        found[text[:-1] if finish == "eos" else text, finish] = total / len(text) ** length_penalty
    return found


_cache: dict[Any, list[list[float]]] = {}


def _logprobs_of(exact: Tiny, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[list[float]]:
    key = (id(exact.model), prompt, tokens)
    if key not in _cache:
        _cache[key] = exact.logprobs(prompt, tokens).tolist()
    return _cache[key]


def test_reordering_a_state_equals_recomputing_it(exact: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are dropped, repeated and shuffled at random; then each goes on from its own text. Caches are copied whole and where
    they differ, in turns."""
    random = np.random.default_rng(0)
    generator = exact.model._generator
    rows = Rows(generator.decoder, room=2, capacity=24)
    sources = prompts(3, seed=14)
    texts: list[tuple[int, list[int]]] = [(row, [BOS]) for row in range(3)]
    rows.reserve(3, 24)
    rows.start(3, generator.requests.encode(sources) if not exact.is_language_model else None)
    rows.read(np.full((3, 1), BOS, np.int64))
    for turn, count in enumerate((3, 5, 4, 4, 1, 6, 6, 2, 3)):
        monkeypatch.setattr(rows_module, "_COPIED_WHOLE", turn % 2 << 16)
        parents = random.integers(0, len(texts), count).tolist()
        tokens = random.integers(FIRST_LETTER, VOCABULARY, count)
        rows.select(parents)
        logits = rows.advance(tokens[:, None])[:, 0]
        texts = [(texts[parent][0], [*texts[parent][1], int(token)]) for parent, token in zip(parents, tokens, strict=True)]
        for (source, text), of_row in zip(texts, logits, strict=True):
            fed = (text[:1], text[1:]) if exact.is_language_model else (sources[source], text[1:])
            expected = exact.logprobs(*fed)[-1]
            torch.testing.assert_close(torch.tensor(of_row).log_softmax(-1), expected, rtol=exact.noise, atol=exact.noise)


def test_seeded_sampling_is_reproducible_and_unseeded_is_not(tiny: Tiny) -> None:
    some = prompts(6, seed=15)
    options: dict[str, Any] = {"max_new_tokens": ROOM, "temperature": 3.0}
    together = tiny.model.generate(some, seed=list(range(6)), **options)
    for seed, (prompt, found) in enumerate(zip(some, together, strict=True)):
        tiny.assert_same(tiny.model.generate(prompt, seed=seed, **options), found)
        tiny.assert_same(tiny.model.generate(prompt, seed=seed, **options), found)
    same = [tiny.model.generate(some[0], seed=seed, **options).tokens for seed in range(12)]
    assert len(set(same)) > 1
    # nearly uniform, and not ended by an <eos> that happens to be likely: twelve equal texts cannot be chance
    free = options | {"temperature": 30.0, "min_new_tokens": ROOM}
    assert len({tiny.model.generate(some[0], **free).tokens for _ in range(12)}) > 1


def test_sampled_tokens_have_the_probabilities_pytorch_gives(exact: Tiny) -> None:
    prompt = prompts(1, seed=16)[0]
    expected = exact.logprobs(prompt, [])[-1].exp()
    expected[PAD] = 0  # is never generated
    expected /= expected.sum()
    found = exact.model.generate([prompt] * 600, max_new_tokens=1, temperature=1.0, seed=list(range(600)))
    counts = np.zeros(VOCABULARY)
    for result in found:
        counts[EOS if result.finish == "eos" else result.tokens[0]] += 1
    assert np.abs(counts / 600 - expected.numpy()).max() < 0.08  # four deviations of a share of 600


REQUESTS: list[dict[str, Any]] = [
    {}, {"beams": 3, "n_best": 2}, {"temperature": 1.0, "seed": 1}, {"beams": 2, "no_repeat_ngram": 2}, {"prefix": [5, 6]},
    {"temperature": 1.2, "seed": 2, "n_best": 3}, {"min_new_tokens": 4}, {"stop": ["b"]}, {"beams": 4, "groups": 2},
]  # fmt: skip


@pytest.mark.parametrize("most_rows", [5, 64])
def test_requests_that_join_a_running_batch_get_what_they_get_alone(tiny: Tiny, most_rows: int) -> None:
    some = prompts(len(REQUESTS), seed=17)
    batch = tiny.model.scheduler(most_rows=most_rows)
    tickets = []
    for number, (prompt, options) in enumerate(zip(some, REQUESTS, strict=True)):
        tickets.append(batch.submit(prompt, max_new_tokens=ROOM + number % 3, **options))
        for _ in range(number % 4):
            batch.step()
    left = batch.submit(some[0], max_new_tokens=30, min_new_tokens=30, beams=2)
    batch.step()
    left.cancel()
    batch.run()
    for number, (prompt, options, ticket) in enumerate(zip(some, REQUESTS, tickets, strict=True)):
        alone = tiny.model.generate(prompt, max_new_tokens=ROOM + number % 3, **options)
        tiny.assert_same(ticket.results(), alone)


@language_models
def test_after_rewinding_all_is_as_if_the_rest_had_never_been_read(tiny: Tiny) -> None:
    prompt = [*prompts(3, seed=18)[0], 4, 6, 8, 5, 7]
    context = tiny.model.read(prompt)
    for length in (len(prompt), len(prompt) - 2, 3, 1):
        context.rewind(length)
        assert context.tokens == tuple(prompt[:length])
        for options in ({}, {"beams": 3}):
            expected = tiny.model.generate(prompt[:length], max_new_tokens=ROOM, **options)
            tiny.assert_same(context.generate(max_new_tokens=ROOM, **options), expected)
        other = [*prompt[:length], 8, 8, 4]
        context.read([8, 8, 4])
        tiny.assert_same(context.generate(max_new_tokens=ROOM), tiny.model.generate(other, max_new_tokens=ROOM))
        assert "".join(context.stream(max_new_tokens=ROOM)) == tiny.model.generate(other, max_new_tokens=ROOM).text
    with pytest.raises(OptionError, match=r"cannot rewind to 0 tokens; expected 1 to 4"):
        context.rewind(0)
    with pytest.raises(OptionError, match=r"cannot rewind to 2.0 tokens; expected 1 to 4"):
        context.rewind(2.0)  # type: ignore[arg-type]
    with pytest.raises(FeedError, match="the text is None; expected a text or whole token numbers"):
        context.read(None)  # type: ignore[arg-type]
