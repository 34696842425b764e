"""Two profiles of one network. They differ in the functions that its layers call while it is traced, not in the network.

portable      standard ONNX operators only: runs in any host. Caches grow by concatenation.
onnxruntime   fused attention of onnxruntime's own operator set, com.microsoft. Caches are allocated once, (batch, heads,
              capacity, head), and updated in place; rows may be of different length without a mask.

Recurrent layers become the standard RNN, GRU and LSTM operators in both, which take the lengths of padded rows.
Outside of tracing every function computes the same in PyTorch, so that a graph can be compared with its own profile, and the
profile with the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.onnx.ops import symbolic_multi_out

from architectures.layers.attention import attend, hiding_bias, split_heads
from architectures.layers.reading import Reading, read, shift_to_front
from architectures.layers.recurrent import Recurrent, State, recur

from .recurrent_operators import recurrent_operator

PORTABLE, ONNXRUNTIME = "portable", "onnxruntime"
PROFILES = (PORTABLE, ONNXRUNTIME)
_MICROSOFT = "com.microsoft::"


@contextmanager
def using(profile: str) -> Iterator[None]:
    """Within the block networks compute with the functions of `profile`."""
    with ExitStack() as stack:
        stack.enter_context(recur.replaced_by(_recur))
        if profile == ONNXRUNTIME:
            stack.enter_context(read.replaced_by(_read_in_place))
            stack.enter_context(attend.replaced_by(_attend_fused))
        yield


def _recur(stack: Recurrent, x: Tensor, state: State, lengths: Tensor | None) -> tuple[Tensor, State]:
    if not torch.onnx.is_in_onnx_export():
        return recur.plain(stack, x, state, lengths)
    x = x.transpose(0, 1)
    finals: list[State] = []
    for number, directions in enumerate(stack.each_layer()):
        count = len(directions)
        before = tuple(part[number * count : (number + 1) * count] for part in state)
        x, after = recurrent_operator(stack.kind, x, [list(layer.parameters()) for layer in directions], before, lengths)
        finals.append(after)
    return x.transpose(0, 1), tuple(torch.cat(parts) for parts in zip(*finals, strict=True))


# Attention with a cache in place. A row's record is its length; what lies behind it is overwritten by the next tokens.
@dataclass(frozen=True)
class InPlace:
    """What the queries see: everything in the row's cache up to themselves."""

    before: Tensor  # (batch,) int32: tokens in the cache before this call
    last: Tensor  # (batch,) int32: index of the last slot this call writes
    total: Tensor  # () int32: slots in use in the longest row after this call


def _read_in_place(tokens: Tensor, pad: int, record: Tensor) -> Reading:
    time = tokens.shape[1]
    steps = torch.arange(time, dtype=torch.int32, device=tokens.device)
    if pad < 0:  # no padding: every token counts
        new: Tensor | None = None
        restore: Callable[[Tensor], Tensor] = lambda x: x  # noqa: E731
    else:
        tokens, new, restore = shift_to_front(tokens, pad)
    positions = record.unsqueeze(1) + steps  # (batch, time)
    after = record + time
    if new is not None:
        new = new.to(torch.int32)
        positions = positions * (steps < new.unsqueeze(1))  # padding stands at 0, which no table is too short for
        after = record + new
    # Padding, now at the end of each row, is written to the cache too, but not counted: the next tokens overwrite it.
    seen = InPlace(record, record + (time - 1), (record.max() + time).to(torch.int32))
    return Reading(tokens, positions, seen, after.to(torch.int32), restore)


def _attend_fused(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Any,
    *,
    heads: int,
    past_keys: Tensor | None = None,
    past_values: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    exporting = torch.onnx.is_in_onnx_export()
    if isinstance(visible, InPlace):
        assert past_keys is not None
        assert past_values is not None
        if not exporting:
            return _attend_in_place(query, keys, values, visible, heads, past_keys, past_values)
        context, all_keys, all_values = symbolic_multi_out(
            _MICROSOFT + "GroupQueryAttention",
            (query, keys, values, past_keys, past_values, visible.last, visible.total),
            {"num_heads": heads, "kv_num_heads": heads},
            dtypes=(query.dtype, keys.dtype, values.dtype),
            shapes=(query.shape, past_keys.shape, past_values.shape),
            version=1,
        )
        return context, all_keys, all_values
    if not exporting:
        return attend.plain(query, keys, values, visible, heads=heads, dropout=dropout)
    (context,) = symbolic_multi_out(
        _MICROSOFT + "MultiHeadAttention",
        (query, keys, values, None, None, hiding_bias(visible, query.dtype)),
        {"num_heads": heads},
        dtypes=(query.dtype,),
        shapes=(query.shape,),
        version=1,
    )
    return context, keys, values


def _attend_in_place(
    query: Tensor, keys: Tensor, values: Tensor, visible: InPlace, heads: int, past_keys: Tensor, past_values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What GroupQueryAttention computes, in PyTorch."""
    slots = visible.before.long().unsqueeze(1) + torch.arange(query.shape[1], device=query.device)  # (batch, time)
    index = slots[:, None, :, None].expand(-1, heads, -1, past_keys.shape[3])
    all_keys = past_keys.scatter(2, index, split_heads(keys, heads))
    all_values = past_values.scatter(2, index, split_heads(values, heads))
    seen = torch.arange(past_keys.shape[2], device=query.device) <= slots[:, None, :, None]  # (batch, 1, time, capacity)
    bias = hiding_bias(seen, query.dtype)
    context = functional.scaled_dot_product_attention(split_heads(query, heads), all_keys, all_values, attn_mask=bias)
    return context.transpose(1, 2).flatten(2), all_keys, all_values
