"""What becomes of the heads of merged models of transformers: a bare base, tasks with classifiers of their own.

A classifier whose labels differ between tasks gets a row for each label, of the task that has it; layers that only the
tasks have are means by weight. The base has no such tensors, so there is no step to merge. docs/merge.md has the rules.
Names are matched as transformers does it: a model with a head keeps the bare model under a prefix.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from tunable_magmax.checkpoints.checkpoint import Checkpoint, Opened, View, read_tensor
from tunable_magmax.checkpoints.companions import ModelConfig, are_generic, same_classes
from tunable_magmax.checkpoints.tensors import TensorInfo, torch_dtype, widest
from tunable_magmax.errors import InputError, plural, some_of

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

MERGED, STACKED, OF_BASE = "merge", "stack", "base"
"""What becomes of heads: merged like any tensor, stacked, or only the base has one, which stays."""
_OLD = re.compile(r"LayerNorm\.(gamma|beta)$")
_USUAL = re.compile(r"(^|\.)(\w*classifier|out_proj|score|logits_proj|head|fc)\.weight$")
_UNUSED = ("mask_token",)
"""Parameters that only pre-training needs, inside modules that classifiers have too."""


@dataclass(frozen=True, eq=False)
class FittedTensors:
    """Tensors of a head that was fitted to the merged encoder, by name: they take the place of those of the tasks."""

    tensors: Mapping[str, NDArray[Any]]

    @property
    def digest(self) -> str:
        """A SHA-256 of names, shapes and values."""
        digest = sha256()
        for name in sorted(self.tensors):
            values = self.tensors[name]
            digest.update(f"{name} {values.shape} {values.dtype}\n".encode())
            digest.update(values.tobytes())
        return f"sha256:{digest.hexdigest()}"

    def __str__(self) -> str:
        return self.digest


@dataclass(frozen=True, eq=False)
class Heads:
    """How the models of a merge fit together, and what becomes of their heads.

    `views` are base (without tensors that are made) and tasks under the output's names; `copied` are names that are not
    merged, but read from the base. Of these, `classifier` (a row for each of `labels`) and `mean` are made of `values`,
    those of the tasks.
    """

    rule: str
    views: tuple[View, ...]
    copied: tuple[str, ...]
    left_out: tuple[str, ...]
    labels: tuple[str, ...] | None
    classifier: tuple[str, ...] = ()
    mean: tuple[str, ...] = ()
    infos: Mapping[str, TensorInfo] | None = None
    """The tensors that are made."""
    values: tuple[Mapping[str, Tensor], ...] = ()
    task_labels: tuple[tuple[str, ...] | None, ...] = ()
    """What the labels of each task's own classifier are called in this one; None: it has none."""
    config: Mapping[str, Any] | None = None
    """The output's config.json; None: the base's."""
    giver: int | None = None
    """The task, from 0, whose files come with those of the base if the base lacks them; None: no task's."""
    fitted: FittedTensors | None = None
    notes: tuple[str, ...] = ()

    @property
    def made(self) -> tuple[str, ...]:
        """All tensors that are made or written over rather than merged or copied."""
        return tuple(dict.fromkeys((*(self.infos or ()), *(self.fitted.tensors if self.fitted else ()))))

    def state(self, weights: Sequence[float]) -> dict[str, Tensor]:
        """Returns all made tensors by name, from those of the tasks by their weights."""
        import torch

        fitted = {} if self.fitted is None else self.fitted.tensors
        state = {}
        for name, info in (self.infos or {}).items():
            dtype = torch_dtype(info.dtype)
            assert dtype is not None
            having = [t for t, held in enumerate(self.values) if name in held]
            holders = [(self.values[t][name], weights[t], self.task_labels[t]) for t in having]
            if name in fitted:
                state[name] = torch.from_numpy(fitted[name]).to(dtype)
            elif name not in self.classifier:
                state[name] = _weighted([(tensor, weight) for tensor, weight, _ in holders], dtype)
            else:  # a row for each label: of the task that has it, or the mean of several tasks' by weight
                rows: dict[str, list[tuple[Tensor, float]]] = {label: [] for label in self.labels or ()}
                for tensor, weight, labels in holders:
                    for label, row in zip(labels or (), tensor, strict=True):
                        rows[label].append((row, weight))
                state[name] = torch.stack([_weighted(each, dtype) for each in rows.values()])
        return state

    def base(self, weights: Sequence[float]) -> View:
        """Returns the base, with heads that are made by these weights."""
        return self.views[0].with_made(self.state(weights))

    def describe(self) -> dict[str, Any]:
        """Returns what a report says of heads."""
        fitted = self.fitted and {"tensors": list(self.fitted.tensors), "digest": self.fitted.digest}
        return {
            "rule": self.rule,
            "labels": None if self.labels is None else list(self.labels),
            "classifier": list(self.classifier),
            "mean": list(self.mean),
            "left_out": list(self.left_out),
            "fitted": fitted,
        }


