"""Models of transformers with a classifier of their own: encoders whose embeddings are what the classifier reads.

The embedding is the input of the last linear layer. Where a hidden layer comes before it, its input follows in the same
row: the hidden layer can be made to pass that on as it is, so a head may be fitted to either.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.checkpoints.companions import HIDDEN_LAYERS, ModelConfig
from tunable_magmax.checkpoints.hub import located
from tunable_magmax.errors import InputError
from tunable_magmax.models.encoder import Encoder, input_tools, probe_batch
from tunable_magmax.models.fitting import View
from tunable_magmax.models.head import Head, Linear
from tunable_magmax.models.prepared import embed_prepared, prepare
from tunable_magmax.models.pretrained import find_folders, load_module, quiet, read_config, transformers_module
from tunable_magmax.models.state import read_state

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


class ClassifierLayers:
    """The last linear layer of a classifier and the hidden one before it, whose inputs are caught in a forward pass."""

    def __init__(self, module: nn.Module, last: str, hidden: str | None, activation: str | None) -> None:
        self.last, self.hidden, self.activation = last, hidden, activation
        self._caught = threading.local()
        for name, place in ((last, INPUT), (hidden, TOKEN)):
            if name is not None:
                module.get_submodule(name).register_forward_pre_hook(self._catcher(place))

    def _catcher(self, place: str) -> Any:
        def catch(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            setattr(self._caught, place, inputs[0])

        return catch

    def features(self) -> Tensor:
        """Returns what was caught in this thread's last forward pass, [n, width of both]."""
        import torch

        caught = [self._caught.input, *([] if self.hidden is None else [self._caught.token])]
        return torch.cat(caught, dim=1)

    def linear(self, module: nn.Module) -> Linear:
        """Returns the last layer as a head over whole rows."""
        layer: Any = module.get_submodule(self.last)
        weight = layer.weight.detach().double().cpu().numpy()
        full = np.zeros((len(weight), self.dim(module)))
        full[:, : weight.shape[1]] = weight
        bias = np.zeros(len(weight)) if layer.bias is None else layer.bias.detach().double().cpu().numpy()
        return Linear(full, bias)

    def dim(self, module: nn.Module) -> int:
        """Returns the width of a row."""
        layers: list[Any] = [module.get_submodule(name) for name in (self.last, self.hidden) if name is not None]
        return sum(layer.in_features for layer in layers)

    def views(self, module: nn.Module) -> tuple[View, ...]:
        """Returns what of a row a head may be fitted to."""
        first = int(module.get_submodule(self.last).in_features)  # type: ignore[arg-type]
        views = [View(INPUT, slice(0, first))]
        if self.hidden is not None:
            views.append(View(TOKEN, slice(first, self.dim(module)), old=False))
        return tuple(views)

    def tensors(self, module: nn.Module, head: Linear, view: str, largest: float) -> dict[str, NDArray[np.float32]]:
        """Returns the tensors, by the module's names, that make the module give a head's logits.

        `view`: what the head reads; `largest`: the largest absolute value that a row has there.
        """
        columns = next(each.columns for each in self.views(module) if each.name == view)
        weight, bias = head.weight[:, columns], head.bias
        if view == INPUT:
            return self._named(weight, bias)
        size = weight.shape[1]
        if self.activation == "tanh":
            passing, shift = TANH_FACTOR * np.eye(size), 0.0
            weight = weight / TANH_FACTOR
        else:
            passing, shift = np.eye(size), SHIFT_FACTOR * 2.0 ** np.ceil(np.log2(max(1.0, largest)))
            bias = bias - shift * weight.sum(axis=1)
        hidden = {f"{self.hidden}.weight": passing, f"{self.hidden}.bias": np.full(size, shift)}
        return {**self._named(weight, bias), **{name: v.astype(np.float32) for name, v in hidden.items()}}

    def _named(self, weight: NDArray[Any], bias: NDArray[Any]) -> dict[str, NDArray[np.float32]]:
        both = {f"{self.last}.weight": weight, f"{self.last}.bias": bias}
        return {name: values.astype(np.float32) for name, values in both.items()}


