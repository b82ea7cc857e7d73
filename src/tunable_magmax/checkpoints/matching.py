"""Matches models of transformers that differ in their heads: a bare base, tasks with classifiers of their own.

Names are matched as transformers does it: a model with a head keeps the bare model under a prefix. The rules for the
heads themselves are in docs/merge.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tunable_magmax.checkpoints.checkpoint import Checkpoint, Opened
from tunable_magmax.checkpoints.heads import (
    BASE,
    CHOICES,
    DROP,
    LAST,
    MERGED,
    STACK,
    FittedTensors,
    HeadedModel,
    Heads,
)
from tunable_magmax.checkpoints.model_config import ModelConfig, are_generic
from tunable_magmax.checkpoints.tensors import TensorInfo, widest
from tunable_magmax.checkpoints.views import View
from tunable_magmax.errors import InputError, some_of

_TASK = re.compile(r"task ([1-9][0-9]*)")
_OLD = re.compile(r"LayerNorm\.(gamma|beta)$")
_USUAL = re.compile(r"(^|\.)(\w*classifier|out_proj|score|logits_proj|head|fc)\.weight$")
_UNUSED = ("mask_token",)
"""Parameters that only pre-training needs, inside modules that classifiers have too."""


def match_heads(
    opened: Sequence[Opened], heads: str | None = None, fitted: FittedTensors | None = None
) -> Heads | None:
    """Returns how base (first) and tasks fit together in spite of their heads; None if they have to be equal.

    That is so for checkpoints without a config.json or of different architectures, for adapters, and where names and
    shapes are equal already. `heads`: what to do with them; None: merge them if they are equal, else stack them.
    `fitted`: tensors that take the place of the tasks' own.
    """
    models = _models(opened)
    if models is None:
        if heads is not None or fitted is not None:
            raise InputError(
                "heads can be chosen for models of transformers only: base and tasks must be directories with a "
                "config.json of one model type that names their architectures, and no adapters"
            )
        return None
    prefix, base, tasks = models[0], models[1][0], models[1][1:]
    if not _acceptable(prefix, base, tasks):
        return None
    kinds = [_head_names(task, base, prefix) if task.config.is_headed else () for task in tasks]
    rule = _rule(heads, base, tasks, kinds)
    labels = [task.config.labels if kind else None for task, kind in zip(tasks, kinds, strict=True)]
    known = [each for each in labels if each is not None]
    if rule == MERGED and heads is None and fitted is None and _alike(base, tasks, known):
        return None
    if rule in (DROP, BASE):
        return _without_heads(rule, prefix, base, tasks)
    return _with_heads(rule, prefix, base, tasks, kinds, _distinct(labels, tasks), fitted)


# -- names ------------------------------------------------------------------------------------------------------------


def _models(opened: Sequence[Opened]) -> tuple[str, list[HeadedModel]] | None:
    """Returns the prefix of the bare model and all models under the names of one with a head."""
    configs = [ModelConfig.of(each.path) for each in opened]
    if any(config is None for config in configs) or not all(isinstance(each, Checkpoint) for each in opened):
        return None
    known = [config for config in configs if config is not None]
    checkpoints = [each for each in opened if isinstance(each, Checkpoint)]
    headed = next((k for k in (*range(1, len(known)), 0) if known[k].is_headed), None)
    if headed is None or len({config.model_type for config in known}) > 1 or known[0].model_type is None:
        return None
    reference = {_modern(name) for name in _all_names(checkpoints[headed])}
    prefix, count = Counter(name.split(".")[0] for name in reference).most_common(1)[0]
    if 2 * count < len(reference):
        return None
    models = []
    for checkpoint, config in zip(checkpoints, known, strict=True):
        own = {_modern(name): name for name in _all_names(checkpoint)}
        bare = sum(f"{prefix}.{name}" in reference for name in own) > sum(name in reference for name in own)
        models.append(
            HeadedModel(checkpoint, config, {f"{prefix}." * bare + name: stored for name, stored in own.items()})
        )
    return f"{prefix}.", models


def _all_names(checkpoint: Checkpoint) -> list[str]:
    return [*checkpoint.tensors, *checkpoint.aliases]


def _modern(name: str) -> str:
    """Returns today's name of a tensor of old BERT checkpoints."""
    return _OLD.sub(lambda old: f"LayerNorm.{'weight' if old[1] == 'gamma' else 'bias'}", name)


