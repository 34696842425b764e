"""Networks on tokens as graphs.

BERT and text classifiers    one graph, "model":  tokens [, segments] → logits …
language models              one graph, "decoder":  tokens, wanted, past.* → logits, present.*; for whole prompts and steps
encoder–decoders             "encoder":  source → memory.* [, past.*], and
                             "decoder":  tokens, wanted, memory.*, past.* → logits, present.*; and on request
                             "alignment":  the decoder's attention to the source (see alignment.py)

An output of the encoder with the name of a decoder's input is the value of that input: at every step (memory), or before the
first one (past). `wanted` are the positions of the tokens whose logits are computed: of a long prompt only the last one's are
needed. A decoder that takes one token at a time has no such input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from architectures.architecture import output_name
from architectures.layers.reading import choose, shift_to_front
from architectures.layers.recurrent import PAD
from architectures.seq2seq import AttentionSeq2Seq
from runtime.bundle import ALIGNMENT, DECODER, ENCODER
from runtime.errors import OptionError
from runtime.signature import StateSpec
from runtime.state import WANTED

from .alignment import ATTENTION, alignment_of, looks_at_its_source
from .exportable import MODEL, Generator, GraphSource
from .profiles import ONNXRUNTIME, using

# Sizes of the examples: all different, none 0 or 1, which the tracer takes for constants.
_EXAMPLE = {"batch": 3, "time": 5, "kept": 2, "past": 4, "capacity": 7, "source": 6}
_LEAST_POSITIONS = 16
_FIRST_WORD = 4  # tokens below are special

Network = Any  # an nn.Module with encode, decode or initial_state, state_names and memory_names: see architectures/
Tensors = dict[str, tuple[tuple[int | str, ...], torch.dtype]]  # name → (sizes or names of sizes, dtype)


class Profiled(nn.Module):
    """A network on tokens, computed with the functions of a profile."""

    def __init__(self, network: Network, profile: str) -> None:
        super().__init__()
        self.network: Network = network
        self.profile = profile

    def forward(self, *inputs: Tensor) -> Any:
        with using(self.profile):
            return self.network(*inputs)


class Encoder(Profiled):
    """source → memory, and the decoder's first state where that is not simply empty."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        with using(self.profile):
            memory, state = self.network.encode(*inputs)
        return (*memory, *(state if _is_recurrent(self.network) else ()))


class Decoder(Profiled):
    """tokens, wanted, memory, state → logits, new state. Padding, at either end of a row, changes no state."""

    def __init__(self, network: Network, profile: str, *, memories: int) -> None:
        super().__init__(network, profile)
        self.memories = memories

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        tokens, others = inputs[0], inputs[1:]
        wanted = tokens  # never read by a network that takes one token
        if not _takes_one_token(self.network):
            wanted, others = others[0], others[1:]
        memory, state = others[: self.memories], others[self.memories :]
        with using(self.profile):
            if not _is_recurrent(self.network):
                with choose.replaced_by(lambda x: x.index_select(1, wanted)):
                    return self._run(tokens, memory, state)
            if _takes_one_token(self.network):  # nothing to be shifted
                logits, *after = self._run(tokens, memory, state)
                padded = (tokens == PAD).view(1, -1, 1)  # states are (layers, batch, hidden)
            else:
                shifted, lengths, restore = shift_to_front(tokens, PAD)
                with choose.replaced_by(lambda x: restore(x).index_select(1, wanted)):
                    logits, *after = self._run(shifted, memory, state, lengths=lengths.clamp(min=1))
                padded = (lengths == 0).view(1, -1, 1)
            return logits, *(torch.where(padded, old, new) for new, old in zip(after, state, strict=True))

    def _run(
        self, tokens: Tensor, memory: tuple[Tensor, ...], state: tuple[Tensor, ...], **lengths: Tensor
    ) -> tuple[Tensor, ...]:
        if not memory:
            logits, *after = self.network(tokens, *state, **lengths)
        else:
            logits, after = self.network.decode(tokens, memory, state, **lengths)
        return logits, *after


