"""`Studio`: one run on the page: its models in memory, the samples, what was measured, and what is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError, TmxError, collected_warnings
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import Run
from tunable_magmax.studio.desk import Desk, Events
from tunable_magmax.studio.guard import Refused
from tunable_magmax.studio.lines import (
    compared,
    line_models,
    measure_lines,
    mix_record,
    sentence,
    share_record,
)
from tunable_magmax.studio.measuring import DataSet, Measurement, Measuring, Setting
from tunable_magmax.studio.options import StudioOptions
from tunable_magmax.studio.points import PointRequest, Preset, setting_of, tailor_command, usual_presets
from tunable_magmax.studio.site import SiteSamples, estimate_site, listed, preset_from_labels, site_predictions
from tunable_magmax.studio.uploads import Uploads
from tunable_magmax.studio.writing import RESERVED, Writer, checked_name
from tunable_magmax.workflows.merge import read_preference
from tunable_magmax.workflows.prefer import completed
from tunable_magmax.workflows.tailor import why_not_tsv

SAMPLES_FOLDER = "samples"


@dataclass
class Studio:
    """A run on the page. `start` begins to read the models; everything else may be called at any time."""

    run: Run
    out: Path
    options: StudioOptions = field(default_factory=StudioOptions)

    def __post_init__(self) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise InputError(f"{self.out} is a file: give a folder with -o")
        self.events = Events()
        self.desk = Desk(self.events)
        self.uploads = Uploads(self.out / SAMPLES_FOLDER)
        self.measured: dict[str, tuple[Measurement, dict[str, Any]]] = {}
        self.data: dict[str, DataSet] = {}
        self.site: SiteSamples | None = None
        self.presets = {preset.id: preset for preset in usual_presets(self.run)}
        self.warnings: list[str] = []
        self.writer = Writer(self.run, self.out, self.options.seed, self.events)
        self._measuring: Measuring | None = None
        self._last: Setting | None = None
        self.lines = {"done": 0, "total": 0}
        self.reading = self._given_samples()
        self.no_tsv = why_not_tsv(self.run)
        if self.options.preference is not None:
            file = self.options.preference
            found = read_preference(file, Recipe(self.run.base, self.run.tasks, names=self.run.names), self._warn)
            if len(found.weights) != len(self.run.tasks):
                raise InputError(f"{file} has {len(found.weights)} weights, and the run {len(self.run.tasks)} tasks")
            self._add_presets([Preset("given", file.name, found, file)])

    # -- opening -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to read the run's models and samples, in the background."""
        self.desk.later({"what": "opening"}, self._open())
        self.desk.start()

    def close(self) -> None:
        """Calls all work off and frees the models; unfinished output is removed."""
        self.events.close()
        self.writer.stop()
        self.desk.stop()
        if self._measuring is not None:
            self._measuring.close()

    def open_all(self) -> None:
        """Reads everything at once, and measures what points are compared with."""
        for _ in self._open():
            pass

    def _given_samples(self) -> dict[str, int]:
        """Returns the presets that the samples given at the start will make, with their number of samples."""
        options = self.options
        place = options.labelled or options.inputs
        if place is None:
            return {}
        names = ("inputs",) if options.labelled is None else ("labels", "inputs")
        return dict.fromkeys(names, len(open_samples(place)))

    def _open(self) -> Iterator[None]:
        try:
            yield from self._open_given()
        finally:
            self.reading = {}
        yield from self._open_lines()

    def _open_given(self) -> Iterator[None]:
        options = self.options
        self._measuring = Measuring(
            self.run, seed=options.seed, device=options.device, progress=self._progress("opening")
        )
        yield
        known: list[tuple[str, Path | None]] = [("given", options.data)] if options.data is not None else []
        known += [("heldout", None)] if self.run.benchmark is not None else []
        for name, data in known:
            try:
                with self._noted():
                    self.data[name] = self.measuring.open_data(
                        name, data, mixed=data is not None, limit=options.samples
                    )
            except TmxError as error:
                if data is not None:
                    raise
                self._warn(f"the run's test data cannot be opened: {error}")  # its data may be elsewhere
            self.events.publish("state", {})
            yield
        kept = None if self.data else self.measuring.open_kept_data()
        if kept is not None:
            self.data[kept.name] = kept
            self.events.publish("state", {})
            yield
        if options.labels is not None:
            with self._noted():
                preset, texts = preset_from_labels(self.run, options.labels, self.out)
            self.warnings += texts
            self._add_presets([preset])
        place = options.labelled or options.inputs
        if place is not None:
            yield
            self._take_site(place, None, options.labelled is not None)

    def _open_lines(self) -> Iterator[None]:
        """Measures what points are compared with, on all data that lack it, a model at each step."""
        lacking = [data for data in self.data.values() if not self.has_lines(data)]
        self.lines = {"done": 0, "total": len(lacking) * len(line_models(self.measuring))}
        for data in lacking:
            for _ in measure_lines(self.measuring, data):
                self.lines["done"] += 1
                self.events.publish("progress", {"what": "lines", "phase": "measuring", **self.lines})
                yield
        self.events.publish("lines", {})

    def has_lines(self, data: DataSet) -> bool:
        """Whether all that points are compared with was measured on some data."""
        return all(self.measuring.knows(model, data) for model in line_models(self.measuring))

    @property
    def ready(self) -> bool:
        """Whether the models are read."""
        return self._measuring is not None

    @property
    def measuring(self) -> Measuring:
        """The models in memory; refused until they are read."""
        if self._measuring is None:
            raise Refused(409, "the run's checkpoints are still being read: wait a moment")
        return self._measuring

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Collects warnings for the page."""
        with collected_warnings() as texts:
            yield
        self.warnings += texts()

    def _warn(self, text: str) -> None:
        self.warnings.append(text)

    def _progress(self, what: str) -> Callable[[str, int, int], None]:
        def progress(phase: str, done: int, total: int) -> None:
            self.desk.check()
            self.events.publish("progress", {"what": what, "phase": phase, "done": done, "total": total})

        return progress

    def _add_presets(self, presets: Sequence[Preset]) -> None:
        """Adds presets after equal weights; those of the same ids are replaced."""
        order = ("equal", "given", "labels", "inputs")
        known = {**self.presets, **{preset.id: preset for preset in presets}}
        first = {name: known[name] for name in order if name in known}
        self.presets = {**first, **{name: preset for name, preset in known.items() if name not in first}}

    # -- points ------------------------------------------------------------------------------------------------------

    def setting(self, request: PointRequest) -> tuple[Setting, Preset | None]:
        """Returns the model that a request means, and its preset."""
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
        self.measuring  # noqa: B018  (refused until it is there)
        self.setting(request)
        self._data_of(request)
        return self.desk.request(lambda check: self.measure_now(request, check))

    def measure_now(self, request: PointRequest, check: Callable[[], None] | None = None) -> dict[str, Any]:
        """Measures a point, or finds what was measured before, and compares it with the lines."""
        setting, preset = self.setting(request)
        data, measuring = self._data_of(request), self.measuring
        identity = measuring.identify(setting, data)
        known = self.measured.get(identity)
        found = known[0] if known is not None else measuring.measure(setting, data, check, identity)
        self._last = setting
        point = self._point(setting, preset, found, data, request.mix)
        self.measured[identity] = found, point
        return point

    def _point(
        self, setting: Setting, preset: Preset | None, found: Measurement, data: DataSet, mix: Sequence[float] | None
    ) -> dict[str, Any]:
        wanted = Preference.from_weights(setting.preference.weights if mix is None else mix).weights
        shares = found.tasks(data, len(self.run.tasks))
        lines = compared(self.measuring, setting, found, data, wanted)
        return {
            "id": found.id,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "weights": list(setting.preference.weights),
            "scale": setting.scale,
            "scale_used": found.scale,
            "prior": setting.prior,
            "method": setting.method,
            "head": found.head,
            "preset": None if preset is None else preset.id,
            "data": data.name,
            "tasks": None if shares is None else [share_record(share) for share in shares],
            "overall": share_record(found.overall),
            "mix": {"weights": list(wanted), **mix_record(found.mixed(data, wanted))},
            "lines": [line.to_dict() for line in lines],
            "sentence": sentence(lines),
            "seconds": dict(found.seconds),
        }

    def points(self) -> list[dict[str, Any]]:
        """Returns all points that were measured in this session on data that are still open, oldest first."""
        return [point for _, point in self.measured.values() if point["data"] in self.data]

    def command(self, request: PointRequest, name: Any = "site-model") -> str:
        """Returns the command that makes the model of a point, as OUT/name."""
        setting, preset = self.setting(request)
        return tailor_command(
            setting, preset, self.run.path, self.out / checked_name(name, RESERVED), self.options.seed
        )

    # -- samples -----------------------------------------------------------------------------------------------------

    def estimate(self, upload: str, use_labels: bool) -> None:
        """Begins to estimate weights from uploaded samples; the result is an event."""
        held = self.uploads.get(upload)
        place, _ = held.arrange(set(self.measuring.head.classes))

        def steps() -> Iterator[None]:
            self._take_site(place, upload, use_labels)
            yield from self._open_lines()

        self.desk.later({"upload": upload}, steps())

    def _take_site(self, place: Path, upload: str | None, use_labels: bool) -> None:
        with self._noted():
            self.out.mkdir(parents=True, exist_ok=True)
            site = estimate_site(
                self.measuring, place, use_labels, self.out, self._progress("samples"), self.options.device
            )
            self._forget_site()
            if site.labelled:
                with collected_warnings():  # told with the samples
                    data = self.measuring.open_data("site", place, mixed=True, limit=self.options.samples)
                self.data["site"] = data
        for name in ("labels", "inputs"):
            if name in self.presets and upload is not None:
                del self.presets[name]
        self._add_presets(list(site.presets.values()))
        self.site = replace(site, upload=upload)
        self.events.publish("samples", self.site.to_dict())

    def remove_upload(self, upload: str) -> None:
        """Removes uploaded samples, and what was made of them but for the preferences."""
        self.uploads.remove(upload)
        if self.site is not None and self.site.upload == upload:
            self.site = None
            self._forget_site()
            self.events.publish("state", {})

    def _forget_site(self) -> None:
        """Forgets the samples of the page as data, and the points that were measured on them."""
        self.data.pop("site", None)
        self.measuring.forget("site")
        self.measured = {name: held for name, held in self.measured.items() if held[1]["data"] != "site"}

    def samples(self, start: int, count: int, show: str) -> dict[str, Any]:
        """Returns some of the site's samples."""
        site = self.site
        if site is None:
            return {"total": 0, "start": start, "shown": 0, "samples": []}

        def predict() -> tuple[Sequence[int], list[str], list[str]] | None:
            data, equal = self.data.get("site"), self.presets["equal"].preference
            if data is None:
                return None
            setting = self._last or Setting(completed(equal, self.run), 1.0)
            return site_predictions(self.measuring, setting, data)

        return listed(site, start, count, show, predict, len(self.run.tasks))