def _weighted(tensors: Sequence[tuple[Tensor, float]], dtype: torch.dtype) -> Tensor:
    """Returns the mean by weight, computed in float64; by equal weights where all are 0."""
    total = sum(weight for _, weight in tensors)
    shares = [(tensor, weight / total if total > 0 else 1 / len(tensors)) for tensor, weight in tensors]
    used = [(tensor, share) for tensor, share in shares if share > 0]
    if len(used) == 1:
        return used[0][0].to(dtype)
    first, *others = (tensor.double() * share for tensor, share in used)
    for other in others:
        first += other
    return first.to(dtype)


# -- matching ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Model:
    """A checkpoint with its configuration; `names` are its own names by those that all models have in common."""

    opened: Checkpoint
    config: ModelConfig
    names: Mapping[str, str]

    def info(self, name: str) -> TensorInfo:
        own = self.names[name]
        return self.opened.tensors[self.opened.aliases.get(own, own)]


def match_heads(opened: Sequence[Opened], fitted: FittedTensors | None = None) -> Heads | None:
    """Returns how base (first) and tasks fit together in spite of their heads; None if they have to be equal.

    That is so for checkpoints without a config.json or of different architectures, for adapters, and where names and
    shapes are equal already. `fitted`: tensors that take the place of the tasks' own.
    """
    models = _models(opened)
    if models is None:
        if fitted is not None:
            raise InputError(
                "heads are fitted to models of transformers: give directories with config.json, no adapters"
            )
        return None
    prefix, base, tasks = models[0], models[1][0], models[1][1:]
    if not _differ_in_heads_only(prefix, base, tasks):
        return None
    heads = [_head_names(task, base, prefix) if task.config.is_headed else () for task in tasks]
    if not any(heads):
        return _with_head_of_base(prefix, base, tasks)
    labels = [task.config.labels if head else None for task, head in zip(tasks, heads, strict=True)]
    rule = _rule(base, tasks, heads)
    if rule == MERGED and fitted is None and _need_no_matching(base, tasks, labels[0]):
        return None
    return _with_heads(rule, prefix, base, tasks, heads, _distinct(labels, tasks), fitted)


# -- names ------------------------------------------------------------------------------------------------------------


