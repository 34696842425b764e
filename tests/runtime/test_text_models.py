"""Networks on text through the runtime: texts in, answers as PyTorch gives them out, whatever else is in the batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.errors import FeedError, OptionError
from runtime.scoring import Score
from runtime.signature import TensorSpec
from runtime.text import BOS, EOS

from .text_networks import LETTERS, SENTENCES, VARIETIES, Shared, reference, text_model

LANGUAGE_MODELS = ["gpt", "gpt-portable", "gpt-without-padding", "gpt-fixed", "gpt-by-four", "lstm"]
PAIRS = ["transformer", "seq2seq", "seq2seq-attention"]
TEXTS = ["abc", "ponmlkjihgf", "ab", "hello".replace("l", "k"), "cafe"]
SOURCES = ["nice", "a", "fadcb", "gg", "deaf"]
CLS, SEP, MASK = (SENTENCES.token_id(name) for name in ("<cls>", "<sep>", "<mask>"))


def given(name: str, texts: list[str]) -> Any:
    """Texts, or their numbers for a bundle without a tokenizer."""
    return texts if VARIETIES[name].tokenizers else [LETTERS.encode(text) for text in texts]


def logprobs(logits: torch.Tensor, targets: list[int]) -> np.ndarray[Any, Any]:
    picked = logits.log_softmax(-1)[torch.arange(len(targets)), torch.tensor(targets)]
    return picked.detach().double().numpy()


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_text_scores_what_pytorch_gives_alone_and_in_a_ragged_batch(shared: Shared, name: str) -> None:
    model, network = text_model(shared, name), reference(name)
    together = model.score(given(name, TEXTS))
    for text, score in zip(TEXTS, together, strict=True):
        numbers = LETTERS.encode(text)
        with torch.inference_mode():
            logits, *_ = network(torch.tensor([numbers[:-1]]), *network.initial_state(1))
        expected = logprobs(logits[0], numbers[1:])
        assert score.tokens == tuple(numbers[1:])
        np.testing.assert_allclose(score.token_logprobs, expected, atol=2e-5)
        assert score.total == pytest.approx(expected.sum(), abs=1e-4)
        assert score.perplexity == pytest.approx(math.exp(-expected.mean()), rel=1e-4)
        alone = model.score(given(name, [text])[0])
        assert isinstance(alone, Score)
        assert alone.total == pytest.approx(score.total, abs=1e-4)


@pytest.mark.parametrize("name", PAIRS)
def test_a_target_scores_what_pytorch_gives_for_its_source(shared: Shared, name: str) -> None:
    model, network = text_model(shared, name), reference(name)
    for text, source, score in zip(TEXTS, SOURCES, model.score(TEXTS, source=SOURCES), strict=True):
        numbers = LETTERS.encode(text)
        with torch.inference_mode():
            logits = network(torch.tensor([[*LETTERS.encode(source), EOS]]), torch.tensor([[BOS, *numbers]]))
        expected = logprobs(logits[0], [*numbers, EOS])
        assert score.tokens == (*numbers, EOS)
        np.testing.assert_allclose(score.token_logprobs, expected, atol=2e-5)
        assert model.score(text, source=source).total == pytest.approx(score.total, abs=1e-4)


def test_one_source_serves_several_texts(shared: Shared) -> None:
    model = text_model(shared, "transformer")
    shared_source = model.score(TEXTS, source="nice")
    assert [score.total for score in shared_source] == pytest.approx(
        [model.score(text, source="nice").total for text in TEXTS], abs=1e-4
    )


@pytest.mark.parametrize("name", ["gpt", "lstm", *PAIRS])
def test_what_was_generated_scores_what_its_generation_says(shared: Shared, name: str) -> None:
    model = text_model(shared, name)
    generated = model.generate("abc", max_new_tokens=6, bad_words=[[0]])  # padding has no probability
    if name in PAIRS:
        score = model.score(list(generated.tokens), source="abc")
        found = score.token_logprobs[: len(generated.tokens)]
    else:
        score = model.score([*LETTERS.encode("abc"), *generated.tokens])
        found = score.token_logprobs[-len(generated.tokens) :]
    assert generated.tokens
    np.testing.assert_allclose(found, generated.token_logprobs, atol=1e-4)


def test_without_a_tokenizer_the_first_token_is_the_one_to_start_from(shared: Shared) -> None:
    score = text_model(shared, "seq2seq-without-tokenizer").score([7, 5, 6], source=[8, 9])
    assert score.tokens == (5, 6)
    network = reference("seq2seq-without-tokenizer")
    with torch.inference_mode():
        expected = logprobs(network(torch.tensor([[8, 9]]), torch.tensor([[7, 5]]))[0], [5, 6])
    np.testing.assert_allclose(score.token_logprobs, expected, atol=2e-5)


def test_long_texts_are_scored_in_pieces(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model(shared, "gpt")
    whole = model.score(TEXTS)
    monkeypatch.setattr("runtime.scoring._LOGITS_AT_ONCE", 20 * 3)
    for piece, score in zip(model.score(TEXTS), whole, strict=True):
        np.testing.assert_allclose(piece.token_logprobs, score.token_logprobs, atol=1e-5)


@pytest.mark.parametrize("name", ["gru-classes", "bert-classes", "bert-fixed"])
def test_texts_are_classified_as_by_pytorch_alone_and_in_a_ragged_batch(shared: Shared, name: str) -> None:
    model, network = text_model(shared, name), reference(name)
    bert = "bert" in name
    texts = ["abcde", "k", "fghf", "cabd", "mmm"]
    together = model.predict(texts)
    assert together.probabilities is not None
    assert together.labels is not None
    for place, text in enumerate(texts):
        numbers = [CLS, *SENTENCES.encode(text), SEP] if bert else LETTERS.encode(text)
        tokens = torch.tensor([numbers])
        with torch.inference_mode():
            expected = network(*((tokens, torch.zeros_like(tokens)) if bert else (tokens,))).softmax(-1)[0].numpy()
        np.testing.assert_allclose(together.probabilities[place], expected, atol=1e-5)
        assert together.labels[place] == str(expected.argmax())
        assert model.predict(text).label == together.labels[place]


def test_numbers_and_padded_arrays_are_as_good_as_text(shared: Shared) -> None:
    model = text_model(shared, "bert-classes")
    expected = model.predict(["abc", "k"]).probabilities
    rows = [[CLS, *SENTENCES.encode("abc"), SEP], [CLS, *SENTENCES.encode("k"), SEP]]  # as training makes them
    marked = np.array([rows[0], [*rows[1], 0, 0]])
    by_name = {"tokens": marked, "segments": np.zeros_like(marked)}
    for same in (rows, [np.array(row) for row in rows], marked, by_name):
        np.testing.assert_allclose(model.predict(same).probabilities, expected, atol=1e-6)


def test_many_texts_are_run_in_bounded_batches_and_keep_their_order(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model(shared, "gru-classes")
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list("abcdefgh"), size=random.integers(1, 12))) for _ in range(100)]
    whole = model.predict(texts).probabilities
    sizes = []
    run = model.sessions["model"].run
    monkeypatch.setattr(model.sessions["model"], "run", lambda feeds: (sizes.append(feeds["tokens"].size), run(feeds))[1])
    monkeypatch.setattr("runtime.tokens.TokenInput.batches.__defaults__", (64,))
    np.testing.assert_allclose(model.predict(texts).probabilities, whole, atol=1e-6)
    assert len(sizes) > 5
    assert max(sizes) <= 64


def test_vectors_of_a_ragged_batch_are_those_of_each_text_alone(shared: Shared) -> None:
    model, network = text_model(shared, "bert-vectors"), reference("bert-vectors")
    texts = ["abcdefg", "m", "bca"]
    vectors = model.embed(texts)
    assert vectors.shape == (3, 16)
    for text, vector in zip(texts, vectors, strict=True):
        tokens = torch.tensor([[CLS, *SENTENCES.encode(text), SEP]])
        with torch.inference_mode():
            np.testing.assert_allclose(vector, network(tokens, torch.zeros_like(tokens))[0].numpy(), atol=1e-5)
        alone = model.embed(text)
        assert alone.shape == (16,)
        np.testing.assert_allclose(alone, vector, atol=1e-5)


def test_masks_are_filled_with_the_likeliest_letters(shared: Shared) -> None:
    model, network = text_model(shared, "bert-masked"), reference("bert-masked")
    filling, other = model.fill(["ab<mask>d<mask>", "<mask>"], top=3)
    tokens = torch.tensor([[CLS, *SENTENCES.encode("ab"), MASK, *SENTENCES.encode("d"), MASK, SEP]])
    with torch.inference_mode():
        rows = network(tokens, torch.zeros_like(tokens))[0].softmax(-1)[0, [3, 5]].numpy()
    for candidates, row in zip(filling.masks, rows, strict=True):
        best = 7 + np.argsort(-row[7:])[:3]  # special tokens are no letters
        assert [candidate.token for candidate in candidates] == best.tolist()
        assert [candidate.text for candidate in candidates] == [SENTENCES.decode([token]) for token in best]
        np.testing.assert_allclose([candidate.probability for candidate in candidates], row[best], atol=1e-5)
    first, second = (candidates[0].text for candidates in filling.masks)
    assert filling.text == f"ab{first}d{second}"
    assert model.fill("<mask>", top=3).text == other.text


@pytest.mark.parametrize(
    ("name", "texts", "message"),
    [
        ("gpt", "", "the text is empty; expected at least one token"),
        ("gpt", [], "the batch holds no texts; expected at least one"),
        ("gpt", ["ab", ""], "text 1 is empty"),
        ("gpt", "a", "text 0 has one token, which nothing comes before; expected two or more"),
        ("gpt", "abXc", "'X' is outside the vocabulary of 20 characters"),
        ("gpt", [5, -1], "the text has the token -1, which does not exist; token numbers are 0 to 19"),
        ("gpt", [5, 20], "the text has the token 20, which does not exist; token numbers are 0 to 19"),
        ("gpt", [[5, 6], [7, 99]], "text 1 has the token 99"),
        ("gpt", [5.5, 6], "the text is .5.5, 6.; expected a text or whole token numbers"),
        ("gpt", [5, float("nan")], "expected a text or whole token numbers"),
        ("gpt", [[5, 6], None], "text 1 is None; expected a text or whole token numbers"),
        ("gpt", 7, "a int is not a text; expected a text, token numbers, or a list of them"),
        ("gpt", [5, 0, 6], "text 0 has the token 0, which is padding and has no probability; leave it out"),
        ("gpt", "a" * 66, "the text has 66 tokens, and this network takes 65 at most; shorten it"),
        ("gpt-fixed", "a" * 18, "the text has 17 tokens, and this network's cache has room for 16; shorten it"),
        ("gpt-without-padding", "ab", "the text cannot be encoded: this bundle has no tokenizer; pass token numbers"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_the_model_goes_on(shared: Shared, name: str, texts: Any, message: str) -> None:
    model = text_model(shared, name)
    before = model.score(given(name, ["abc"]))
    with pytest.raises(FeedError, match=message):
        model.score(texts)
    assert model.score(given(name, ["abc"])) == before


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("", "the text is empty"),
        ([], "holds no texts"),
        (np.zeros((2, 3), np.int64), "text 0 is empty"),
        ("a" * 31, "the text has 33 tokens, and this network takes 32 at most"),
        ([[7, 8], [20]], "text 1 has the token 20, which does not exist; token numbers are 0 to 19"),
        ({"tokens": np.array([[-3]]), "segments": np.array([[0]])}, "'tokens' has the token -3, which does not exist"),
        ({"tokens": np.zeros((0, 3), np.int64), "segments": np.zeros((0, 3), np.int64)}, "'tokens' is empty"),
        ({"tokens": np.array([[7]])}, "input 'segments' is missing"),
    ],
)
def test_what_cannot_be_classified_is_refused_and_the_model_goes_on(shared: Shared, texts: Any, message: str) -> None:
    model = text_model(shared, "bert-classes")
    before = model.predict("abc").probabilities
    with pytest.raises(FeedError, match=message):
        model.predict(texts)
    np.testing.assert_array_equal(model.predict("abc").probabilities, before)


def test_a_decoder_that_gives_no_logits_cannot_score(shared: Shared) -> None:
    model = text_model(shared, "gpt")
    signature = model.sessions["decoder"].signature
    others = (TensorSpec("best", "int64", ("batch", "kept")), *signature.outputs[1:])
    model.sessions["decoder"].signature = replace(signature, outputs=others)
    with pytest.raises(OptionError, match="the decoder has no output 'logits', .*; optimize it without --head"):
        model.score("abc")


def test_questions_that_a_task_does_not_answer_name_the_one_it_does(shared: Shared) -> None:
    gpt, pairs = text_model(shared, "gpt"), text_model(shared, "transformer")
    with pytest.raises(
        OptionError, match="predict is for classification and regression; this bundle's task is 'language-model': use generate"
    ):
        gpt.predict("abc")
    with pytest.raises(OptionError, match="embed is for embedding"):
        gpt.embed("abc")
    with pytest.raises(OptionError, match="score is for language-model and seq2seq; .* 'classification': use run"):
        text_model(shared, "gru-classes").score("abc")
    with pytest.raises(OptionError, match="task is 'masked-lm': use fill"):
        text_model(shared, "bert-masked").predict("abc")
    with pytest.raises(OptionError, match="source is for encoder–decoders"):
        gpt.score("abc", source="a")
    with pytest.raises(OptionError, match="pass source=… to score a text given it"):
        pairs.score("abc")
    with pytest.raises(FeedError, match="there are 3 texts but 2 sources; give one for each, or one for all"):
        pairs.score(["a", "b", "c"], source=["a", "b"])
    with pytest.raises(FeedError, match="text 0 has no <mask>; write one for each token to be filled in"):
        text_model(shared, "bert-masked").fill("abc")
    with pytest.raises(OptionError, match="top is 0, expected 1 or more"):
        text_model(shared, "bert-masked").fill("<mask>", top=0)
