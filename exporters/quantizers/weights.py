"""int8-weights and int4-weights: weights of products, embeddings and recurrent layers in blocks (blocks.py), computed in int8.

One row at a time, as a decoder does, a product is bound by reading its weights: MatMulNBits reads a quarter or an eighth of the
bytes. Gemm becomes a product and a sum. An embedding is read by GatherBlockQuantized; if the output layer is tied to it, both
use the same bytes. Embeddings that are not tied take 8 bits under int4-weights too: they cost no time, and their error is not
averaged out.

How weights are rounded: rounding.py. A matrix that is read elsewhere too (by an embedding, by another graph) is rounded without
samples under gptq, so that it is the same bytes everywhere.

For many rows at once int8-weights has another form, see rows.py. Recurrent layers: recurrent.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from runtime.errors import OptionError

from ..graph import copy_of, drop_unread_weights, opset_of
from ..tensors import array_of
from ..wiring import Wiring, attribute
from .blocks import Array, Blocks
from .products import why_not_product
from .recurrent import AUTO, OPERATORS, arithmetic_of
from .recurrent import why_not as why_not_recurrent
from .recurrent_writer import RecurrentWriter
from .rounding import EIGHT, GPTQ, HQQ, WeightSettings, rounded, rounded_columns
from .rounding_moments import Inputs, Moments
from .rows import Made, multiply_rows, quantize_rows
from .scheme import Request, Scheme, Shapes

_MICROSOFT = "com.microsoft"
_INT8_ACTIVATIONS = 4  # accuracy_level: anything less computes in float32, up to 15 times slower
SMALLEST_TABLE = 4096  # weights of an embedding: below that nothing is saved
_TRANSPOSED = ".transposed"
_PRODUCTS = ("MatMul", "Gemm")
_DROPPED = ("Transpose", "Gather", "GatherBlockQuantized")
_DEFAULTS = {8: WeightSettings(), 4: WeightSettings(rounding=HQQ)}  # at 8 bit nothing is left to gain
_AFTER_THE_OUTPUT_LAYER = ("Add", "Mul", "Div", "Cast", "Identity", "Softmax", "LogSoftmax", "TopK", "ArgMax")


def prepare(model: onnx.ModelProto) -> onnx.ModelProto:
    """Matrices that are transposed before use become plain weights."""
    wiring = Wiring.of(model)
    known = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != "MatMul" or (turned := wiring.maker(node.input[1])) is None or turned.op_type != "Transpose":
            continue
        matrix = wiring.value(turned.input[0])
        if matrix is None or matrix.ndim != 2 or list(attribute(turned, "perm", [1, 0])) != [1, 0]:
            continue
        name = f"{turned.input[0]}{_TRANSPOSED}"
        if name not in known:
            model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(matrix.T), name))
            known.add(name)
        node.input[1] = name
    _drop_unread_nodes(model)
    drop_unread_weights(model)
    return model


def without_needless_copies(model: onnx.ModelProto) -> onnx.ModelProto:
    """What `prepare` made plain, and nobody quantized, is transposed by a node again, where others keep the original."""
    known = {tensor.name for tensor in model.graph.initializer}
    turned: dict[str, onnx.NodeProto] = {}
    for node in model.graph.node:
        original = node.input[1].removesuffix(_TRANSPOSED) if node.op_type == "MatMul" else ""
        if original in known and node.input[1] == original + _TRANSPOSED:
            made = f"{node.input[1]}.again"
            turned[made] = helper.make_node("Transpose", [original], [made], name=made, perm=[1, 0])
            node.input[1] = made
    if turned:
        nodes = [*turned.values(), *model.graph.node]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        drop_unread_weights(model)
    return model


def why_not(node: onnx.NodeProto, shapes: Shapes, *, divisible: bool = True) -> str | None:
    """With `divisible`, rows of a table must be cut into blocks."""
    if node.op_type in OPERATORS:
        return why_not_recurrent(node, shapes)
    if node.op_type == "Gather":
        table = shapes.get(node.input[0], ())
        if len(table) != 2 or attribute(node, "axis", 0) != 0:
            return "only tables whose rows are taken whole have a quantized form"
        if table[0] * table[1] < SMALLEST_TABLE:
            return f"{table[0] * table[1]} weights are too few to save anything"
        return f"its rows of {table[1]} cannot be divided into blocks of 16" if divisible and table[1] % 16 else None
    return why_not_product(node, shapes)


def how(node: onnx.NodeProto, shapes: Shapes, settings: Any) -> str:
    wanted = getattr(settings, "recurrence", AUTO)
    return arithmetic_of(node, shapes, wanted)[1] if node.op_type in OPERATORS else "chosen"


def tied_tables(models: Iterable[onnx.ModelProto]) -> frozenset[str]:
    """Digests of the tables of embeddings that a product of some graph multiplies by, transposed; and, marked as such, of the
    matrices that products of several graphs multiply by."""
    tables: dict[tuple[int, ...], set[str]] = {}
    products: dict[tuple[int, ...], list[tuple[int, onnx.NodeProto, onnx.TensorProto]]] = {}
    for number, model in enumerate(models):
        weights = {tensor.name: tensor for tensor in model.graph.initializer if len(tensor.dims) == 2}
        for node in model.graph.node:
            if node.op_type == "Gather" and node.input[0] in weights:
                table = weights[node.input[0]]
                tables.setdefault(tuple(table.dims), set()).add(digest_of(array_of(table)))
            elif node.op_type in ("MatMul", "Gemm") and node.input[1] in weights:
                tensor = weights[node.input[1]]
                turned = node.op_type == "Gemm" and attribute(node, "transB", 0)
                shape = tuple(tensor.dims) if turned else tuple(reversed(tensor.dims))
                products.setdefault(shape, []).append((number, node, tensor))
    found: set[str] = set()
    for shape, multiplied in products.items():
        if shape not in tables and len({number for number, *_ in multiplied}) == 1:
            continue  # nothing to compare with
        graphs: dict[str, set[int]] = {}
        for number, node, tensor in multiplied:
            graphs.setdefault(digest_of(rows_of(node, array_of(tensor))), set()).add(number)
        found |= graphs.keys() & tables.get(shape, set())
        found |= {_in_several_graphs(digest) for digest, readers in graphs.items() if len(readers) > 1}
    return frozenset(found)


def apply(request: Request, *, bits: int) -> onnx.ModelProto:
    model = copy_of(request.model)
    writer = _Writer(model, request, bits)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.name in writer.joined:
            continue
        if node.name not in request.nodes:
            nodes.append(node)
        elif node.op_type == "Gather":
            nodes += writer.gather(node)
        elif node.op_type in OPERATORS:
            nodes += writer.recurrent(node)
        else:
            nodes += writer.product(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    known = {tensor.name for tensor in model.graph.initializer}
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in writer.weights.items() if name not in known
    )
    _drop_unread_nodes(model)
    drop_unread_weights(model)
    if not any(item.domain == _MICROSOFT for item in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_MICROSOFT, 1))
    return model


class _Writer:
    """Makes the quantized form of a node, and collects the weights that these read."""

    def __init__(self, model: onnx.ModelProto, request: Request, bits: int) -> None:
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._wiring = Wiring.of(model)
        self._opset = opset_of(model)
        self._request, self._bits = request, bits
        self._settings: WeightSettings = request.settings or _DEFAULTS[bits]
        self._output_layers = _output_layers(model) if self._settings.head == EIGHT else frozenset()
        self._inputs = _inputs_of_products(model, frozenset(request.nodes))
        self._moments = self._moments_of(model) if self._settings.rounding == GPTQ else None
        self._quantized_rows: dict[str, str] = {}
        self._biases = {} if request.many_rows else _biases_after(self._wiring, self._tensors, frozenset(request.nodes))
        self.joined = {add.name for add in self._biases.values()}  # nodes that are part of the product before them
        self.weights: dict[str, NDArray[Any]] = {}

    def _moments_of(self, model: onnx.ModelProto) -> Moments:
        if self._request.calibration is None:
            raise OptionError(
                f"rounding={GPTQ} needs samples of what the products multiply, and there are none; pass --data FILE, or take "
                f"--set rounding={HQQ}, which needs no samples"
            )
        products = (node for node in model.graph.node if node.name in self._inputs)
        widths = {self._inputs[node.name]: _width(node, self._tensors[node.input[1]]) for node in products}
        return Moments(model, widths, self._request.calibration)

    def product(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        x, weight, *rest = node.input
        bias, output = rest[0] if rest and rest[0] else None, node.output[0]
        if (after := self._biases.get(node.name)) is not None:
            bias, output = next(name for name in after.input if name != output), after.output[0]
        rows = rows_of(node, array_of(self._tensors[weight]))
        if node.op_type == "Gemm":
            weight = f"{weight}.{node.name}"  # two of them may transpose or scale one weight differently
        digest = digest_of(rows) if self._request.tied else ""
        tied = digest in self._request.tied
        alone = not tied and _in_several_graphs(digest) not in self._request.tied
        moments = self._moments.of(self._inputs[node.name]) if alone and self._moments is not None else None
        is_vector = bias in self._tensors and tuple(self._tensors[bias].dims) == (len(rows),)
        product = output if bias is None or (is_vector and not self._request.many_rows) else f"{output}.product"
        if self._request.many_rows:
            nodes = self._by_rows(x, weight, rows, product, moments)
        else:
            bits = self._bits_of(tied or node.name in self._output_layers)
            weight = weight if tied or bits == self._bits else f"{weight}.head"  # another product may read it with fewer
            nodes = self._by_blocks(x, weight, rows, product, bits, moments, bias if product == output else None)
        if product != output:
            nodes.append(helper.make_node("Add", [product, bias], [output]))
        for number, made in enumerate(nodes):
            made.name = f"{node.name}.{number}" if number else node.name
        return nodes

    def _bits_of(self, is_head: bool) -> int:
        return 8 if is_head and self._settings.head == EIGHT else self._bits

    def _by_blocks(
        self,
        x: str,
        weight: str,
        rows: Array,
        output: str,
        bits: int,
        moments: Array | None = None,
        bias: str | None = None,
    ) -> list[onnx.NodeProto]:
        outputs, inputs = rows.shape
        blocks = rounded(rows, bits, self._settings, moments)
        names = self._kept(weight, blocks, blocks.numbers)
        if bias is not None:
            names = [*names, *[""] * (4 - len(names)), bias]
        made = helper.make_node(
            "MatMulNBits",
            [x, *names],
            [output],
            domain=_MICROSOFT,
            K=inputs,
            N=outputs,
            bits=blocks.bits,
            block_size=blocks.size,
            accuracy_level=_INT8_ACTIVATIONS,
        )
        return [made]

    def _by_rows(self, x: str, weight: str, rows: Array, output: str, moments: Array | None) -> list[onnx.NodeProto]:
        made: Made = ([], {})
        if x not in self._quantized_rows:
            taken = self._wiring.makers  # an earlier scheme may have quantized the same rows; onnxruntime joins the two
            self._quantized_rows[x] = next(name for name in _names_of_rows(x) if name not in taken)
            made = quantize_rows(x, self._quantized_rows[x], self._opset)
        columns_of = partial(rounded_columns, settings=self._settings, moments=moments)
        nodes, weights = multiply_rows(self._quantized_rows[x], weight, np.ascontiguousarray(rows.T), output, columns_of)
        self.weights |= made[1] | weights
        return made[0] + nodes

    def gather(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        table = array_of(self._tensors[node.input[0]])
        tied = digest_of(table) in self._request.tied
        blocks = rounded(table, self._bits_of(True) if tied else 8, self._settings)
        return [self._taken(f"{node.input[0]}.table", blocks, node.input[1], node.output[0], node.name)]

    def _taken(self, table: str, blocks: Blocks, indices: str, output: str, name: str) -> onnx.NodeProto:
        """Rows of a table."""
        numbers, scales, *zeros = self._kept(table, blocks, blocks.numbers.reshape(len(blocks.numbers), -1))
        return helper.make_node(
            "GatherBlockQuantized",
            [numbers, indices, scales, *zeros],
            [output],
            name=name,
            domain=_MICROSOFT,
            bits=blocks.bits,
            block_size=blocks.size,
            gather_axis=0,
            quantize_axis=1,
        )

    def recurrent(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        nodes, weights = RecurrentWriter(
            self._wiring, self._opset, self._bits, self._settings, self._multiplied, self._taken
        ).written(node)
        self.weights |= weights
        return nodes

    def _multiplied(
        self, x: str, weight: str, rows: Array, output: str, bias: Array | None, *, of_state: bool
    ) -> list[onnx.NodeProto]:
        """A product of a recurrent layer."""
        added = None
        if bias is not None:
            added = f"{weight}.bias"
            self.weights[added] = bias
        if not self._request.many_rows or (of_state and not self._request.large_batch):
            return self._by_blocks(x, weight, rows, output, self._bits, bias=added)
        if added is None:
            return self._by_rows(x, weight, rows, output, None)
        product = f"{output}.product"
        add = helper.make_node("Add", [product, added], [output], name=f"{output}.Add")
        return [*self._by_rows(x, weight, rows, product, None), add]

    def _kept(self, weight: str, blocks: Blocks, numbers: Array) -> list[str]:
        """The names of numbers, scales and, if there are any, zero points."""
        arrays = {f"{weight}.blocks": numbers, f"{weight}.scales": blocks.scales}
        if blocks.zeros is not None:
            arrays[f"{weight}.zeros"] = blocks.zeros
        self.weights |= arrays
        return list(arrays)


def _names_of_rows(x: str) -> Iterator[str]:
    yield f"{x}.rows"
    yield from (f"{x}.rows.{number}" for number in count(2))


def _inputs_of_products(model: onnx.ModelProto, names: frozenset[str]) -> dict[str, Inputs]:
    """What each product multiplies its weight with; products that share a weight have all their inputs in common."""
    by_weight: dict[tuple[str, int], list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        if node.name in names and node.op_type in _PRODUCTS:
            turned = attribute(node, "transB", 0) if node.op_type == "Gemm" else 0
            by_weight.setdefault((node.input[1], turned), []).append(node)
    return {
        node.name: tuple(dict.fromkeys(other.input[0] for other in nodes)) for nodes in by_weight.values() for node in nodes
    }


def _biases_after(wiring: Wiring, weights: Container[str], names: frozenset[str]) -> dict[str, onnx.NodeProto]:
    """Product → the sum with a bias that alone reads it."""
    found = {}
    for node in wiring.nodes:
        if node.name not in names or node.op_type != "MatMul" or node.output[0] in wiring.outputs:
            continue
        readers = wiring.readers.get(node.output[0], [])
        if len(readers) == 1 and readers[0].op_type == "Add" and readers[0].domain in ("", "ai.onnx"):
            other = [name for name in readers[0].input if name != node.output[0]]
            bias = wiring.constants.get(other[0]) if len(other) == 1 and other[0] in weights else None
            if bias is not None and len(bias.dims) == 1 and list(bias.dims) == [wiring.constants[node.input[1]].dims[1]]:
                found[node.name] = readers[0]
    return found


def _output_layers(model: onnx.ModelProto) -> frozenset[str]:
    """The products whose result is an output of the graph, as it is or after a bias, a scale or a choice."""
    wiring = Wiring.of(model)
    above = (node for value in model.graph.output for node in wiring.upstream(value.name, _AFTER_THE_OUTPUT_LAYER))
    return frozenset(node.name for node in above if node.op_type in ("MatMul", "Gemm"))


def _width(node: onnx.NodeProto, matrix: onnx.TensorProto) -> int:
    turned = node.op_type == "Gemm" and attribute(node, "transB", 0)
    return int(matrix.dims[1 if turned else 0])


def rows_of(node: onnx.NodeProto, matrix: Array) -> Array:
    """The weight of a product with its outputs first."""
    if node.op_type != "Gemm":
        return np.ascontiguousarray(matrix.T)
    turned = matrix if attribute(node, "transB", 0) else matrix.T
    return np.ascontiguousarray(turned * np.float32(attribute(node, "alpha", 1.0)))


def digest_of(table: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(table).tobytes()).hexdigest()


def _in_several_graphs(digest: str) -> str:
    return f"in several graphs: {digest}"


def _drop_unread_nodes(model: onnx.ModelProto) -> None:
    """Transposes and rows of tables that nothing reads any more."""
    wiring = Wiring.of(model)
    read = {name: len(readers) for name, readers in wiring.readers.items()}
    for node in reversed(list(model.graph.node)):
        if node.op_type in _DROPPED and node.output[0] not in wiring.outputs and not read.get(node.output[0]):
            for name in set(node.input):
                read[name] -= 1
            model.graph.node.remove(node)


def _scheme(bits: int, description: str, *, has_many_rows: bool) -> Scheme:
    return Scheme(
        name=f"int{bits}-weights",
        description=description,
        operators=(*_PRODUCTS, "Gather", *OPERATORS),
        needs_calibration=False,
        apply=partial(apply, bits=bits),
        prepare=prepare,
        why_not=why_not,
        how=how,
        takes_text=True,
        has_many_rows=has_many_rows,
        settings=_DEFAULTS[bits],
    )


EIGHT_BIT = _scheme(8, "8-bit weights in blocks, embeddings and output layer included; for decoders", has_many_rows=True)
FOUR_BIT = _scheme(4, "4-bit weights in blocks, embeddings and output layer included; for decoders", has_many_rows=False)