def _acceptable(prefix: str, base: HeadedModel, tasks: Sequence[HeadedModel]) -> bool:
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


def _head_names(task: HeadedModel, base: HeadedModel, prefix: str) -> tuple[str, ...]:
    """Returns the tensors of a task's head: outside of the bare model, or inside it where the base has none."""
    return tuple(
        name
        for name in task.names
        if task.info(name).is_float and (not name.startswith(prefix) or name not in base.names)
    )


# -- rules ------------------------------------------------------------------------------------------------------------


def _rule(heads: str | None, base: HeadedModel, tasks: Sequence[HeadedModel], kinds: Sequence[tuple[str, ...]]) -> str:
    """Returns what becomes of heads: MERGED, "base" (only the base has one), "stack", "drop", or "task 2"."""
    if heads == DROP:
        return DROP
    if not any(kinds):
        if heads not in (None, STACK):
            raise InputError(f"heads is {heads!r}, but no task has a head of its own: leave it out")
        return BASE
    if heads is not None and heads != STACK:
        number = len(tasks) if heads == LAST else _task_of(heads) + 1
        if not 1 <= number <= len(tasks) or not kinds[number - 1]:
            raise InputError(f"heads is {heads!r}, but that task has no head of its own; choose another task")
        return f"task {number}"
    headed = [task for task, kind in zip(tasks, kinds, strict=True) if kind]
    classes = sorted({task.config.architecture for task in headed})
    if len(classes) > 1 or len({kind for kind in map(frozenset, kinds) if kind}) > 1:
        raise InputError(
            f"the tasks have heads of different kinds ({', '.join(classes)}), which can't be stacked: choose the head "
            "of one task with --heads NAME or --heads last, or none with --heads drop"
        )
    equal = len({task.config.labels for task in headed}) == 1 and len(headed) == len(tasks)
    merged = equal and all(
        name in base.names and {task.info(name).shape for task in tasks} == {base.info(name).shape} for name in kinds[0]
    )
    return MERGED if merged and heads is None else STACK


def _alike(base: HeadedModel, tasks: Sequence[HeadedModel], labels: Sequence[tuple[str, ...]]) -> bool:
    """Whether models need no matching: equal names as they are stored, and labels that the base has too."""
    names = set(base.names.values())
    same = all(set(task.names.values()) == names for task in tasks)
    return same and (not labels or base.config.labels == labels[0] or are_generic(labels[0]))


def _distinct(labels: Sequence[tuple[str, ...] | None], tasks: Sequence[HeadedModel]) -> list[tuple[str, ...] | None]:
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


def _task_of(heads: str) -> int:
    found = _TASK.fullmatch(heads)
    if found is None:
        raise InputError(f"heads is {heads!r}, expected {', '.join(CHOICES)} or a task's name")
    return int(found[1]) - 1


def _last_layer(task: HeadedModel, names: Sequence[str], labels: tuple[str, ...]) -> list[str]:
    """Returns the tensors of a classifier's last layer, which have a row for each label."""
    weights = [n for n in names if n.endswith("weight") and len(task.info(n).shape) == 2]
    found = [name for name in weights if task.info(name).shape[0] == len(labels)]
    usual = [name for name in found if _USUAL.search(name)]
    found = usual if len(found) > 1 and usual else found
    biases = [name.removesuffix("weight") + "bias" for name in found]
    return [*found, *(name for name in biases if name in task.names and task.info(name).shape == (len(labels),))]


# -- what comes out ---------------------------------------------------------------------------------------------------


