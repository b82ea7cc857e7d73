"""`Studio`: one run on the page: its models in memory, the samples, what was measured, and what is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tunable_magmax.data.source import SampleSource
from tunable_magmax.errors import InputError, TmxError, collected_warnings
from tunable_magmax.evaluation.choosing import default_scale
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.models.encoder import usable_device
from tunable_magmax.preference.preference import Preference, read_preference
from tunable_magmax.preference.site import Site
from tunable_magmax.runs.run import Run
from tunable_magmax.studio.guard import Refused
from tunable_magmax.studio.options import StudioOptions
from tunable_magmax.studio.points import MOST_SCALE, OFFERED, PointRequest, Preset, Setting, setting_of, usual_presets
from tunable_magmax.studio.samples import FILES, SUFFIXES, SiteSamples, Uploads, estimate_site
from tunable_magmax.studio.scores import DataSet, Point, Scores
from tunable_magmax.studio.worker import Events, Worker
from tunable_magmax.studio.writing import SAMPLES, Writer, checked_name
from tunable_magmax.workflows.evaluate import find_head, open_labelled
from tunable_magmax.workflows.options import Reading, SiteSources
from tunable_magmax.workflows.tailor import why_not_tsv


@dataclass
class Studio:
    """A run on the page. `start` begins to read the models; everything else may be called at any time."""

    run: Run
    options: StudioOptions = StudioOptions()  # noqa: RUF009  (frozen)

    def __post_init__(self) -> None:
        place = self.run.path.resolve()
        self.out = self.options.out or place.with_name(f"{place.name}-studio")
        if self.out.exists() and not self.out.is_dir():
            raise InputError(f"{self.out} is a file: give a folder with -o")
        self.given = self.options.labelled or self.options.inputs
        """Samples of the site that are still to be estimated at the start."""
        self._refuse_options()
        self.events = Events()
        self.worker = Worker(self.events)
        self.uploads = Uploads(self.out / SAMPLES)
        self.data: dict[str, DataSet] = {}
        self.site: SiteSamples | None = None
        self.presets = {preset.id: preset for preset in usual_presets(self.run)}
        self.warnings: list[str] = []
        self.writer = Writer(self.run, self.out, self.events)
        self.lines = {"done": 0, "total": 0}
        self.no_tsv = why_not_tsv(self.run)
        self._points: dict[str, tuple[Point, DataSet]] = {}
        self._scores: Scores | None = None
        if self.options.preference is not None:
            file = self.options.preference
            found = read_preference(file, self.run.names, len(self.run.tasks))
            self._add_preset(Preset("given", file.name, found, file))

    # -- opening -----------------------------------------------------------------------------------------------------

    def _refuse_options(self) -> None:
        """Raises what is wrong with the files and the device that were given, before a page opens."""
        options = self.options
        usable_device(options.device)
        if self.given is not None:
            Reading().open(self.given, labelled=options.labelled is not None)
        if options.data is not None:
            open_labelled(options.data, find_head(self.run.base, None, self.run).head, self.run, Reading())

    def start(self) -> None:
        """Begins to read the run's models and samples, in the background."""
        self.worker.later({"what": "opening"}, self.opening())
        self.worker.start()

    def close(self) -> None:
        """Calls all work off and frees the models; unfinished output is removed."""
        self.events.close()
        self.writer.stop()
        self.worker.stop()
        if self._scores is not None:
            self._scores.bench.close()

    def opening(self) -> Iterator[None]:
        """Reads the run's models and samples, step by step."""
        try:
            yield from self._open_samples()
        finally:
            self.given = None
        yield from self._open_lines()

    def _open_samples(self) -> Iterator[None]:
        options, progress = self.options, self._progress("opening")
        self._scores = Scores(self.run, options.device, progress)
        yield
        if options.data is not None:
            self._open_data("given", options.data)
            yield
        if self.run.record.benchmark is not None:
            try:
                self._open_data("heldout", None)
            except TmxError as error:  # its data may be elsewhere
                self.warnings.append(f"the run's test data cannot be opened: {error}")
            yield
        kept = None if self.data else self.scores.open_kept_data()
        if kept is not None:
            self.data[kept.name] = kept
        self.events.publish("state", {})
        yield
        if self.given is not None:
            self._take_site(self.given, None, options.labelled is not None)

    def _open_data(self, name: str, place: Path | None) -> None:
        with collected_warnings() as texts:
            self.data[name] = self.scores.open_data(name, place, mixed=place is not None, limit=self.options.samples)
        self.warnings += texts()

    def _open_lines(self) -> Iterator[None]:
        """Measures what points are compared with, on all data that lack it, a model at each step."""
        lacking = [data for data in self.data.values() if not self.scores.has_lines(data)]
        self.lines = {"done": 0, "total": len(lacking) * (len(self.run.tasks) + 2)}
        for data in lacking:
            for _ in self.scores.open_lines(data):
                self.lines["done"] += 1
                self.events.publish("progress", {"what": "lines", "phase": "measuring", **self.lines})
                yield
        self.events.publish("lines", {})

    @property
    def scores(self) -> Scores:
        """The models in memory; refused until they are read."""
        if self._scores is None:
            raise Refused(409, "the run's checkpoints are still being read: wait a moment")
        return self._scores

    def _progress(self, what: str) -> Callable[[str, int, int], None]:
        def progress(phase: str, done: int, total: int) -> None:
            self.worker.check(phase)
            self.events.publish("progress", {"what": what, "phase": phase, "done": done, "total": total})

        return progress

    def _add_preset(self, preset: Preset) -> None:
        """Adds a preset after equal weights; one of the same id is replaced."""
        known = {**self.presets, preset.id: preset}
        order = ["equal", "given", "samples", *known]
        self.presets = {name: known[name] for name in order if name in known}

    # -- the state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns everything that the page shows first."""
        run, informed = self.run, self.run.label_tables is not None
        dropped = self.site is not None and self.site.upload is not None
        order = ["samples", "given", "equal"] if dropped else ["given", "samples", "equal"]
        first = next(name for name in order if name in self.presets)
        start, ready = self.setting(PointRequest(preset=first)), self._scores is not None
        matched = replace(start, method="tunable_magmax", scale="matched")
        return {
            "run": {
                "name": run.path.resolve().name,
                "path": str(run.path),
                "tasks": run.names,
                "classes": [run.classes[label] for label in run.names] if run.classes else None,
                "elements": self.scores.bench.models.elements if ready else None,
            },
            "ready": ready,
            "methods": [
                {
                    "name": name,
                    "weights": METHODS[name].weights,
                    "default_scale": default_scale(name, informed),
                    "why_not": self.no_tsv if name == "tsv" else None,
                }
                for name in OFFERED
            ],
            "scale": {"matched": self.scores.scale(matched) if ready else None, "most": MOST_SCALE},
            "data": [self._describe(data) for data in self.data.values()],
            "presets": [preset.to_dict() for preset in self.presets.values()],
            "start": {
                "weights": start.preference.weights,
                "scale": start.scale,
                "method": start.method,
                "preset": first,
                "data": next(iter(self.data), None),
            },
            "lines": {"ready": bool(self.data) and all(map(self.scores.has_lines, self.data.values())), **self.lines},
            "reading": self.given is not None,
            "samples": None if self.site is None else self.site.to_dict(),
            "models": [model.to_dict() for model in self.writer.models.values()],
            "limits": {"files": FILES, "suffixes": sorted(SUFFIXES)},
            "warnings": list(dict.fromkeys(self.warnings)),
        }

    def _describe(self, data: DataSet) -> dict[str, Any]:
        owner = data.tasks
        tasks = None if owner is None else [int((owner == t).sum()) for t in range(len(self.run.tasks))]
        about = {"id": data.name, "title": data.title, "mixed": data.mixed}
        return {**about, "samples": len(data), "of": data.total, "tasks": tasks}

    # -- points ------------------------------------------------------------------------------------------------------

    def setting(self, request: PointRequest) -> Setting:
        """Returns the model that a request means."""
        return setting_of(request, self.run, self.presets, self.no_tsv)

    def _data_of(self, request: PointRequest) -> DataSet:
        if not self.data:
            raise Refused(409, "there is nothing to measure on: give labelled samples with --data, or on the page")
        name = next(iter(self.data)) if request.data is None else request.data
        if name not in self.data:
            raise InputError(f"there are no data {name!r}: there are {', '.join(self.data)}")
        return self.data[name]

    def measure(self, request: PointRequest) -> int:
        """Asks for a measurement; returns the number of the request, which its event has."""
        self.scores  # noqa: B018  (refused until it is there)
        self.setting(request)
        self._data_of(request)
        return self.worker.request(lambda: self.measure_now(request))

    def measure_now(self, request: PointRequest) -> dict[str, Any]:
        """Measures a point, and compares it with the lines."""
        setting, data = self.setting(request), self._data_of(request)
        mix = Preference.from_weights(setting.preference.weights if request.mix is None else request.mix).weights
        point = self.scores.point(setting, data, mix)
        self._points[point.id] = point, data
        return asdict(point)

    def points(self) -> list[dict[str, Any]]:
        """Returns all points that were measured in this session on data that are still open, oldest first."""
        return [asdict(point) for point, data in self._points.values() if self.data.get(data.name) is data]

    def command(self, name: str, setting: Setting) -> str:
        """Returns the command that makes the model of a point, as OUT/name."""
        return setting.command(self.run.path, self.out / checked_name(name))

    # -- samples -----------------------------------------------------------------------------------------------------

    def estimate(self, upload: str, use_labels: bool) -> None:
        """Begins to estimate weights from uploaded samples; the result is an event."""
        source = self.uploads.get(upload).samples(set(self.scores.head.classes))

        def steps() -> Iterator[None]:
            self._take_site(source, upload, use_labels)
            yield from self._open_lines()

        self.worker.later({"upload": upload}, steps())

    def _take_site(self, source: SampleSource, upload: str | None, use_labels: bool) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        reading, progress = Reading(device=self.options.device), self._progress("samples")
        known = Site(self.run, SiteSources(inputs=source), reading, 0, progress)
        with collected_warnings() as texts:
            site = estimate_site(known, self.scores.head.classes, use_labels, self.out / "site-samples.json")
            self._forget_site()
            if site.labelled:
                self.data["site"] = self.scores.open_data("site", source, mixed=True, limit=self.options.samples)
        self._add_preset(site.preset)
        before, self.site = self.site, replace(site, upload=upload, warnings=texts())
        if before is not None and before.upload is not None and before.upload != upload:
            with suppress(Refused):  # the page may have removed them in the meantime
                self.uploads.remove(before.upload)
        self.events.publish("samples", self.site.to_dict())

    def remove_upload(self, upload: str) -> None:
        """Removes uploaded samples, and what was made of them but for the preferences."""
        self.uploads.remove(upload)
        if self.site is not None and self.site.upload == upload:
            self.site = None
            self._forget_site()
            self.events.publish("state", {})

    def _forget_site(self) -> None:
        data = self.data.pop("site", None)
        if data is not None:
            self.scores.bench.forget(data.samples.name)

    def samples(self, start: int, count: int, show: str) -> dict[str, Any]:
        """Returns some of the site's samples."""
        if self.site is None:
            return {"total": 0, "start": start, "shown": 0, "samples": []}
        return self.site.shown(start, count, show, len(self.run.tasks))