def _models(opened: Sequence[Opened]) -> tuple[str, list[_Model]] | None:
    """Returns the prefix of the bare model, and all models under the names of one with a head."""
    checkpoints = [each for each in opened if isinstance(each, Checkpoint)]
    configs = [config for each in checkpoints if (config := ModelConfig.of(each.path)) is not None]
    headed = next((k for k in (*range(1, len(configs)), 0) if k < len(configs) and configs[k].is_headed), None)
    if len(configs) < len(opened) or headed is None:
        return None
    if len({config.model_type for config in configs}) > 1 or configs[0].model_type is None:
        return None
    reference = {_modern(name) for name in (*checkpoints[headed].tensors, *checkpoints[headed].aliases)}
    prefix, count = Counter(name.split(".")[0] for name in reference).most_common(1)[0]
    if 2 * count < len(reference):
        return None
    models = []
    for checkpoint, config in zip(checkpoints, configs, strict=True):
        own = {_modern(name): name for name in (*checkpoint.tensors, *checkpoint.aliases)}
        bare = sum(f"{prefix}.{name}" in reference for name in own) > sum(name in reference for name in own)
        models.append(_Model(checkpoint, config, {f"{prefix}." * bare + name: stored for name, stored in own.items()}))
    return f"{prefix}.", models


def _modern(name: str) -> str:
    """Returns today's name of a tensor of old BERT checkpoints."""
    return _OLD.sub(lambda old: f"LayerNorm.{'weight' if old[1] == 'gamma' else 'bias'}", name)


def _differ_in_heads_only(prefix: str, base: _Model, tasks: Sequence[_Model]) -> bool:
    """Whether models differ in whole modules only: heads and poolers; a layer of the bare model may not be missing."""
    everyone = [base, *tasks]
    names = {name for model in everyone for name in model.names if name.startswith(prefix)}
    shared = {name for name in names if all(name in model.names for model in everyone)}
    modules = {name.removeprefix(prefix).split(".")[0] for name in shared}
    return bool(shared) and not any(
        name.removeprefix(prefix).split(".")[0] in modules and not name.endswith(_UNUSED)
        for name in names - shared
        if any(name in model.names and model.info(name).is_float for model in everyone)
    )


def _head_names(task: _Model, base: _Model, prefix: str) -> tuple[str, ...]:
    """Returns the tensors of a task's head: outside of the bare model, or inside it where the base has none."""
    return tuple(
        name
        for name in task.names
        if task.info(name).is_float and (not name.startswith(prefix) or name not in base.names)
    )


# -- rules ------------------------------------------------------------------------------------------------------------


def _rule(base: _Model, tasks: Sequence[_Model], heads: Sequence[tuple[str, ...]]) -> str:
    """Returns whether heads are merged, because rows of all models are of the same classes, or stacked."""
    headed = [task for task, head in zip(tasks, heads, strict=True) if head]
    if (
        len({task.config.architecture for task in headed}) > 1
        or len({head for head in map(frozenset, heads) if head}) > 1
    ):
        classes = sorted({task.config.architecture for task in headed})
        raise InputError(f"the tasks have heads of different kinds ({', '.join(classes)}): merge tasks of one kind")
    equal = len({task.config.labels for task in headed}) == 1 and len(headed) == len(tasks)
    equal = equal and same_classes(base.config.labels, headed[0].config.labels)
    return MERGED if equal and all(_alike(name, [base, *tasks]) for name in heads[0]) else STACKED


def _alike(name: str, models: Sequence[_Model]) -> bool:
    """Whether all models have a tensor of this name, and of one shape."""
    return all(name in model.names for model in models) and len({model.info(name).shape for model in models}) == 1


def _need_no_matching(base: _Model, tasks: Sequence[_Model], labels: tuple[str, ...] | None) -> bool:
    """Whether all names are equal as they are stored, and the base has the tasks' labels, too."""
    names = set(base.names.values())
    same = all(set(task.names.values()) == names for task in tasks)
    return same and (labels is None or base.config.labels == labels or are_generic(labels))


def _distinct(labels: Sequence[tuple[str, ...] | None], tasks: Sequence[_Model]) -> list[tuple[str, ...] | None]:
    """Returns the tasks' labels; where LABEL_0 means another class in each task, with the task's name before it."""
    known = [each for each in labels if each is not None]
    if len(set(known)) <= 1 or not any(map(are_generic, known)):
        return list(labels)
    folders = [task.opened.path.name for task in tasks]
    unique = len(set(folders)) == len(folders) and all(folders)
    return [
        each if each is None or not are_generic(each) else tuple(f"{folders[t] if unique else t + 1}/{n}" for n in each)
        for t, each in enumerate(labels)
    ]