@dataclass(frozen=True, eq=False)
class BuiltinEncoder(Encoder):
    """An encoder with its own classifier. `layers`: None if that has no linear last layer that can be found.

    Then its embeddings are its logits. `labels`: the names of its classes.
    """

    labels: tuple[str, ...] = ()
    layers: ClassifierLayers | None = None

    def pool(self, batch: Tensor | Mapping[str, Tensor]) -> Tensor:
        module: Any = self.module
        logits: Tensor = module(**batch if isinstance(batch, Mapping) else {"pixel_values": batch}).logits
        return logits if self.layers is None else self.layers.features()

    @property
    def linear(self) -> Linear:
        """The classifier as it is in the module now."""
        if self.layers is None:
            return Linear(np.eye(len(self.labels)), np.zeros(len(self.labels)))
        return self.layers.linear(self.module)

    @property
    def head(self) -> Head:
        """The classifier with the names of its classes."""
        return Head.of(self.linear.weight, self.labels, 1.0, self.linear.bias, builtin=True)

    @property
    def views(self) -> tuple[View, ...]:
        """What a head may be fitted to; none without a linear last layer."""
        return () if self.layers is None else self.layers.views(self.module)

    @property
    def has_bias(self) -> bool:
        """Whether the last layer has a bias, without which a fitted head cannot be written."""
        layer: Any = None if self.layers is None else self.module.get_submodule(self.layers.last)
        return layer is not None and layer.bias is not None


def builtin_labels(path: str | Path) -> tuple[str, ...] | None:
    """Returns the labels of a checkpoint's own classifier; None if it has none, by its config.json."""
    config = ModelConfig.of(Path(path))
    return None if config is None or not any(kind in config.architecture for kind in _KINDS) else config.labels


def load_builtin(path: str | Path, device: str | None = None, *, assets: str | Path | None = None) -> BuiltinEncoder:
    """Loads a checkpoint with its own classifier; what prepares inputs comes from there, or else from `assets`."""
    path = located(path)
    folders = find_folders(path, None if assets is None else located(assets))
    state, digest = read_state(path)
    config = ModelConfig.of(folders[0])
    assert config is not None
    return builtin_encoder(config.content, state, digest, path, folders, device)


def count_answers(encoder: BuiltinEncoder, samples: Samples, positions: Sequence[int]) -> NDArray[np.int64]:
    """Counts which row the classifier answers for labelled samples of each class [classes, rows]."""
    prepared = prepare(encoder, samples, positions)
    assert prepared.labels is not None
    answers = encoder.head.logits(embed_prepared(encoder, prepared)).argmax(axis=1)
    counts = np.zeros((len(samples.classes), len(encoder.labels)), dtype=np.int64)
    np.add.at(counts, (prepared.labels.cpu().numpy(), answers), 1)
    return counts


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
    model_class = getattr(transformers_module(), named, None)
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
    count = int(config.num_labels)
    labels = ModelConfig(path, dict(content)).labels or tuple(f"LABEL_{k}" for k in range(count))
    found = BuiltinEncoder(module, "logits", count, digest, path, **tools, labels=labels)
    layers = _find_layers(found)
    return found if layers is None else replace(found, layers=layers, dim=layers.dim(module))


def _find_layers(encoder: BuiltinEncoder) -> ClassifierLayers | None:
    """Finds the last layer: linear, with a row for each label, and what it gives are the model's logits."""
    import torch
    from torch import nn

    module: Any = encoder.module
    count = len(encoder.labels)
    named = [name for name, m in module.named_modules() if isinstance(m, nn.Linear) and m.out_features == count]
    caught: dict[str, Any] = {}

    def catcher(name: str) -> Any:
        return lambda layer, inputs, output: caught.update({name: (inputs[0], output)})

    handles = [module.get_submodule(name).register_forward_hook(catcher(name)) for name in named]
    try:
        with encoder.evaluating(), torch.inference_mode():
            logits = encoder.pool(probe_batch(encoder))
    finally:
        for handle in handles:
            handle.remove()
    fitting = [name for name, (rows, out) in caught.items() if rows.dim() == 2 and torch.equal(out, logits)]
    if not fitting:
        return None
    width = module.get_submodule(fitting[-1]).in_features
    hidden, activation = HIDDEN_LAYERS.get(encoder.family, (None, None))
    layer = dict(module.named_modules()).get(str(hidden))
    square = isinstance(layer, nn.Linear) and layer.in_features == layer.out_features == width
    usual = getattr(module.config, "pooler_hidden_act", activation) == activation
    if layer is None or not square or layer.bias is None or not usual:
        hidden = activation = None
    return ClassifierLayers(module, fitting[-1], hidden, activation)
