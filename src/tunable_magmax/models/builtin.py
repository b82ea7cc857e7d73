"""Models of transformers with a classifier of their own: encoders whose embeddings are what the classifier reads.

The embedding is the input of the last linear layer, of decoders that of the token whose logits are the model's. Where a
hidden layer comes before it, its input follows in the same row: the hidden layer can be made to pass that on as it is,
so a head may be fitted to either.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.checkpoints.companions import HIDDEN_LAYERS, ModelConfig
from tunable_magmax.checkpoints.hub import located
from tunable_magmax.data.arrays import limited
from tunable_magmax.errors import InputError, required
from tunable_magmax.models.encoder import Encoder, arguments, input_tools
from tunable_magmax.models.fitting import View
from tunable_magmax.models.head import Head, Linear
from tunable_magmax.models.prepared import embed_prepared, prepare
from tunable_magmax.models.pretrained import find_folders, load_module, quiet, read_config, read_state

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tunable_magmax.data.samples import Samples

_KINDS = ("ForSequenceClassification", "ForImageClassification")
INPUT, TOKEN = "input", "token"
"""The views of a row: what the last layer reads, and what the hidden layer before it reads."""
TANH_FACTOR = 2.0**-12
"""tanh(x) is x to float32's precision where x is made so small."""
SHIFT_FACTOR = 8.0
"""ReLU and GELU pass on what is shifted by so many times the largest value that was seen."""
TRIED = 10
"""Samples of each class that show which row of a classifier without names it is."""
AGREEMENT = 2 / 3
"""The share of these that must get the row of their class."""


class ClassifierLayers:
    """The last linear layer of a classifier and the hidden one before it, whose inputs a forward pass now returns.

    `views`: what of a row a head may be fitted to; `dim`: the width of a row.
    """

    def __init__(self, module: nn.Module, last: str, hidden: str | None, activation: str | None) -> None:
        self.activation, self._names = activation, (last, hidden)
        self._last: Any = module.get_submodule(last)
        width: Any = self._last.in_features
        # The logits are what the last layer gives, of decoders for one token: now they are what it reads, there too.
        self._last.register_forward_hook(lambda layer, inputs, output: inputs[0])
        self.dim: int = width
        self.views: tuple[View, ...] = (View(INPUT, slice(0, self.dim), bias=self._last.bias is not None),)
        self._caught = threading.local()
        if hidden is not None:
            layer: Any = module.get_submodule(hidden)
            layer.register_forward_pre_hook(lambda layer, inputs: setattr(self._caught, TOKEN, inputs[0]))
            self.views = (*self.views, View(TOKEN, slice(self.dim, self.dim + layer.in_features), old=False))
            self.dim += layer.in_features

    def features(self, logits: Tensor) -> Tensor:
        """Returns the rows [n, width of both] of this thread's last forward pass, which gave the `logits`."""
        import torch

        return torch.cat([logits, *(getattr(self._caught, view.name) for view in self.views[1:])], dim=1)

    def linear(self) -> Linear:
        """Returns the last layer as a head over whole rows."""
        weight = self._last.weight.detach().double().cpu().numpy()
        full = np.zeros((len(weight), self.dim))
        full[:, : weight.shape[1]] = weight
        bias = self._last.bias
        return Linear(full, np.zeros(len(full)) if bias is None else bias.detach().double().cpu().numpy())

    def tensors(self, head: Linear, view: str, largest: float) -> dict[str, NDArray[np.float32]]:
        """Returns the tensors, by the module's names, that make the module give a head's logits.

        `view`: what the head reads; `largest`: the largest absolute value that a row has there.
        """
        last, hidden = self._names
        columns = next(each.columns for each in self.views if each.name == view)
        made: dict[str, NDArray[Any]] = {}
        weight, bias = head.weight[:, columns], head.bias
        if view == TOKEN:
            passing, shift = np.eye(weight.shape[1]), 0.0
            if self.activation == "tanh":
                passing, weight = TANH_FACTOR * passing, weight / TANH_FACTOR
            else:
                shift = SHIFT_FACTOR * 2.0 ** np.ceil(np.log2(max(1.0, largest)))
                bias = bias - shift * weight.sum(axis=1)
            made = {f"{hidden}.weight": passing, f"{hidden}.bias": np.full(len(passing), shift)}
        made[f"{last}.weight"] = weight
        if self._last.bias is not None:
            made[f"{last}.bias"] = bias
        return {name: values.astype(np.float32) for name, values in made.items()}


