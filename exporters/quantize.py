"""Bundle → smaller bundle, kept only where it measurably wins.

A scheme is right only when measured: the same int8 that makes one network three times faster makes another four times
slower. So the candidate is raced against its original (race.py), its quality is measured through the runtime, and it is written
if both are within the budget.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from architectures.settings import apply_settings, changed_settings
from runtime.bench import bench, bundle_variant
from runtime.bundle import GENERATOR, MANY, Bundle, Tolerance, lineage_step, write_bundle
from runtime.errors import EdgekitError, OptionError, QuantizationRefused, UnknownName
from runtime.machine import available_cpus
from runtime.metrics import METRICS, Metric
from runtime.session import Session
from runtime.state import specified
from runtime.statistics import Estimate
from runtime.verify import max_error

from .crossover import ROWS, crossover
from .quantized_graphs import Part, convert_parts, draft, refuse_unchanged
from .quantizers import SCHEMES, scheme_for
from .quantizers.recurrent import STEP_BY_STEP
from .quantizers.scheme import MIXED, Calibration, NodeDecision, Scheme
from .race import NOISE_CEILING, NOISE_FLOOR, Speed, is_undecided, measure_speed, past_of, thread_counts, timed_batch

Array = NDArray[Any]

GOLDENS = "the goldens' inputs"  # as a report calls them
_TOLERANCE_MARGIN = 2.0
_MUCH = 0.1  # of the rounds of a race
_FAR = 0.5  # of the size of an answer: more than any scheme costs on inputs like those that it was calibrated on


@dataclass(frozen=True)
class Quality:
    """How good a bundle is: the metric, and a function that measures it through the runtime."""

    metric: Metric
    measure: Callable[[Bundle], float]
    data: str  # what it is measured on, for the report
    details: Callable[[Bundle], str] | None = None  # further figures of a bundle that was measured
    samples: str = ""  # tells the data from others of the same name


@dataclass(frozen=True)
class Budget:
    max_drop: float | None = None  # in percent; None: the metric's own default
    for_size: bool = False  # a slower result is acceptable, and a second form of a decoder for the sake of speed is not
    max_bytes: int | None = None  # of all graphs
    max_us: float | None = None  # of one call at the batch size that is timed
    max_ratio: float | None = None  # of its latency to the original's

    def allowed_drop(self, metric: Metric) -> float:
        return metric.default_budget if self.max_drop is None else self.max_drop


@dataclass(frozen=True)
class QuantizeReport:
    scheme: str
    only: tuple[str, ...]
    exclude: tuple[str, ...]
    settings: Mapping[str, Any]  # that differ from the scheme's own
    bytes_before: int
    bytes_after: int
    latency_before_us: float
    latency_after_us: float
    latency_ratio: Estimate
    noise: Estimate  # ratio of two copies of the original
    batch: int
    threads: int  # that the latency after is on
    threads_before: int
    metric: str
    unit: str
    metric_data: str
    metric_before: float
    metric_after: float
    drop: float
    max_drop: float
    nodes: tuple[NodeDecision, ...]
    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # further figures

    def __bool__(self) -> bool:
        return not self.refusals

    @property
    def size_ratio(self) -> float:
        return self.bytes_after / self.bytes_before

    @property
    def label(self) -> str:
        """e.g. "int8-static (Gemm, ranges=entropy)"."""
        without = [f"without {', '.join(self.exclude)}"] if self.exclude else []
        details = [*self.only, *without, *(f"{key}={value}" for key, value in self.settings.items())]
        return f"{self.scheme} ({', '.join(details)})" if details else self.scheme

    def to_json(self) -> dict[str, Any]:
        return {"kept": bool(self), "size_ratio": self.size_ratio, **asdict(self)}

    def advice(self) -> str:
        """What to try after "slower": another choice of operators if there is one, or size alone."""
        if not any("slower" in reason for reason in self.refusals):
            return ""
        if self.scheme == "fp16" and "arithmetic" not in self.settings:
            return "CPUs compute in float32 faster: --set arithmetic=float32 stores the weights in half and costs no time. "
        in_steps = any(node.reason.startswith(STEP_BY_STEP) for node in self.nodes)
        if in_steps and "recurrence" not in self.settings and self.scheme.endswith("-weights"):
            return "--set recurrence=float32 stores the weights of recurrent layers and leaves them their own operator. "
        operators = sorted({node.operator for node in self.nodes if node.quantized})
        narrower = f"--only {operators[-1]}, or " if len(operators) > 1 else ""
        return f"Try {narrower}--for-size if only size matters. "

    def figures(self) -> str:
        return (
            f"size {self.bytes_before:,} → {self.bytes_after:,} bytes (x{self.size_ratio:.2f}), "
            f"latency {self.latency_before_us:.0f} → {self.latency_after_us:.0f} µs (x{self.latency_ratio}), "
            f"{self.metric} {self.metric_before:.2f} → {self.metric_after:.2f} {self.unit}".rstrip()
        )


class MeasuredRefusal(QuantizationRefused):
    """A refusal that carries the figures it rests on."""

    def __init__(self, report: QuantizeReport, advice: str = "") -> None:
        self.report = report
        advice = report.advice() + advice
        super().__init__(f"{report.label} refused: {'; '.join(report.refusals)}. {advice}Measured: {report.figures()}")


def quantize(
    bundle: Bundle,
    target: str | Path,
    *,
    scheme: str,
    quality: Quality,
    only: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    settings: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
    **options: Any,
) -> QuantizeReport:
    """One scheme on all that it can take, or on the operators that are chosen. `options` are those of `quantize_parts`."""
    defaults = _refuse_request(bundle, scheme, calibration).settings
    chosen = apply_settings(defaults, settings or {}, kind=f"setting of {scheme}")
    part = Part(scheme, chosen, only, exclude)
    changed = changed_settings(defaults, chosen)
    return quantize_parts(
        bundle, target, (part,), scheme=scheme, settings=changed, quality=quality, calibration=calibration, **options
    )


def quantize_parts(
    bundle: Bundle,
    target: str | Path,
    parts: tuple[Part, ...],
    *,
    scheme: str,
    settings: Mapping[str, Any] | None = None,
    quality: Quality,
    calibration: Calibration | None = None,
    budget: Budget | None = None,
    batch: int | None = None,
    threads: int | None,
    force: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> QuantizeReport:
    """Write the quantized bundle at `target`, or raise QuantizationRefused with the reason and the figures.

    Without `threads` both bundles are timed on the number that each is fastest with.
    """
    budget = budget or Budget()
    size = timed_batch(bundle) if batch is None else batch
    progress(f"quantizing to {scheme}")
    with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
        made = built(bundle, parts, calibration, threads or available_cpus(), Path(folder), budget.for_size, progress)
        progress("measuring latency against the original")
        speed = measure_speed(bundle, made.bundle, size, thread_counts(bundle, size, threads))
        progress(f"measuring {quality.metric.name} on {quality.data}")
        scores = (quality.measure(bundle), quality.measure(made.bundle))
        report = judged(bundle, made, parts, scheme, settings or {}, speed, quality, scores, budget)
        if not report:
            raise MeasuredRefusal(report, _fine_tuning_advice(bundle, report))
        return write_made(bundle, made, report, target, force=force)


def judged(
    bundle: Bundle,
    made: Made,
    parts: tuple[Part, ...],
    scheme: str,
    settings: Mapping[str, Any],
    speed: Speed,
    quality: Quality,
    scores: tuple[float, float],
    budget: Budget,
) -> QuantizeReport:
    """All there is to say of what was made; truthy if it may be kept."""
    details = () if quality.details is None else (quality.details(made.bundle),)
    return QuantizeReport(
        scheme=scheme,
        only=parts[0].only,
        exclude=parts[0].exclude,
        settings=settings,
        bytes_before=bundle.graph_bytes,
        bytes_after=made.bundle.graph_bytes,
        latency_before_us=speed.before_us,
        latency_after_us=speed.after_us,
        latency_ratio=speed.ratio,
        noise=speed.noise,
        batch=speed.batch,
        threads=speed.threads,
        threads_before=speed.threads_before,
        metric=quality.metric.name,
        unit=quality.metric.unit,
        metric_data=quality.data,
        metric_before=scores[0],
        metric_after=scores[1],
        nodes=made.nodes,
        notes=(*details, *_threads_note(speed), *_noise_note(speed), *_disturbance_note(speed), *made.notes),
        **judge(speed, quality.metric, scores, made.bundle.graph_bytes, budget),
    )


def _threads_note(speed: Speed) -> Iterator[str]:
    """Where the figures are not what the runtime's own choice, all cores, would give."""
    of_original = f", of the original on {speed.threads_before}" if speed.threads_before != speed.threads else ""
    how = f": load it with threads={speed.threads}" if speed.threads != available_cpus() else ""
    if of_original or how:
        yield f"latency is on {speed.threads} thread{'s' * (speed.threads > 1)}{of_original}{how}"


