"""The models that generation's peers decode (see bench_peers.py), in each peer's own format.

Weights are random. A model is built on first use under the work directory, and kept.

A   GPT-2 small: 12 layers, width 768, 12 heads, vocabulary 50257
B   Transformer base: 6 + 6 layers, width 512, 8 heads, feed-forward 2048, vocabulary 32000, as BART has it
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

THREADS = 2
EOS = {"A": 1, "B": 2}
_VOCABULARY = {"A": 50257, "B": 32_000}
_LAYERS, _HEADS, _HEAD = 12, 12, 64  # of A


def built(folder: Path, build: Callable[[Path], object]) -> Path:
    """`folder`, built on first use. It appears whole or not at all."""
    if not folder.exists():
        draft = folder.with_name(f"draft-{os.getpid()}-{folder.name}")
        draft.mkdir(parents=True)
        try:
            build(draft)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def checkpoint(work: Path, shape: str) -> Path:
    return built(work / f"{shape}-checkpoint", {"A": _write_gpt2, "B": _write_bart}[shape])


def _write_gpt2(folder: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    _write(folder, GPT2LMHeadModel, GPT2Config(bos_token_id=0, eos_token_id=EOS["A"]))


def _write_bart(folder: Path) -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    settings: dict[str, Any] = {
        f"{side}_{what}": value
        for side in ("encoder", "decoder")
        for what, value in (("layers", 6), ("attention_heads", 8), ("ffn_dim", 2048))
    }
    settings |= {"vocab_size": _VOCABULARY["B"], "d_model": 512, "max_position_embeddings": 512, "scale_embedding": True}
    settings |= {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": EOS["B"], "decoder_start_token_id": EOS["B"]}
    settings |= {"forced_eos_token_id": None}
    # names of old, which CTranslate2's converter asks for
    settings |= {"normalize_before": False, "normalize_embedding": True, "add_final_layer_norm": False}
    settings |= {"static_position_embeddings": False}
    _write(folder, BartForConditionalGeneration, BartConfig(**settings))


def _write(folder: Path, network: Any, config: Any) -> None:
    """Random weights, and a tokenizer whose n-th word is "t<n>": converters want one."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    network(config).eval().save_pretrained(folder)
    words = Tokenizer(WordLevel({f"t{index}": index for index in range(config.vocab_size)}, unk_token="t3"))
    special: dict[str, Any] = {"bos_token": "t0", "pad_token": "t1", "eos_token": f"t{config.eos_token_id}", "unk_token": "t3"}
    wrapper: Any = PreTrainedTokenizerFast
    wrapper(tokenizer_object=words, **special).save_pretrained(folder)


def torch_model(work: Path, shape: str) -> Any:
    import torch
    from transformers import BartForConditionalGeneration, GPT2LMHeadModel

    torch.set_num_threads(THREADS)
    network: Any = GPT2LMHeadModel if shape == "A" else BartForConditionalGeneration
    return network.from_pretrained(checkpoint(work, shape), attn_implementation="sdpa").eval()


