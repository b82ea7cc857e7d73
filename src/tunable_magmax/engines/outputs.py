"""The files of a merge: weights, report, configuration, card, the base's own files, and the log beside an output."""

from __future__ import annotations

import json
import platform
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
import yaml
from torch import Tensor

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.companions import (
    CARD,
    CONFIG,
    MODEL_CONFIG,
    REPORT,
    changed_companion,
    companion_files,
    prepares_inputs,
)
from tunable_magmax.checkpoints.hub import located
from tunable_magmax.checkpoints.safetensors_file import INDEX, Shard, index_json, plan_shards
from tunable_magmax.checkpoints.tensors import BITS, FLOATS, TensorInfo, torch_dtype
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.settings import AddedFiles, Additions
from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress, append_line, parse_json, read_whole, show_size
from tunable_magmax.merging.kernels import TensorRange
from tunable_magmax.merging.layout import Layout
from tunable_magmax.merging.merge import Merge
from tunable_magmax.merging.methods import names_file, place_of_method
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.walker import cast_copied
from tunable_magmax.version import __version__

COPY_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """A merge of opened inputs into an output."""

    inputs: Inputs
    options: Options
    output: Output
    shard_size: int | None
    """The largest size of a weight file; None if the output is one file."""
    memory: int
    """Bytes that each process may use."""
    progress: Progress | None = None
    names: tuple[str, ...] | None = None
    """What report, configuration and model card call the tasks."""
    additions: Additions | None = None


# -- room on the disk -------------------------------------------------------------------------------------------------


def check_space(out: Path, needed: int) -> None:
    """Raises an `InputError` if so many bytes do not fit beside `out`; its folder need not exist yet.

    >>> check_space(Path("merged"), 1 << 80)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    tunable_magmax.errors.InputError: ... would be written, but only ... are free at ...
    """
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    usage = shutil.disk_usage(folder)
    if usage.total and needed > usage.free:  # some network file systems say 0 of everything
        left = show_size(usage.free)
        raise InputError(f"{show_size(needed)} would be written, but only {left} are free at {folder}: make room there")


# -- weights ----------------------------------------------------------------------------------------------------------


def output_tensors(layout: Layout, merged: Mapping[str, str], out_dtype: str | None) -> list[TensorInfo]:
    """Returns the output's tensors, widest types first (so that all data is aligned); `merged` maps names to types."""
    infos = [
        TensorInfo(tensor.name, merged[tensor.name], tensor.shape)
        for tensor in layout.mergeable
        if tensor.name in merged
    ]
    kept = [TensorInfo(tensor.name, tensor.infos[0].dtype, tensor.shape) for tensor in layout.mergeable]
    for info in [*(info for info in kept if info.name not in merged), *layout.copied]:
        infos.append(TensorInfo(info.name, out_dtype, info.shape) if out_dtype and info.is_float else info)
    return sorted(infos, key=lambda info: (-BITS[info.dtype], info.name))


def expected_shards(layout: Layout, out_dtype: str | None, shard_size: int | None) -> tuple[Shard, ...]:
    """Plans the weight files from headers, as if all mergeable tensors changed; one file if there is no shard size."""
    merged = {tensor.name: out_dtype or tensor.widest for tensor in layout.mergeable}
    return plan_shards(output_tensors(layout, merged, out_dtype), shard_size, aliases=layout.ties)


Write = Callable[[Sequence[Shard]], Mapping[str, str]]
"""Writes shards and returns the sha256 of each by its name."""


def write_weights(merge: Merge, job: Job, write: Write | None = None) -> MergeReport:
    """Writes the weights of a decided merge; `write` writes its shards, by default here and one after the other."""
    output, mergeable = job.output, [merge.layout.mergeable[place.tensor] for place in merge.places]
    merged = {tensor.name: merge.out_dtype(tensor) for tensor in mergeable}
    tensors = output_tensors(merge.layout, merged, merge.options.out_dtype)
    shards = plan_shards(tensors, job.shard_size, aliases=merge.layout.ties)
    if write is not None:
        written = write(shards)
        files = {shard.name: written[shard.name] for shard in shards}
    else:
        files = {shard.name: output.write_shard(shard, shard_data(merge, job.inputs, shard)) for shard in shards}
    if len(shards) > 1:
        files[INDEX] = output.write_file(INDEX, index_json(shards))
    return replace(merge.report(), files=files)