def _noise_note(speed: Speed) -> Iterator[str]:
    noise = speed.noise.median
    if not 1 / NOISE_CEILING < noise < NOISE_CEILING:
        yield f"two copies of the original measured {noise:.2f} times apart: the machine was busy; measure again"


def _disturbance_note(speed: Speed) -> Iterator[str]:
    if speed.disturbed >= _MUCH:
        yield f"something slowed this machine in {100 * speed.disturbed:.0f} % of the rounds; latencies are of the others"


def write_made(bundle: Bundle, made: Made, report: QuantizeReport, target: str | Path, *, force: bool) -> QuantizeReport:
    """The report, with what the goldens say."""
    tolerance, far = _tolerance(made.bundle, report.scheme)
    # A task's metric is of the data that the network is for, and on the goldens themselves agreement says it all.
    if far > _FAR and report.metric == METRICS["tensors"].name and not report.metric_data.startswith(GOLDENS):
        note = (
            f"on the inputs of its goldens the answers are off by {100 * far:.0f} % of their size, and were judged on "
            f"{report.metric_data}: is that like what the network will be given?"
        )
        report = replace(report, notes=(*report.notes, note))
    step = {key: value for key, value in report.to_json().items() if key not in ("nodes", "kept", "refusals")}
    lineage = lineage_step("quantize", bundle, **step)
    final = replace(made.bundle.manifest, lineage=lineage, tolerance=tolerance)
    write_bundle(target, final, {name: made.bundle.root / name for name in final.files}, force=force)
    return report