@dataclass(frozen=True, eq=False)
class BuiltinEncoder(Encoder):
    """An encoder with its own classifier. `labels`: the names of its classes.

    `layers`: None if no fitted head can be written, since the logits are not those of a linear layer. Then they are its
    embeddings.
    """

    labels: tuple[str, ...] = ()
    layers: ClassifierLayers | None = None

    def pool(self, batch: Tensor | Mapping[str, Tensor]) -> Tensor:
        module: Any = self.module
        logits: Tensor = module(**arguments(batch)).logits
        return logits if self.layers is None else self.layers.features(logits)

    @property
    def linear(self) -> Linear:
        """The classifier as it is in the module now."""
        count = len(self.labels)
        return Linear(np.eye(count), np.zeros(count)) if self.layers is None else self.layers.linear()

    @property
    def head(self) -> Head:
        """The classifier with the names of its classes."""
        return Head.of(self.linear.weight, self.labels, 1.0, self.linear.bias, builtin=True)

    @property
    def views(self) -> tuple[View, ...]:
        """What a head may be fitted to; none if it could not be written."""
        return () if self.layers is None else self.layers.views


def builtin_labels(path: str | Path) -> tuple[str, ...] | None:
    """Returns the labels of a checkpoint's own classifier; None if it has none, by its config.json."""
    config = ModelConfig.of(Path(path))
    return None if config is None or not any(kind in config.architecture for kind in _KINDS) else config.labels


def load_builtin(path: str | Path, device: str | None = None, *, assets: str | Path | None = None) -> BuiltinEncoder:
    """Loads a checkpoint with its own classifier; what prepares inputs comes from there, or else from `assets`."""
    path = located(path)
    folders = find_folders(path, assets)
    state, digest = read_state(path)
    config = ModelConfig.of(folders[0])
    assert config is not None
    return builtin_encoder(config.content, state, digest, path, folders, device)


def rows_by_answers(encoder: BuiltinEncoder, samples: Samples) -> dict[str, int]:
    """Returns the row of each class by what a classifier answers for its samples; nothing if that is not clear."""
    labels = samples.require_labels()
    prepared = prepare(encoder, samples, limited(range(len(samples)), labels, TRIED, 0))
    answers = encoder.head.logits(embed_prepared(encoder, prepared)).argmax(axis=1).tolist()
    votes = Counter(zip((labels[position] for position in prepared.positions), answers, strict=True))
    rows = dict(sorted(votes, key=lambda pair: votes[pair]))  # of a class, the row with the most votes comes last
    agreeing = sum(votes[pair] for pair in rows.items())
    if len({*rows.values()}) < len(rows) or agreeing < AGREEMENT * len(answers):
        return {}
    return {samples.classes[label]: row for label, row in rows.items()}


def builtin_encoder(
    content: Mapping[str, Any],
    state: Mapping[str, Tensor],
    digest: str,
    path: Path,
    folders: Sequence[Path],
    device: str | None = None,
) -> BuiltinEncoder:
    """Makes an encoder of tensors and of what config.json is to hold; the first of `folders` has one of that type."""
    named = str((content.get("architectures") or [""])[0])
    model_class = getattr(required("transformers"), named, None)
    if model_class is None or not any(kind in named for kind in _KINDS):
        raise InputError(
            f"{path} is a {named or 'model of no named architecture'}, in which transformers knows no classifier: give "
            "a head file, or evaluate it as the base of a run whose tasks have classifiers"
        )
    with quiet():
        config = type(read_config(folders[0])).from_dict(dict(content))
        config._name_or_path = ""
        module = load_module(model_class, config, state, path)
        tools = input_tools(module, path, folders, device)
    labels = ModelConfig(path, dict(content)).labels
    assert labels is not None
    found = BuiltinEncoder(module, "logits", len(labels), digest, path, **tools, labels=labels)
    layers = _find_layers(found)
    return found if layers is None else replace(found, layers=layers, dim=layers.dim)


def _find_layers(encoder: BuiltinEncoder) -> ClassifierLayers | None:
    """Finds the last layer: linear, with a row for each label, and what it gives are the model's logits."""
    import torch
    from torch import nn

    module: Any = encoder.module
    layers = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
    named = [name for name, layer in layers.items() if layer.out_features == len(encoder.labels)]
    outputs: dict[nn.Module, Tensor] = {}
    if encoder.image_processor is None:
        probe: Any = encoder.prepare_texts(["a text"])
    else:
        probe = encoder.prepare_images([required("PIL.Image").new("RGB", (32, 32), (127, 127, 127))])
    caught = [layers[name].register_forward_hook(lambda *call: outputs.update({call[0]: call[2]})) for name in named]
    with torch.inference_mode():
        logits = encoder.pool(probe)
    for handle in caught:
        handle.remove()
    # Decoders classify every token, and take what the last one gives.
    ends = {name: outputs[layers[name]].flatten(0, -2)[-1] for name in named if layers[name] in outputs}
    last = next((name for name in reversed(ends) if bool((ends[name] == logits[0]).all())), None)
    if last is None:
        return None
    hidden, activation = HIDDEN_LAYERS.get(encoder.family, (None, None))
    layer = layers.get(str(hidden))
    square = layer is not None and layer.in_features == layer.out_features == layers[last].in_features
    usual = getattr(module.config, "pooler_hidden_act", activation) == activation
    if layer is None or not square or layer.bias is None or not usual:
        hidden = activation = None
    return ClassifierLayers(module, last, hidden, activation)