def shard_data(merge: Merge, inputs: Inputs, shard: Shard) -> Iterator[memoryview]:
    """Yields a shard's data in order: merged tensors, and others from the base. A view lasts until the next.

    A fitted head takes the place of what was merged, so that the merge of everything else does not depend on it.
    """
    fitted = {} if inputs.heads is None or inputs.heads.fitted is None else inputs.heads.fitted.tensors
    by_name = {merge.layout.mergeable[s.tensor].name: s for s in merge.places}
    places = [by_name[info.name] for info in shard.tensors if info.name in by_name]
    buffers, base = _Buffers(merge.memory.chunk), inputs.base_by(merge.options)

    def into(bounds: TensorRange) -> Tensor:
        dtype = merge.torch_out_dtype(merge.layout.mergeable[bounds.place.tensor])
        return buffers.take(bounds.stop - bounds.start, dtype)

    rendered = merge.render(into, places)
    for info in shard.tensors:
        left = info.numel if info.name in by_name else 0
        while left:
            bounds, values = next(rendered)
            if info.name not in fitted:
                yield values.view(torch.uint8).numpy().data
            buffers.give(values)
            left -= bounds.stop - bounds.start
        if info.name in fitted:
            head = torch.from_numpy(fitted[info.name]).reshape(-1).to(torch_dtype(info.dtype))
            yield head.contiguous().view(torch.uint8).numpy().data
        elif info.name not in by_name:
            yield from _copied(base, info)


class _Buffers:
    """Output buffers that are used again once the writer has returned them."""

    def __init__(self, chunk: int) -> None:
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._bytes = chunk * 8

    def take(self, size: int, dtype: torch.dtype) -> Tensor:
        try:
            buffer = self._free.get_nowait()
        except Empty:
            buffer = torch.empty(self._bytes, dtype=torch.uint8)
        return buffer[: size * dtype.itemsize].view(dtype)

    def give(self, values: Tensor) -> None:
        self._free.put(values.view(torch.uint8).as_strided((self._bytes,), (1,)))


def _copied(base: Checkpoint, info: TensorInfo) -> Iterator[memoryview]:
    """Yields a tensor of the base block by block, cast if the output has another type."""
    stored = base.tensors[info.name if info.name in base.tensors else base.aliases[info.name]]
    source, target = torch_dtype(stored.dtype), torch_dtype(info.dtype)
    for start in range(0, stored.nbytes, COPY_BLOCK):
        raw = torch.empty(min(COPY_BLOCK, stored.nbytes - start), dtype=torch.uint8)
        base.read_into(stored.name, start, raw.numpy().data)
        if stored.dtype != info.dtype:
            assert source is not None
            assert target is not None
            raw = cast_copied(raw.view(source), target, info.name).view(torch.uint8)
        yield raw.numpy().data


# -- files beside the weights -----------------------------------------------------------------------------------------


def write_sidecars(
    report: MergeReport, inputs: Inputs, output: Output, additions: Additions | None = None
) -> MergeReport:
    """Writes the report, and in a directory also the base's own files, the configuration, additions and a card."""
    if output.out.name.endswith(".safetensors"):
        output.write_file("report.json", report.to_json().encode())
        return report
    digests = dict(report.files)
    types = _written_types(report, inputs)
    for name, path, config_content in output_companions(inputs) if report.reduced is None else ():
        changed = changed_companion(name, path, types[0] if types else None, config_content)
        if name == MODEL_CONFIG and len(types) > 1:
            mixed, loaded = ", ".join(FLOATS[dtype] for dtype in types), FLOATS[types[0]]
            text = f"the output has tensors of several types ({mixed}); loaded by its config.json, all are {loaded}"
            report = replace(report, warnings=(*report.warnings, text))
        digests[name] = output.write_file(name, path if changed is None else changed)
    config = effective_config(report)
    note = "# Models are named here, not located: the log beside this directory says where they were.\n"
    located = len(report.hub) == report.tasks + 1
    digests[CONFIG] = output.write_file(CONFIG, (("" if located else note) + config).encode())
    added = AddedFiles({}) if additions is None else additions.make(output.folder, report)
    digests |= {own: output.write_file(own, content) for own, content in sorted(added.files.items())}
    library = "peft" if report.reduced is not None else "transformers" if MODEL_CONFIG in digests else None
    digests[CARD] = output.write_file(CARD, (model_card(report, config, library) + added.card).encode())
    report = replace(report, files=digests)
    output.write_file(REPORT, report.to_json().encode())
    return report