def openvino_model(work: Path, precision: str) -> Path:
    if precision == "f32":
        return built(work / "A-openvino-f32", lambda draft: _write_openvino(work, draft))

    def compress(draft: Path) -> None:
        import nncf
        import openvino as library

        mode: dict[str, Any] = {"mode": nncf.CompressWeightsMode.INT8_ASYM}
        if precision == "int4w":
            mode = {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": 128, "ratio": 1.0, "all_layers": True}
        model = library.Core().read_model(openvino_model(work, "f32") / "model.xml")
        library.save_model(nncf.compress_weights(model, **mode), draft / "model.xml", compress_to_fp16=False)

    return built(work / f"A-openvino-{precision}", compress)


def _write_openvino(work: Path, folder: Path) -> None:
    import openvino as library
    import torch

    caches = [torch.zeros(2, _HEADS, 3, _HEAD) for _ in range(2 * _LAYERS)]
    tokens = torch.zeros(2, 2, dtype=torch.int64)
    network = _gpt2_step(torch_model(work, "A"))
    model = library.convert_model(network, example_input=(tokens, tokens.clone(), torch.arange(2), *caches))
    pasts = [f"past.{index}" for index in range(len(caches))]
    shapes = [[-1, -1], [-1, -1], [-1], *([-1, _HEADS, -1, _HEAD] for _ in caches)]
    for port, name, shape in zip(model.inputs, ("tokens", "positions", "rows", *pasts), shapes, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(library.PartialShape(shape))
    presents = [name.replace("past", "present") for name in pasts]
    for port, name in zip(model.outputs, ("logits", *presents), strict=True):
        port.get_tensor().set_names({name})
    model.validate_nodes_and_infer_types()
    _make_stateful(model, dict(zip(pasts, presents, strict=True)))
    library.save_model(model, folder / "model.xml", compress_to_fp16=False)


def _make_stateful(model: Any, caches: dict[str, str]) -> None:
    """Past and present become a variable of the model, which starts as (batch, heads, 0, head)."""
    from openvino import opset13 as operators
    from openvino._offline_transformations import apply_make_stateful_transformation

    apply_make_stateful_transformation(model, caches)
    sizes = operators.shape_of(model.input("tokens"), output_type="i64")
    batch = operators.gather(sizes, operators.constant([0]), operators.constant(0))
    rest = operators.constant(np.array([_HEADS, 0, _HEAD], np.int64))
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            empty = operators.broadcast(operators.constant(np.float32(0)), operators.concat([batch, rest], 0))
            node.set_arguments([empty.output(0)])
    model.validate_nodes_and_infer_types()


def _gpt2_step(model: Any) -> Any:
    """GPT-2 with its cache as arguments, in operations that the converter fuses."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Any, positions: Any, rows: Any, *caches: Any) -> tuple[Any, ...]:
            body = self.model.transformer
            x = body.wte(tokens) + body.wpe(positions)  # (batch, time, width)
            batch, time, width = x.shape
            total = time + caches[0].shape[2]
            visible = torch.ones(time, total, dtype=torch.bool).tril(total - time)
            after = []
            for layer, past in zip(body.h, zip(caches[::2], caches[1::2], strict=True), strict=True):
                parts = layer.attn.c_attn(layer.ln_1(x)).split(width, dim=2)
                query, *new = (part.view(batch, time, _HEADS, _HEAD).transpose(1, 2) for part in parts)
                keys, values = (torch.cat([old.index_select(0, rows), part], 2) for old, part in zip(past, new, strict=True))
                seen = scaled_dot_product_attention(query, keys, values, attn_mask=visible)
                x = x + layer.attn.c_proj(seen.transpose(1, 2).reshape(batch, time, width))
                x = x + layer.mlp(layer.ln_2(x))
                after += [keys, values]
            return (self.model.lm_head(body.ln_f(x)[:, -1:]), *after)

    return Step().eval()


def gguf_model(work: Path, kind: str) -> Path:
    return built(work / f"A-llama.cpp-{kind}", lambda draft: _write_gguf(work, draft, kind))


def _write_gguf(work: Path, folder: Path, kind: str) -> None:
    import gguf

    model = torch_model(work, "A")
    writer = gguf.GGUFWriter(folder / "model.gguf", "gpt2")
    config, types = model.config, {"f32": ("F32", 0), "q8_0": ("Q8_0", 7), "q4_0": ("Q4_0", 2)}
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_file_type(types[kind][1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(EOS["A"])
    weight_type = gguf.GGMLQuantizationType[types[kind][0]]
    for name, values, is_matrix in _gguf_tensors(model.transformer):
        if is_matrix:
            writer.add_tensor(name, gguf.quants.quantize(values, weight_type), raw_dtype=weight_type)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_tensors(body: Any) -> list[tuple[str, NDArray[np.float32], bool]]:
    """Each tensor with its name there, and whether it is a matrix that is quantized (and stored transposed)."""
    found = [("token_embd.weight", body.wte.weight, True), ("position_embd.weight", body.wpe.weight, False)]
    found += [(f"output_norm.{part}", getattr(body.ln_f, part), False) for part in ("weight", "bias")]
    for index, layer in enumerate(body.h):
        norms = {"attn_norm": layer.ln_1, "ffn_norm": layer.ln_2}
        matrices = {"attn_qkv": layer.attn.c_attn, "attn_output": layer.attn.c_proj}
        matrices |= {"ffn_up": layer.mlp.c_fc, "ffn_down": layer.mlp.c_proj}
        for name, module in (norms | matrices).items():
            weight = module.weight.t() if name in matrices else module.weight
            found.append((f"blk.{index}.{name}.weight", weight, name in matrices))
            found.append((f"blk.{index}.{name}.bias", module.bias, False))
    return [(name, np.ascontiguousarray(tensor.detach().numpy()), is_matrix) for name, tensor, is_matrix in found]


def genai_model(work: Path, precision: str) -> Path:
    """Its builder knows no GPT-2, so a Llama of the same width, depth and bytes stands in."""
    return built(work / f"A-genai-{precision}", lambda draft: _build_genai(work, draft, precision))


def _write_llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {"vocab_size": _VOCABULARY["A"], "hidden_size": 768, "intermediate_size": 2048}
    settings |= {"num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS, "max_position_embeddings": 1024}
    settings |= {"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": EOS["A"], "pad_token_id": 1}
    _write(folder, LlamaForCausalLM, LlamaConfig(**settings))


def _build_genai(work: Path, folder: Path, precision: str) -> None:
    source = built(work / "A-llama-checkpoint", _write_llama)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(folder)]
    command += ["-e", "cpu", "-p", precision, "-c", str(work / "genai-cache")]
    if precision == "int4":
        command += ["--extra_options", "int4_accuracy_level=4", "int4_block_size=32"]
    # The builder needs a newer transformers than optimum takes: it lies in a folder of its own (see the Makefile).
    environment = os.environ | {"PYTHONPATH": str(Path(sys.prefix) / "builder")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode:
        raise RuntimeError(f"its builder failed: {result.stderr.strip()[-300:]}")
    settings = folder / "genai_config.json"
    config = json.loads(settings.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = THREADS
    settings.write_text(json.dumps(config))