def _fine_tuning_advice(bundle: Bundle, report: QuantizeReport) -> str:
    """What to try after a loss of quality, if the network comes from a run that was not trained for this scheme yet."""
    from .fake_quantization import AWARE  # needs torch, which nothing else here does

    sources = [step.get("source", {}) for step in bundle.manifest.lineage if step["step"] == "export"]
    if report.drop <= report.max_drop or report.scheme not in AWARE or not sources or sources[0].get("kind") != "run":
        return ""
    if sources[0]["recipe"]["training"].get("quantize") == report.scheme:
        return "Its run was fine-tuned for this scheme; more epochs may help (--set epochs=N). "
    command = f"edgekit train RUN --quantize {report.scheme} -o NEW"
    return f"Fine-tuning the run it was exported from may win that back: {command}; then export and quantize NEW. "


def refuse_bundle(bundle: Bundle) -> None:
    """Of what is already quantized, or hides its products in a loop."""
    if GENERATOR in bundle.manifest.graphs:
        raise QuantizationRefused(
            f"{bundle.root.name} is wrapped, and the decoder inside its loop would stay as it is; quantize the bundle it was "
            "made from, then wrap that"
        )
    if bundle.manifest.precision == "fp64":
        raise QuantizationRefused(f"{bundle.root.name} computes in float64, and quantize takes float32; export it in float32")
    if bundle.manifest.precision != "fp32":
        raise QuantizationRefused(
            f"{bundle.root.name} is already {bundle.manifest.precision}; quantize its fp32 parent instead"
        )


def _refuse_request(bundle: Bundle, scheme: str, calibration: Calibration | None) -> Scheme:
    if scheme not in SCHEMES:
        raise UnknownName.of("scheme", scheme, SCHEMES)
    refuse_bundle(bundle)
    found = scheme_for(scheme, bundle.manifest)
    if found.needs_calibration and calibration is None:
        raise OptionError(f"{scheme} needs samples to calibrate on; pass --data FILE")
    return found


@dataclass(frozen=True)
class Made:
    """A quantized bundle before it is judged."""

    bundle: Bundle
    nodes: tuple[NodeDecision, ...]
    notes: tuple[str, ...]


def built(
    bundle: Bundle,
    parts: tuple[Part, ...],
    calibration: Calibration | None,
    threads: int,
    folder: Path,
    for_size: bool,
    progress: Callable[[str], None] = lambda step: None,
    *,
    tried: bool = True,
) -> Made:
    """What the parts make of `bundle`, written into `folder`; refused if that is nothing, or, with `tried`, does not run."""
    converted = convert_parts(bundle, parts, calibration, progress)
    if for_size:
        converted = converted.without(MANY)
    scheme = parts[0].scheme if len(parts) == 1 else MIXED
    manifest, files = draft(bundle, converted, scheme, folder)
    candidate = write_bundle(folder / "candidate.bundle", manifest, files)
    refuse_unchanged(bundle, candidate, converted, scheme)
    if tried or MANY in converted.models:  # both forms are opened in this process below
        _refuse_unrunnable(candidate, scheme, threads)
    if MANY not in converted.models:
        return Made(candidate, converted.nodes, ())
    progress("measuring the form for many rows")
    rows = crossover(candidate, threads)
    if rows is None:
        manifest, files = draft(bundle, converted.without(MANY), scheme, folder)
        note = f"the decoder's form for many rows was left out: it is not faster at {ROWS[-1]} rows, or their number is fixed"
    else:
        manifest = replace(manifest, generation={**(manifest.generation or {}), "many_rows_from": rows})
        note = f"{MANY} is the faster form of the decoder from {rows} rows on"
    return Made(write_bundle(folder / "final.bundle", manifest, files), converted.nodes, (note,))