def output_companions(inputs: Inputs) -> Iterator[tuple[str, Path, Mapping[str, Any] | None]]:
    """Yields the files that go along into an output, and what config.json is to hold if it is not the base's own.

    Tokenizer and image processor are the base's, or else those of the task that gives the architecture.
    """
    base, heads = inputs.paths[0], inputs.heads
    config = None if heads is None else heads.config
    own = list(companion_files(base))
    yield from ((name, path, config if name == MODEL_CONFIG else None) for name, path in own)
    if heads is not None and heads.giver is not None and not any(prepares_inputs(name) for name, _ in own):
        task = inputs.paths[1 + heads.giver]
        yield from ((name, path, None) for name, path in companion_files(task) if prepares_inputs(name))


def _written_types(report: MergeReport, inputs: Inputs) -> list[str]:
    """Returns the types of the output's floating-point tensors, the one with most elements first."""
    if report.options["out_dtype"] is not None:
        return [str(report.options["out_dtype"])]
    layout = inputs.layout
    elements: Counter[str] = Counter()
    for tensor in layout.mergeable:
        merged = report.tensors.get(tensor.name)
        elements[tensor.infos[0].dtype if merged is None else merged.dtype] += tensor.size
    elements.update({info.dtype: info.numel for info in layout.copied if info.is_float})
    return [dtype for dtype, _ in elements.most_common() if dtype in FLOATS]


# -- configuration and model card --------------------------------------------------------------------------------------


def effective_config(report: MergeReport) -> str:
    """Returns the merge as the YAML that `tmx merge config.yml` reads.

    Models are named, not located; those of the hub by the commit, so that a second merge reads the same bytes.
    """
    options = report.options
    named = ("method", "weights", "out_dtype")
    per_task = {"weight": options.get("weights")}
    names = [field.name for field in fields(Options) if field.name not in named]
    parameters = {name: options[name] for name in names if options.get(name) is not None}
    if isinstance(parameters.get("density"), (list, tuple)):
        per_task["density"] = parameters.pop("density")
    models = []
    for t in range(report.tasks):
        model: dict[str, Any] = {"model": report.hub.get(f"task {t + 1}", f"task-{t + 1}")}
        if report.names is not None:
            model["name"] = report.names[t]
        if own := {name: _number(values[t]) for name, values in per_task.items() if values is not None}:
            model["parameters"] = own
        models.append(model)
    config = {
        "merge_method": report.method,
        "base_model": report.hub.get("base", "base"),
        "models": models,
        "parameters": {name: list(value) if isinstance(value, tuple) else value for name, value in parameters.items()},
    }
    if options.get("out_dtype"):
        config["dtype"] = FLOATS[options["out_dtype"]]
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def _number(text: str) -> float | str:
    """Returns an option's text as a number, if that is exactly the same."""
    short = float(exact := Fraction(text))
    return short if Fraction(str(short)) == exact else text


def model_card(report: MergeReport, config: str, library: str | None) -> str:
    """Returns the model card; `library` is what loads the model."""
    reduction = f"It is {report.reduction}.\n\n" if report.reduction else ""
    return (
        f"---\n{_front_matter(report, library)}---\n"
        f"\n# A merge of {report.tasks} task checkpoints into {report.hub.get('base', 'base').partition('@')[0]}\n\n"
        f"Made with tunable-magmax, method `{report.method}`.\n\n"
        f"| task | gave |\n| --- | --- |\n{_rows(report)}\n"
        f"{reduction}"
        f"The configuration that was used (also in `{CONFIG}`; what came out of it is in `{REPORT}`):\n\n"
        f"```yaml\n{config}```\n"
    )


def _front_matter(report: MergeReport, library: str | None) -> str:
    """Returns the YAML by which the hub files a model."""
    front: dict[str, Any] = {}
    pins = sorted(report.hub.items(), key=lambda item: item[0] != "base")
    if on_hub := list(dict.fromkeys(pin.partition("@")[0] for _, pin in pins)):
        front = {"base_model": on_hub, "base_model_relation": "merge" if report.reduced is None else "adapter"}
    if library is not None:
        front["library_name"] = library
    front["tags"] = ["merge", "tunable-magmax"]
    return yaml.safe_dump(front, sort_keys=False, allow_unicode=True)


