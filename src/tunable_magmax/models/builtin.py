"""Models of transformers with a classifier of their own: encoders whose embeddings are what the classifier reads.

The embedding is the input of the last linear layer, of decoders that of the token whose logits are the model's. Where a
hidden layer comes before it, its input follows in the same row: the hidden layer can be made to pass that on as it is,
so a head may be fitted to either.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from tunable_magmax.models.head import Head, Linear, builtin_head
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


@dataclass(frozen=True, eq=False)
class BuiltinEncoder(Encoder):
    """An encoder with its own classifier. `labels`: the names of its classes.

    `last`, `hidden`: the names of its last linear layer and of the hidden one before it, whose inputs are its rows.
    `views`: what of a row a head may be fitted to. Without `last`, the logits are not those of a linear layer: no
    fitted head can be written, and the logits are the rows.
    """

    labels: tuple[str, ...] = ()
    last: str | None = None
    hidden: str | None = None
    views: tuple[View, ...] = ()
    caught: threading.local = field(default_factory=threading.local)
    """What the hidden layer has read last, in each thread."""

    def pool(self, batch: Tensor | Mapping[str, Tensor]) -> Tensor:
        import torch

        module: Any = self.module
        rows: Tensor = module(**arguments(batch)).logits  # what the last layer reads, if there is one
        return rows if self.hidden is None else torch.cat([rows, self.caught.inputs], dim=1)

    @property
    def head(self) -> Head:
        """The classifier as it is in the module now, over whole rows."""
        if self.last is None:
            return builtin_head(self.labels)
        layer: Any = self.module.get_submodule(self.last)
        weight = np.zeros((len(self.labels), self.dim))
        weight[:, : layer.in_features] = layer.weight.detach().double().cpu().numpy()
        bias = None if layer.bias is None else layer.bias.detach().double().cpu().numpy()
        return Head.of(weight, self.labels, 1.0, bias, builtin=True)

    def tensors(self, head: Linear, view: str, largest: float) -> dict[str, NDArray[np.float32]]:
        """Returns the tensors, by the module's names, that make the module give a head's logits.

        `view`: what the head reads; `largest`: the largest absolute value that a row has there.
        """
        columns = next(each.columns for each in self.views if each.name == view)
        made: dict[str, NDArray[Any]] = {}
        weight, bias = head.weight[:, columns], head.bias
        if view == TOKEN:
            passing, shift = np.eye(weight.shape[1]), 0.0
            if HIDDEN_LAYERS[self.family][1] == "tanh":
                passing, weight = TANH_FACTOR * passing, weight / TANH_FACTOR
            else:
                shift = SHIFT_FACTOR * 2.0 ** np.ceil(np.log2(max(1.0, largest)))
                bias = bias - shift * weight.sum(axis=1)
            made = {f"{self.hidden}.weight": passing, f"{self.hidden}.bias": np.full(len(passing), shift)}
        made[f"{self.last}.weight"] = weight
        if self.views[0].bias:
            made[f"{self.last}.bias"] = bias
        return {name: values.astype(np.float32) for name, values in made.items()}


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
    return _with_layers(BuiltinEncoder(module, "logits", len(labels), digest, path, **tools, labels=labels))


def _with_layers(encoder: BuiltinEncoder) -> BuiltinEncoder:
    """Has the last layer's input take the place of the logits, and catches that of the hidden layer before it.

    The last layer is linear, has a row for each label, and what it gives are the model's logits.
    """
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
    handles = [layers[name].register_forward_hook(lambda *call: outputs.update({call[0]: call[2]})) for name in named]
    with torch.inference_mode():
        logits = encoder.pool(probe)
    for handle in handles:
        handle.remove()
    # Decoders classify every token, and take what the last one gives.
    ends = {name: outputs[layers[name]].flatten(0, -2)[-1] for name in named if layers[name] in outputs}
    last = next((name for name in reversed(ends) if bool((ends[name] == logits[0]).all())), None)
    if last is None:
        return encoder
    width, caught = layers[last].in_features, encoder.caught
    # Of decoders the logits are for one token: now they are what the last layer reads, there too.
    layers[last].register_forward_hook(lambda layer, inputs, output: inputs[0])
    view = View(INPUT, slice(0, width), bias=layers[last].bias is not None)
    encoder = replace(encoder, dim=width, last=last, views=(view,))
    hidden, activation = HIDDEN_LAYERS.get(encoder.family, ("", None))
    before = layers.get(hidden)
    usual = getattr(module.config, "pooler_hidden_act", activation) == activation
    if before is None or before.bias is None or not usual or not before.in_features == before.out_features == width:
        return encoder
    before.register_forward_pre_hook(lambda layer, inputs: setattr(caught, "inputs", inputs[0]))
    views = (view, View(TOKEN, slice(width, 2 * width), old=False))
    return replace(encoder, dim=2 * width, hidden=hidden, views=views)