def _with_heads(
    rule: str,
    prefix: str,
    base: HeadedModel,
    tasks: Sequence[HeadedModel],
    kinds: Sequence[tuple[str, ...]],
    task_labels: Sequence[tuple[str, ...] | None],
    fitted: FittedTensors | None,
) -> Heads:
    giver = _task_of(rule) if rule.startswith("task") else next(t for t, kind in enumerate(kinds) if kind)
    counted = [giver] if rule.startswith("task") else [t for t, kind in enumerate(kinds) if kind]
    labels = _union(task_labels[t] for t in counted)
    classifier = _classifier(tasks, counted, kinds, task_labels) if labels is not None else []
    everyone = [base, *tasks]
    common = (
        [
            name
            for name in kinds[giver]
            if all(name in model.names and model.info(name).shape == base.info(name).shape for model in everyone)
            and name in base.names
        ]
        if not rule.startswith("task")
        else []
    )
    replaced = [] if fitted is None else list(fitted.tensors)
    if any(name not in tasks[giver].names for name in replaced):
        odd = [name for name in replaced if name not in tasks[giver].names]
        raise InputError(f"the fitted head has {some_of(odd, show=repr)}, which the tasks' classifiers have not")
    for name in replaced:
        assert fitted is not None
        rows, *others = tasks[giver].info(name).shape
        shape = (len(labels) if name in classifier and labels is not None else rows, *others)
        if fitted.tensors[name].shape != shape:
            raise InputError(f"the fitted head's {name!r} is {fitted.tensors[name].shape}, expected {shape}")
    if rule == MERGED:
        classifier = []
    stacked = set(classifier)
    mean = [name for name in kinds[giver] if name not in (*classifier, *common, *replaced)]
    classifier = [name for name in classifier if name not in replaced]
    made: dict[str, TensorInfo] = {}
    for name in replaced:
        assert fitted is not None
        if name in stacked or (name in kinds[giver] and name not in common):  # others are merged, and written over
            made[name] = TensorInfo(name, widest([tasks[t].info(name) for t in counted]), fitted.tensors[name].shape)
    for name in (*classifier, *mean):
        infos = [tasks[t].info(name) for t in counted]
        shape = (len(labels), *infos[0].shape[1:]) if name in classifier and labels is not None else infos[0].shape
        if len({info.shape for info in infos}) > 1 and name not in classifier:
            raise InputError(
                f"{name!r} has different shapes in the tasks, and is no layer with a row for each label: choose the "
                "head of one task with --heads NAME or --heads last, or none with --heads drop"
            )
        made[name] = TensorInfo(name, widest(infos), shape)
    wanted = {name for task in tasks for name in task.names}
    left_out = [name for name in base.names if name not in wanted and base.info(name).is_float]
    kept = {name: own for name, own in base.names.items() if name not in made and name not in left_out}
    views = (View(base.opened, kept, made), *(View(task.opened, task.names) for task in tasks))
    lacking = [name for name in kept if any(name not in task.names for task in tasks)]
    spare = [name for task in tasks for name in task.names if name not in made | kept]
    copied = tuple(dict.fromkeys([*made, *lacking, *spare]))
    config = _config(tasks[giver].config, [tasks[t].config for t in counted], labels)
    found = Heads(
        rule, views, copied, labels, tuple(classifier), tuple(mean), tuple(left_out), (), config, giver,
        tuple(task_labels), tuple(tasks), fitted,
    )  # fmt: skip
    return replace(found, notes=tuple(_notes(found, prefix, base, task_labels)))


def _without_heads(rule: str, prefix: str, base: HeadedModel, tasks: Sequence[HeadedModel]) -> Heads:
    """Returns the base as it is, with tasks under its names and without what only they have."""
    own = base.names
    views = (
        View(base.opened, {stored: stored for stored in own.values()}),
        *(View(task.opened, {own[n]: stored for n, stored in task.names.items() if n in own}) for task in tasks),
    )
    shapes = {name: base.info(name).shape for name in own}
    copied = tuple(
        stored
        for name, stored in own.items()
        if any(name not in task.names for task in tasks)
        or (not name.startswith(prefix) and any(task.info(name).shape != shapes[name] for task in tasks))
    )
    ignored = tuple(dict.fromkeys(name for task in tasks for name in task.names if name not in own))
    found = Heads(rule, views, copied, base.config.labels, (), (), ignored, (), None, None, (), tuple(tasks), None)
    return replace(found, notes=tuple(_notes(found, prefix, base, ())))