def encoder_only(network: Network, inputs: tuple[str, ...], task: str, profile: str) -> tuple[GraphSource, ...]:
    """BERT, or a recurrent classifier."""
    _check_longest(network)
    names = ("logits", "next_sentence") if task == "masked-lm" else (output_name(task),)
    limits = {"tokens": _embedding(network).num_embeddings}
    if "segments" in inputs:
        limits["segments"] = network.segment_embedding.num_embeddings

    def draw(sizes: Mapping[str, int], seed: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(seed)
        tokens = _ragged(random, sizes["batch"], sizes["time"], limits["tokens"], _pad(network), left=False)
        others = {name: torch.randint(0, limits[name], tokens.shape, generator=random) for name in inputs if name != "tokens"}
        return {"tokens": tokens, **others}

    axes = {name: {0: "batch", 1: "time"} for name in inputs}
    return (GraphSource(Profiled(network, profile).eval(), draw(_EXAMPLE, 0), axes, names, MODEL, draw=draw),)


def about_tokens(network: Network) -> dict[str, Any]:
    """What a host must know to make an input of texts. For networks that do not generate: others say it under `generation`."""
    pad = _pad(network)
    return {
        "kind": "tokens",
        "vocabulary": _embedding(network).num_embeddings,
        "pad": pad if pad >= 0 else None,
        "longest": _longest(network),
    }


def _check_longest(network: Network) -> None:
    """Other sizes must fit, or nothing can be tried."""
    longest = _longest(network)
    if longest is not None and longest < _LEAST_POSITIONS:
        raise OptionError(
            f"max_positions is {longest}, and export tries texts of up to {_LEAST_POSITIONS} tokens at least; "
            f"set max_positions={_LEAST_POSITIONS} or more"
        )


def language_model(network: Network, profile: str) -> tuple[tuple[GraphSource, ...], Generator]:
    _check_longest(network)
    about = Generator(network, _embedding(network).num_embeddings, _pad(network), longest=_longest(network))
    return (_decoder(network, about, profile, {}),), about


def encoder_decoder(network: Network, profile: str, *, attention: bool = False) -> tuple[tuple[GraphSource, ...], Generator]:
    """Encoder and decoder, and with `attention` the graph of the decoder's attention to the source."""
    _check_longest(network)
    if attention and not looks_at_its_source(network):
        raise no_attention("an encoder–decoder without attention")
    source_vocabulary = _embedding(network, source=True).num_embeddings
    vocabulary = _embedding(network).num_embeddings
    about = Generator(network, vocabulary, _pad(network), source_vocabulary=source_vocabulary, longest=_longest(network))
    recurrent = _is_recurrent(network)

    def draw(sizes: Mapping[str, int], seed: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(seed)
        left = bool(seed % 2) and not recurrent  # recurrent encoders take padding on the right only
        return {"source": _ragged(random, sizes["batch"], sizes["source"], source_vocabulary, about.pad, left)}

    memory_names = tuple(f"memory.{name}" for name in network.memory_names)
    states = tuple(f"past.{name}" for name in network.state_names) if recurrent else ()
    module = Encoder(network, profile).eval()
    examples = draw(_EXAMPLE, 0)
    axes = {"source": {0: "batch", 1: "source"}}
    encoder = GraphSource(module, examples, axes, (*memory_names, *states), ENCODER, draw=draw)
    outputs = encoder.call(examples)
    memory: Tensors = {name: (_memory_dims(name, outputs[name]), outputs[name].dtype) for name in memory_names}
    graphs = (encoder, _decoder(network, about, profile, memory))
    return (*graphs, _alignment(network, about, profile, memory)) if attention else graphs, about


def no_attention(what: str) -> OptionError:
    return OptionError(
        f"--attention adds the weights with which a decoder looks at its source, and this is {what}; leave --attention out, "
        "or take transformer or seq2seq-attention"
    )


def _decoder(network: Network, about: Generator, profile: str, memory: Tensors) -> GraphSource:
    states = _states(network, profile)
    tensors = memory | _state_tensors(network, profile)
    one_token = _takes_one_token(network)

    def draw(sizes: Mapping[str, int], seed: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(seed)
        batch, time = sizes["batch"], 1 if one_token else sizes["time"]
        tokens = _ragged(random, batch, time, about.vocabulary, about.pad, left=bool(seed % 2))
        wanted = {} if one_token else {WANTED: torch.randint(0, time, (sizes["kept"],), generator=random)}
        return {"tokens": tokens} | wanted | _draw(random, {**sizes, "time": time}, tensors)

    axes = {"tokens": {0: "batch"}} if one_token else {"tokens": {0: "batch", 1: "time"}, WANTED: {0: "kept"}}
    for name, (dims, _) in tensors.items():
        axes[name] = {axis: dim for axis, dim in enumerate(dims) if isinstance(dim, str)}
    module = Decoder(network, profile, memories=len(memory)).eval()
    outputs = ("logits", *(state.output for state in states))
    return GraphSource(module, draw(_EXAMPLE, 0), axes, outputs, DECODER, states=states, draw=draw)


def _alignment(network: Network, about: Generator, profile: str, memory: Tensors) -> GraphSource:
    one_token = _takes_one_token(network)
    states = _states(network, profile) if one_token else ()
    if one_token:
        tensors = memory | _state_tensors(network, profile)
    else:
        tensors = {name: memory[name] for name in list(memory)[:-1]}  # nothing depends on the last layer's values

    def draw(sizes: Mapping[str, int], seed: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(seed)
        time = 1 if one_token else sizes["time"]
        tokens = _ragged(random, sizes["batch"], time, about.vocabulary, about.pad, left=bool(seed % 2))
        return {"tokens": tokens} | _draw(random, {**sizes, "time": time}, tensors)

    axes = {"tokens": {0: "batch"} if one_token else {0: "batch", 1: "time"}}
    for name, (dims, _) in tensors.items():
        axes[name] = {axis: dim for axis, dim in enumerate(dims) if isinstance(dim, str)}
    outputs = (ATTENTION, *(state.output for state in states))
    return GraphSource(alignment_of(network).eval(), draw(_EXAMPLE, 0), axes, outputs, ALIGNMENT, states=states, draw=draw)


def _states(network: Network, profile: str) -> tuple[StateSpec, ...]:
    """How the network's state is carried: its names, and where its batch and its length are."""
    recurrent, in_place = _is_recurrent(network), profile == ONNXRUNTIME
    specs = []
    for name in network.state_names:
        if recurrent:
            specs.append(StateSpec(f"past.{name}", f"present.{name}", batch_axis=1))
        elif name == "real" and in_place:
            specs.append(StateSpec("past.length", "present.length", batch_axis=0))
        elif name == "real":
            specs.append(StateSpec("past.real", "present.real", batch_axis=0, length_axis=1))
        else:
            filled = "present.length" if in_place else None
            specs.append(StateSpec(f"past.{name}", f"present.{name}", batch_axis=0, length_axis=2, filled=filled))
    return tuple(specs)


def _state_tensors(network: Network, profile: str) -> Tensors:
    if _is_recurrent(network):
        stack = getattr(network, "recurrent", None) or network.encoder.recurrent
        return {f"past.{name}": ((len(stack.layers), "batch", stack.hidden), torch.float32) for name in network.state_names}
    heads, width = network.heads, _embedding(network).embedding_dim
    if profile == ONNXRUNTIME:
        record: Tensors = {"past.length": (("batch",), torch.int32)}
        length = "capacity"
    else:
        record = {"past.real": (("batch", "past"), torch.bool)}
        length = "past"
    caches = network.state_names[1:]
    return record | {f"past.{name}": (("batch", heads, length, width // heads), torch.float32) for name in caches}


def _memory_dims(name: str, tensor: Tensor) -> tuple[int | str, ...]:
    if name == "memory.context":  # (batch, width)
        return ("batch", tensor.shape[1])
    if tensor.dim() == 4:  # keys and values (batch, heads, source, head)
        return ("batch", tensor.shape[1], "source", tensor.shape[3])
    return ("batch", "source", *tensor.shape[2:])  # a mask, or an encoder's outputs


def _draw(random: torch.Generator, sizes: Mapping[str, int], tensors: Tensors) -> dict[str, Tensor]:
    """Any memory and past there could be. A cache in place has room for the new tokens; of several rows that go on by more than
    one token none has a past, since onnxruntime's kernel does not take that (see runtime/state.py)."""
    sizes = {**sizes, "capacity": sizes.get("capacity", 0) + sizes["time"]}
    drawn: dict[str, Tensor] = {}
    for name, (dims, dtype) in tensors.items():
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in dims]
        if dtype == torch.int32:
            room = 0 if sizes["batch"] > 1 and sizes["time"] > 1 else sizes["capacity"] - sizes["time"]
            drawn[name] = torch.randint(0, room + 1, shape, generator=random, dtype=dtype)
        elif dtype == torch.bool:
            drawn[name] = torch.rand(shape, generator=random) < 0.7
            drawn[name][:, :1] = True  # no row is empty
        else:
            drawn[name] = torch.randn(shape, generator=random)
    return drawn


def _ragged(random: torch.Generator, batch: int, time: int, vocabulary: int, pad: int, left: bool) -> Tensor:
    """Random words (batch, time); every row but the first is padded by a random amount, at one end."""
    tokens = torch.randint(min(_FIRST_WORD, vocabulary - 1), vocabulary, (batch, time), generator=random)
    if pad < 0:
        return tokens
    tokens = torch.where(tokens == pad, (tokens + 1) % vocabulary, tokens)
    padding = torch.randint(0, time, (batch, 1), generator=random)
    padding[0] = 0
    steps = torch.arange(time)
    return torch.where(steps < padding if left else steps >= time - padding, pad, tokens)


def _takes_one_token(network: Network) -> bool:
    """Bahdanau's attention looks at the state before each token, so its graph takes one at a time."""
    return isinstance(network, AttentionSeq2Seq)


def _is_recurrent(network: Network) -> bool:
    return "hidden" in network.state_names


def _embedding(network: Network, *, source: bool = False) -> nn.Embedding:
    """The embedding of the tokens a network takes and predicts, or of an encoder–decoder's source."""
    if source:
        found = getattr(network, "source_embedding", None) or network.encoder.embedding
    else:
        found = getattr(network, "target_embedding", None) or getattr(network, "embedding", None)
        found = found or network.source_embedding  # one embedding for both sides
    assert isinstance(found, nn.Embedding)
    return found


def _pad(network: Network) -> int:
    return int(getattr(network, "pad", PAD))  # recurrent networks have no other


def _longest(network: Network) -> int | None:
    """The number of positions, for networks that have a table of them."""
    positions = getattr(getattr(network, "target_placement", network), "positions", None)
    if positions is None:
        return None
    table = positions.table
    return int((table.weight if isinstance(table, nn.Embedding) else table).shape[0]) - getattr(positions, "offset", 0)