def _classifier(
    tasks: Sequence[_Model], heads: Sequence[Sequence[str]], labels: Sequence[tuple[str, ...]]
) -> list[str]:
    """Returns the tensors that have a row for each label, under names that all of these tasks have."""
    layers = [_last_layer(*each) for each in zip(tasks, heads, labels, strict=True)]
    # Where a task has as many labels as a layer inside its head has rows, the other tasks tell which layer is the last.
    common = [name for name in layers[0] if all(name in layer for layer in layers)]
    if not common:
        task = next((t for t, layer in enumerate(layers) if not layer), 0)
        raise InputError(
            f"no layer of the head of {tasks[task].config.path.parent} has a row for each of the {len(labels[task])} "
            f"labels in its config.json ({some_of(heads[task], show=repr)}): correct id2label"
        )
    return common


def _last_layer(task: _Model, names: Sequence[str], labels: tuple[str, ...]) -> list[str]:
    """Returns the tensors of a classifier's last layer, which have a row for each label."""
    weights = [n for n in names if n.endswith("weight") and len(task.info(n).shape) == 2]
    rows = [name for name in weights if task.info(name).shape[0] == len(labels)]
    usual = [name for name in rows if _USUAL.search(name)]
    rows = usual if len(rows) > 1 and usual else rows
    biases = [name.removesuffix("weight") + "bias" for name in rows]
    return [*rows, *(name for name in biases if name in task.names and task.info(name).shape == (len(labels),))]


# -- what comes out ---------------------------------------------------------------------------------------------------


def _with_heads(
    rule: str,
    prefix: str,
    base: _Model,
    tasks: Sequence[_Model],
    heads: Sequence[tuple[str, ...]],
    task_labels: Sequence[tuple[str, ...] | None],
    fitted: FittedTensors | None,
) -> Heads:
    """Returns the models with one head, made of those of the tasks."""
    giver = next(t for t, head in enumerate(heads) if head)
    headed = [task for task, head in zip(tasks, heads, strict=True) if head]
    known = [each for each in task_labels if each is not None]
    labels = tuple(dict.fromkeys(label for each in known for label in each)) if known else None
    rows = [] if labels is None else _classifier(headed, [head for head in heads if head], known)
    merged = [name for name in heads[giver] if _alike(name, [base, *tasks])]
    replaced = {} if fitted is None else fitted.tensors

    def shape_of(name: str) -> tuple[int, ...]:
        shape = tasks[giver].info(name).shape
        return (len(labels), *shape[1:]) if name in rows and labels is not None else shape

    if odd := [name for name in replaced if name not in tasks[giver].names]:
        raise InputError(f"the fitted head has {some_of(odd, show=repr)}, which the tasks' classifiers have not")
    for name, values in replaced.items():
        if values.shape != shape_of(name):
            raise InputError(f"the fitted head's {name!r} is {values.shape}, expected {shape_of(name)}")
    stacked = rows if rule == STACKED else []
    classifier = [name for name in stacked if name not in replaced]
    mean = [name for name in heads[giver] if name not in (*stacked, *merged, *replaced)]
    for name in mean:
        if len({task.info(name).shape for task in headed}) > 1:
            raise InputError(
                f"{name!r} has different shapes in the tasks, and no row for each label: it can't be merged"
            )
    # Fitted tensors that all models have are merged, and written over, so that the elements of a merge stay the same.
    made = [n for n in replaced if n in stacked or (n in heads[giver] and n not in merged)] + classifier + mean
    infos = {name: TensorInfo(name, widest([task.info(name) for task in headed]), shape_of(name)) for name in made}
    wanted = {name for task in tasks for name in task.names}
    left_out = [name for name in base.names if name not in wanted and base.info(name).is_float]
    kept = {name: own for name, own in base.names.items() if name not in infos and name not in left_out}
    lacking = [name for name in kept if any(name not in task.names for task in tasks)]
    spare = [name for task in tasks for name in task.names if name not in infos.keys() | kept.keys()]
    heads_made = [
        {name: _finite(task, t, name) for name in (*classifier, *mean) if name in task.names}
        for t, task in enumerate(tasks)
    ]
    return Heads(
        rule,
        (View(base.opened, kept), *(View(task.opened, task.names) for task in tasks)),
        tuple(dict.fromkeys([*infos, *lacking, *spare])),
        tuple(left_out),
        labels,
        tuple(classifier),
        tuple(mean),
        infos,
        tuple(heads_made),
        tuple(task_labels),
        _config(tasks[giver].config, [task.config for task in headed], labels),
        giver,
        fitted,
        tuple(_notes(prefix, left_out, labels if classifier else None, known, base.config.labels or ())),
    )