def _union(lists: Iterable[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    known = [each for each in lists if each is not None]
    return tuple(dict.fromkeys(label for each in known for label in each)) if known else None


def _classifier(
    tasks: Sequence[HeadedModel],
    counted: Sequence[int],
    kinds: Sequence[tuple[str, ...]],
    task_labels: Sequence[tuple[str, ...] | None],
) -> list[str]:
    layers = [_last_layer(tasks[t], kinds[t], task_labels[t] or ()) for t in counted]
    # Where a task has as many labels as a layer inside its head has rows, the other tasks tell which layer is the last.
    common = [name for name in layers[0] if all(name in layer for layer in layers)]
    if not common:
        task = next((t for t, layer in zip(counted, layers, strict=True) if not layer), counted[0])
        config = tasks[task].config
        raise InputError(
            f"no layer of the head of {config.path.parent} has a row for each of the {len(config.labels or ())} labels "
            f"in its config.json ({some_of(kinds[task], show=repr)}): correct id2label, or leave heads out with "
            "--heads drop"
        )
    return common


def _config(own: ModelConfig, counted: Sequence[ModelConfig], labels: tuple[str, ...] | None) -> dict[str, Any]:
    """Returns the configuration of the model that the heads make."""
    content = {key: value for key, value in own.content.items() if key not in ("_name_or_path", "num_labels")}
    if labels is not None:
        content["id2label"] = {str(k): label for k, label in enumerate(labels)}
        content["label2id"] = {label: k for k, label in enumerate(labels)}
        if len({each.content.get("problem_type") for each in counted}) > 1:
            content.pop("problem_type", None)
    return content


def _notes(
    found: Heads, prefix: str, base: HeadedModel, task_labels: Sequence[tuple[str, ...] | None]
) -> Iterable[str]:
    """Yields what was matched and what becomes of the heads, in words."""
    models = [base, *found._tasks]
    bare = ["the base" if k == 0 else f"task {k}" for k, m in enumerate(models) if _is_bare(m, prefix)]
    if 0 < len(bare) < len(models):
        yield f"names of {some_of(bare)} are matched by adding {prefix!r}"
    if any(_modern(own) != own for model in models for own in model.names.values()):
        yield "LayerNorm.gamma and LayerNorm.beta are matched with LayerNorm.weight and LayerNorm.bias"
    if found.left_out:
        whose = "of the base, which no task has" if found.rule not in (DROP, BASE) else "of the tasks, without heads"
        modules = Counter(name.removeprefix(prefix).partition(".")[0] for name in found.left_out)
        yield f"left out {whose}: {some_of(f'{module!r} ({count})' for module, count in modules.items())}"
    if found.classifier and found.rule == STACK and found.labels is not None:
        lists = [set(each) for each in task_labels if each is not None]
        several = [label for label in found.labels if sum(label in each for each in lists) > 1]
        shared = f"; rows of {_number(several)} that several tasks have are means by weight" if several else ""
        yield f"the classifier has {_number(found.labels)}, stacked of {len(lists)} tasks{shared}"
        if several and are_generic(several):
            yield "LABEL_0, LABEL_1, ... are taken for the same classes in all tasks: if not, name them in id2label"
    elif found.rule.startswith("task"):
        yield f"the head is that of {found.rule}"
    if found.mean and found.rule == STACK:
        yield f"layers that only the tasks have are means by weight: {some_of(found.mean, show=repr)}"
    if found.fitted is not None:
        yield f"fitted to the merged encoder: {some_of(found.fitted.tensors, show=repr)}"


def _number(labels: Sequence[str]) -> str:
    return f"{len(labels)} label{'' if len(labels) == 1 else 's'}"


def _is_bare(model: HeadedModel, prefix: str) -> bool:
    return not any(_modern(own) == name for name, own in model.names.items() if name.startswith(prefix))
