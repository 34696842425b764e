"""The tools that generation is compared with (see bench_generation.py), each as it is meant to be called.

Runs in the peers' own interpreter, so nothing of the project that needs more than numpy is imported; a peer's library is
imported when that peer is opened. Their models, of the shapes A and B, are those of bench_peer_models.py.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bench_peer_models import EOS, THREADS, built, checkpoint, genai_model, gguf_model, openvino_model, torch_model

FP32, INT8, INT4 = "fp32", "8 bit", "4 bit"
_FIRST_WORD = 5  # no special token is drawn as a prompt's
_QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": str(THREADS),
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}

Call = Callable[[], int]  # decodes once; how many tokens came out, over all rows


@dataclass(frozen=True)
class Job:
    """What everyone decodes: always all `new_tokens`, so that no one gains by stopping early."""

    shape: str
    batch: int
    prompt: int  # tokens of each prompt, or source
    new_tokens: int
    beams: int = 1
    words: int = 30_000  # prompts are drawn of the tokens below

    @property
    def tokens(self) -> int:
        return self.batch * self.new_tokens

    def prompts(self) -> NDArray[np.int64]:
        return np.random.default_rng(0).integers(_FIRST_WORD, self.words, (self.batch, self.prompt))


@dataclass(frozen=True)
class Peer:
    name: str
    precision: str
    shapes: str
    beams: bool  # has a beam search
    open: Callable[[Path, Job], Call]
    stand_in: bool = False  # runs another network of the same width, depth and bytes

    def takes(self, job: Job, precision: str) -> bool:
        return precision == self.precision and job.shape in self.shapes and (job.beams == 1 or self.beams)


# ---- PyTorch eager, and its own exporter to onnxruntime


def torch_generate(work: Path, job: Job) -> Call:
    return _generate(torch_model(work, job.shape), job)


def _generate(model: Any, job: Job) -> Call:
    """`generate` of transformers, which also drives the exports of optimum."""
    import torch

    prompts = torch.from_numpy(job.prompts())
    mask = torch.ones_like(prompts)
    length = {"max_new_tokens": job.new_tokens, "min_new_tokens": job.new_tokens}
    before = 1 if job.shape == "B" else job.prompt  # what precedes the new tokens in the answer

    def call() -> int:
        with torch.inference_mode():
            answer = model.generate(
                prompts, attention_mask=mask, num_beams=job.beams, do_sample=False, pad_token_id=1, **length
            )
        return int((answer.shape[1] - before) * job.batch)

    return call


def torch_loop(work: Path, job: Job) -> Call:
    """PyTorch without what `generate` does around it: the model called in a loop, with its own cache."""
    import torch

    model = torch_model(work, job.shape)
    prompts = torch.from_numpy(job.prompts())

    def call() -> int:
        with torch.inference_mode():
            return _loop_gpt2(model, prompts, job) if job.shape == "A" else _loop_bart(model, prompts, job)

    return call


def _loop_gpt2(model: Any, prompts: Any, job: Job) -> int:
    tokens, cache, made = prompts, None, 0
    for _ in range(job.new_tokens):
        step = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, tokens = step.past_key_values, step.logits[:, -1:].argmax(-1)
        made += tokens.numel()
    return made


def _loop_bart(model: Any, sources: Any, job: Job) -> int:
    memory = model.get_encoder()(sources)
    tokens, cache, made = sources.new_full((job.batch, 1), EOS["B"]), None, 0
    for _ in range(job.new_tokens):
        step = model(encoder_outputs=memory, decoder_input_ids=tokens, past_key_values=cache, use_cache=True)
        cache, tokens = step.past_key_values, step.logits[:, -1:].argmax(-1)
        made += tokens.numel()
    return made


def optimum(work: Path, job: Job) -> Call:
    import onnxruntime as ort
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM, ORTModelForSeq2SeqLM

    torch.set_num_threads(THREADS)
    kind: Any = ORTModelForCausalLM if job.shape == "A" else ORTModelForSeq2SeqLM
    source = checkpoint(work, job.shape)
    folder = built(
        work / f"{job.shape}-optimum", lambda draft: kind.from_pretrained(source, export=True).save_pretrained(draft)
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 3
    return _generate(kind.from_pretrained(folder, session_options=options, use_io_binding=True), job)


# ---- CTranslate2


def ctranslate2(compute_type: str) -> Callable[[Path, Job], Call]:
    def open_peer(work: Path, job: Job) -> Call:
        import ctranslate2 as library

        def convert(draft: Path) -> None:
            library.converters.TransformersConverter(str(checkpoint(work, job.shape))).convert(str(draft), force=True)

        folder = built(work / f"{job.shape}-ctranslate2", convert)
        kind = library.Generator if job.shape == "A" else library.Translator
        model = kind(str(folder), compute_type=compute_type, intra_threads=THREADS, inter_threads=1)
        prompts = [[f"t{token}" for token in row] for row in job.prompts()]
        return _ctranslate2_generator(model, prompts, job) if job.shape == "A" else _ctranslate2_translator(model, prompts, job)

    return open_peer


def _ctranslate2_generator(model: Any, prompts: list[list[str]], job: Job) -> Call:
    length = {"max_length": job.new_tokens, "min_length": job.new_tokens}

    def call() -> int:
        answers = model.generate_batch(prompts, beam_size=job.beams, include_prompt_in_result=False, **length)
        return sum(len(answer.sequences[0]) for answer in answers)

    return call


def _ctranslate2_translator(model: Any, prompts: list[list[str]], job: Job) -> Call:
    length = {"max_decoding_length": job.new_tokens, "min_decoding_length": job.new_tokens}

    def call() -> int:
        answers = model.translate_batch(prompts, beam_size=job.beams, **length)
        return sum(len(answer.hypotheses[0]) for answer in answers)

    return call


# ---- OpenVINO: a stateful model, whose cache stays inside it


def openvino(precision: str) -> Callable[[Path, Job], Call]:
    def open_peer(work: Path, job: Job) -> Call:
        import openvino as library

        core = library.Core()
        path = openvino_model(work, precision) / "model.xml"
        settings = {
            "INFERENCE_NUM_THREADS": THREADS,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        request = core.compile_model(core.read_model(path), "CPU", settings).create_infer_request()
        return lambda: _openvino_loop(request, job)

    return open_peer


def _openvino_loop(request: Any, job: Job) -> int:
    request.reset_state()
    tokens, past, made = job.prompts(), 0, 0
    rows = np.arange(job.batch, dtype=np.int64)
    for _ in range(job.new_tokens):
        positions = np.tile(np.arange(past, past + tokens.shape[1]), (job.batch, 1))
        request.infer({"tokens": tokens, "positions": positions, "rows": rows}, share_inputs=True)
        past += tokens.shape[1]
        tokens = request.get_tensor("logits").data[:, -1].argmax(-1)[:, None]
        made += tokens.size
    return made


# ---- llama.cpp


def llama_cpp(kind: str) -> Callable[[Path, Job], Call]:
    def open_peer(work: Path, job: Job) -> Call:
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(gguf_model(work, kind) / "model.gguf")
        settings.n_ctx, settings.n_parallel, settings.n_gpu_layers, settings.warmup = 1024, 1, 0, True
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = THREADS
        settings.port = 0  # several may run at once
        server = xllamacpp.Server(settings)
        request = {
            "prompt": job.prompts()[0].tolist(), "n_predict": job.new_tokens, "ignore_eos": True, "temperature": 0.0,
            "top_k": 1, "samplers": ["top_k"], "cache_prompt": False, "stream": False, "n_probs": 0,
        }  # fmt: skip

        def call() -> int:
            answer = server.handle_completions(request)
            found = json.loads(answer) if isinstance(answer, str | bytes) else answer
            return int(found["usage"]["completion_tokens"])

        return call

    return open_peer


# ---- onnxruntime-genai: its builder knows no GPT-2, so a Llama of the same width, depth and bytes stands in


def genai(precision: str) -> Callable[[Path, Job], Call]:
    def open_peer(work: Path, job: Job) -> Call:
        import onnxruntime_genai as library

        model = library.Model(str(genai_model(work, precision)))
        prompts = job.prompts().astype(np.int32)
        length = job.prompt + job.new_tokens

        def call() -> int:
            options = library.GeneratorParams(model)
            options.set_search_options(
                max_length=length, min_length=length, do_sample=False, num_beams=job.beams, batch_size=job.batch,
                past_present_share_buffer=job.beams == 1,
            )  # fmt: skip
            generator = library.Generator(model, options)
            generator.append_tokens(prompts)
            while not generator.is_done():
                generator.generate_next_token()
            return sum(len(generator.get_sequence(row)) - job.prompt for row in range(job.batch))

        return call

    return open_peer


PEERS = (
    Peer("PyTorch generate", FP32, "AB", True, torch_generate),
    Peer("PyTorch loop", FP32, "AB", False, torch_loop),
    Peer("optimum-onnx", FP32, "AB", True, optimum),
    Peer("CTranslate2 float32", FP32, "AB", True, ctranslate2("float32")),
    Peer("OpenVINO f32", FP32, "A", False, openvino("f32")),
    Peer("llama.cpp f32", FP32, "A", False, llama_cpp("f32")),
    Peer("onnxruntime-genai fp32", FP32, "A", True, genai("fp32"), stand_in=True),
    Peer("CTranslate2 int8", INT8, "AB", True, ctranslate2("int8")),
    Peer("OpenVINO int8w", INT8, "A", False, openvino("int8w")),
    Peer("llama.cpp q8_0", INT8, "A", False, llama_cpp("q8_0")),
    Peer("OpenVINO int4w", INT4, "A", False, openvino("int4w")),
    Peer("llama.cpp q4_0", INT4, "A", False, llama_cpp("q4_0")),
    Peer("onnxruntime-genai int4", INT4, "A", True, genai("int4"), stand_in=True),
)


class PeerTarget:
    """What a worker times: see runtime/bench_worker.py."""

    device = "cpu"

    def __init__(self, request: dict[str, Any]) -> None:
        job = Job(**request["job"])
        peer = next(peer for peer in PEERS if peer.name == request["peer"])
        _print_to(Path(request["work"]) / f"{peer.name}.log")
        self.inputs = f"{job.batch} x {job.prompt} tokens"
        self._job = job
        self._call = peer.open(Path(request["work"]), job)

    def prepare(self, batch: int | None) -> Callable[[], None]:
        return lambda: check_count(self._call(), self._job)


def check_count(made: int, job: Job) -> None:
    """Who decodes fewer tokens than were asked for would look fast."""
    if made != job.tokens:
        raise RuntimeError(f"it made {made} tokens, expected {job.tokens}")


def _print_to(log: Path) -> None:
    """The libraries print a lot, from C++ too."""
    with log.open("a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)


def main() -> None:
    os.environ.update(_QUIET)  # before any of the libraries is imported
    warnings.filterwarnings("ignore")
    from runtime.bench_worker import serve

    serve(PeerTarget)


if __name__ == "__main__":
    main()