def judge(speed: Speed, metric: Metric, scores: tuple[float, float], size: int, budget: Budget) -> dict[str, Any]:
    """The drop, what was allowed, and the reasons to refuse: none if it may be kept."""
    drop = metric.drop(*scores)
    allowed = budget.allowed_drop(metric)
    refusals = []
    if not drop <= allowed:  # a NaN is not within any budget
        verb = "drops" if metric.higher_is_better else "grows"
        change = f"{verb} by {drop:.2f} points" if metric.unit == "%" else f"{verb} by {drop:.4g} %"
        refusals.append(f"{metric.name} {change}, more than the {allowed:g} that --max-drop allows")
    limit = min(max(NOISE_FLOOR, speed.noise.high or speed.noise.median), NOISE_CEILING)
    ratio = speed.ratio
    if (ratio.low or ratio.median) > limit and not budget.for_size:
        refusals.append(
            f"{ratio.median:.2f} times slower (95 % interval {ratio.low:.2f}–{ratio.high:.2f}; "
            f"this machine's noise reaches {limit:.2f})"
        )
    elif is_undecided(ratio) and not budget.for_size:
        refusals.append(
            f"{ratio.median:.2f} times slower as far as can be told (95 % interval {ratio.low:.2f}–{ratio.high:.2f}): "
            "something else kept the machine busy; measure again when it is quiet"
        )
    if budget.max_bytes is not None and size > budget.max_bytes:
        refusals.append(f"it has {size:,} bytes, more than the {budget.max_bytes:,} that --max-size allows")
    if budget.max_ratio is not None and ratio.median > budget.max_ratio:
        refusals.append(
            f"it takes {ratio.median:.2f} of the original's time, more than the {budget.max_ratio:g} that --max-latency allows"
        )
    if budget.max_us is not None and speed.after_us > budget.max_us:
        refusals.append(f"it takes {speed.after_us:.0f} µs, more than the {budget.max_us:.0f} that --max-latency allows")
    return {"drop": drop, "max_drop": allowed, "refusals": tuple(refusals)}


def _refuse_unrunnable(candidate: Bundle, scheme: str, threads: int) -> None:
    """Some conversions crash the process that loads them: try every graph in a process of its own."""
    for name in candidate.manifest.graphs:
        try:
            variant = bundle_variant(candidate.root, name=name, graph=name, threads=threads, past=past_of(candidate))
            bench([variant], batches=(), threads=threads, launches=1)
        except EdgekitError as error:
            raise QuantizationRefused(f"{scheme} gives a graph that onnxruntime cannot run: {error}") from error


def _tolerance(candidate: Bundle, scheme: str) -> tuple[dict[str, dict[str, Tolerance]], float]:
    """The goldens stay PyTorch's answers; a quantized graph may differ from them by twice what it differed when it was made.
    Beside that, the largest distance of an output from the goldens, as a share of its size."""
    squares: dict[tuple[str, str], Array] = {}  # of differences and of answers, over all goldens
    errors: dict[str, dict[str, float]] = {}
    graphs = candidate.manifest.graphs
    sessions = {name: Session(candidate.graph_path(name), graph.signature, device="cpu") for name, graph in graphs.items()}
    for entry, inputs, expected in candidate.goldens():
        session = sessions[entry.graph]
        actual = specified(session.signature.states, session.run(inputs))
        for name, reference in expected.items():
            known, error = errors.setdefault(entry.graph, {}), max_error(actual[name], reference)
            if actual[name].shape != reference.shape:
                shapes = f"{list(actual[name].shape)}, not {list(reference.shape)}"
                raise QuantizationRefused(f"{scheme} changes the shape of {name!r}: it is {shapes}")
            if not isfinite(error):
                raise QuantizationRefused(f"{scheme} answers with NaN or infinity in {name!r} where the original does not")
            known[name] = max(known.get(name, 0.0), error)
            found = squares.setdefault((entry.graph, name), np.zeros(2))
            found += _squares(actual[name], reference)
    derived = f"{_TOLERANCE_MARGIN:g} x the largest error of {scheme} against the goldens when it was made"
    return {
        graph: {
            name: Tolerance(max(_TOLERANCE_MARGIN * error, candidate.manifest.tolerance[graph][name].allowed), error, derived)
            for name, error in outputs.items()
        }
        for graph, outputs in errors.items()
    }, max((float(np.sqrt(off / size)) for off, size in squares.values() if size), default=0.0)


def _squares(actual: Array, reference: Array) -> Array:
    """‖actual - reference‖² and ‖reference‖², of what is finite; nothing of whole numbers."""
    finite = np.isfinite(reference) if reference.dtype.kind == "f" else np.zeros(reference.shape, bool)
    theirs = reference[finite].astype(np.float64)
    return np.array([np.sum((actual[finite] - theirs) ** 2), np.sum(theirs**2)])