def _with_head_of_base(prefix: str, base: _Model, tasks: Sequence[_Model]) -> Heads:
    """Returns the base as it is, with tasks under its names and without what only they have."""
    own = base.names
    views = (
        View(base.opened, {stored: stored for stored in own.values()}),
        *(View(task.opened, {own[n]: stored for n, stored in task.names.items() if n in own}) for task in tasks),
    )
    copied = [
        stored
        for name, stored in own.items()
        if any(name not in task.names for task in tasks)
        or (not name.startswith(prefix) and not _alike(name, [base, *tasks]))
    ]
    ignored = tuple(dict.fromkeys(name for task in tasks for name in task.names if name not in own))
    notes = tuple(_notes(prefix, ignored, None, (), ()))
    return Heads(OF_BASE, views, tuple(copied), ignored, base.config.labels, notes=notes)


def _finite(task: _Model, number: int, name: str) -> Tensor:
    import torch

    values = read_tensor(task.opened, task.names[name])
    if not torch.isfinite(values).all():
        raise InputError(f"task {number + 1}: {name!r} has values that are NaN or infinite: mend this checkpoint")
    return values


def _config(own: ModelConfig, headed: Sequence[ModelConfig], labels: tuple[str, ...] | None) -> dict[str, Any]:
    """Returns the configuration of the model that the heads make."""
    content = {key: value for key, value in own.content.items() if key not in ("_name_or_path", "num_labels")}
    if labels is not None:
        content["id2label"] = {str(k): label for k, label in enumerate(labels)}
        content["label2id"] = {label: k for k, label in enumerate(labels)}
        if len({each.content.get("problem_type") for each in headed}) > 1:
            content.pop("problem_type", None)
    return content


def _notes(
    prefix: str,
    left_out: Sequence[str],
    rows: Sequence[str] | None,
    known: Sequence[Sequence[str]],
    base: Sequence[str],
) -> Iterator[str]:
    """Yields what a user should know of heads before the merge; `rows` are the labels of a stacked classifier."""
    if left_out:
        modules = Counter(name.removeprefix(prefix).partition(".")[0] for name in left_out)
        yield f"left out, not in all models: {some_of(f'{module!r} ({count})' for module, count in modules.items())}"
    if rows is not None:
        shared = [label for label in rows if sum(label in each for each in known) > 1]
        means = f"; rows of {len(shared)} labels that several tasks have are means by weight" if shared else ""
        made = f"the classifier has {len(rows)} labels, stacked of {plural(len(known), 'task')}{means}"
        yield f"{made}, never trained together: expect wrong answers; `tmx tailor` fits one to the merged encoder"
        if shared and are_generic(shared):
            yield "LABEL_0, LABEL_1, ... are taken for the same classes in all tasks: if not, name them in id2label"
        if not are_generic(base) and (lost := [label for label in base if label not in rows]):
            yield f"labels of the base are lost ({some_of(lost, show=repr)}): to keep them, give it by --task, too"