def _rows(report: MergeReport) -> str:
    """Returns a table row for each task, with what it gave."""
    rows = []
    for t, label in enumerate(report.labels()):
        adapter = report.adapters.get(f"task {t + 1}")
        if report.counts is not None:
            gave = f"{report.counts[t]:,} elements ({report.counts[t] / max(report.elements, 1):.1%})"
        else:
            gave = f"weight {(report.options['weights'] or ['1'] * report.tasks)[t]}"
        rows.append(f"| {card_cell(label if adapter is None else f'{label} ({adapter})')} | {gave} |\n")
    return "".join(rows)


def card_cell(text: str) -> str:
    """Escapes a text of a model card, so that it neither ends a table's cell nor starts markup."""
    return "".join(f"\\{letter}" if letter in "\\|<[*`" else letter for letter in text)


# -- the log beside an output, and outputs that are there --------------------------------------------------------------


def append_log(job: Job, started: float, report: MergeReport) -> None:
    """Appends time, host and paths of a merge to the log of its output, a JSON object a line.

    They are not in the output itself, because equal merges must give equal outputs. By the fingerprint of `Additions`,
    whoever made them recognises a finished output.
    """
    inputs, out = job.inputs, job.output.out
    entry = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 3),
        "host": socket.gethostname(),
        "versions": {"tunable-magmax": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "base": str(inputs.paths[0].resolve()),
        "tasks": [str(path.resolve()) for path in inputs.paths[1:]],
        "method": place_of_method(report.method),
        "out": str(out),
        "files": dict(report.files),
        "fingerprint": None if job.additions is None else job.additions.fingerprint,
    }
    # The weights are complete, so a full disk must not make it look as if they were not.
    with suppress(OSError):
        append_line(log_of(out), json.dumps(entry))


def log_of(out: Path) -> Path:
    """Returns where an output's log is: beside it."""
    place = out.resolve() if out.name in ("", "..") else out
    return place.with_name(f"{place.name}.log")


def log_entries(out: Path) -> Iterator[dict[str, Any]]:
    """Yields the entries of the log beside an output, the newest first; a line cut short by a kill is left out."""
    try:
        lines = log_of(out).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in reversed(lines):
        with suppress(ValueError):
            entry = parse_json(line, odd_names=True)
            if isinstance(entry, dict):
                yield entry


def report_place(out: Path) -> Path:
    """Returns where a merge's report is: in the directory, or beside a single file."""
    return out / REPORT if out.is_dir() else out.with_name(f"{out.name.removesuffix('.safetensors')}.report.json")


def read_report(path: str | Path) -> MergeReport:
    """Reads the report of a merged checkpoint; a missing or broken one is an `InputError`."""
    path = Path(path)
    place = report_place(path)
    if not path.exists() and not place.exists():
        raise InputError(f"{path} does not exist: give a merged checkpoint, a directory or a .safetensors file")
    try:
        return MergeReport.from_json(read_whole(place).decode())
    except FileNotFoundError:
        raise InputError(f"{path} has no merge report: {place} does not exist, so this is not a merge of tmx") from None
    except (OSError, ValueError, InputError) as error:
        raise InputError(f"{place}: {error}") from None


def option_for_method(out: Path) -> list[str]:
    """Returns the option by which a user has a method in a file run again; its folder is known from the log.

    Empty for methods that need no file.
    """
    report = read_report(out := located(out))
    if not names_file(report.method):
        return []
    own = f"/{report.method}"
    places = [str(entry.get("method")) for entry in log_entries(out) if entry.get("files") == dict(report.files)]
    known = (place for place in places if place.endswith(own) and Path(place.rpartition(":")[0]).is_file())
    return ["--method", next(known, f"FOLDER{own}")]


def finished_report(out: Path, fingerprint: Mapping[str, Any]) -> MergeReport | None:
    """Returns the report of an output that was made by this fingerprint, as its log says, and that has all its files.

    None: there is no such output.
    """
    try:
        report = read_report(out)
    except InputError:
        return None
    if not all(place.is_file() for place in ([out] if out.is_file() else [out / name for name in report.files])):
        return None
    made = next((entry for entry in log_entries(out) if entry.get("files") == dict(report.files)), {})
    return report if made.get("fingerprint") == json.loads(json.dumps(fingerprint)) else None
