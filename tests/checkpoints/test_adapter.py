"""LoRA adapters as models: whose tensor a factor belongs to, which way round, how scaled; and what is refused."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from adapters import factors, save_adapter
from safetensors.torch import load_file, save_file

from tunable_magmax.checkpoints.lora.adapter import Adapter, open_task
from tunable_magmax.checkpoints.lora.config import read_adapter_config
from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.checkpoints.tensors import Signature
from tunable_magmax.errors import InputError
from tunable_magmax.merging.layout import build_layout

BASE = {"m.q.weight": (6, 4), "m.q.bias": (6,), "m.k.weight": (4, 4), "m.norm.bias": (4,), "head.weight": (3, 4)}


def opened(folder: Path, shapes: dict[str, tuple[int, ...]] = BASE, adapter: Path | None = None) -> Adapter:
    """The adapter in folder/adapter on a base with these shapes; closed again, since headers are all that is asked."""
    base = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(base, folder / "base.safetensors")
    with open_checkpoint(folder / "base.safetensors") as checkpoint:
        task = open_task(adapter or folder / "adapter", checkpoint)
        task.close()
    assert isinstance(task, Adapter)
    return task


def configured(folder: Path, **config: object) -> Path:
    return save_adapter(folder / "adapter", {"m.q": factors(6, 4, 2, 0)}, **config)


# -- scaling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({"lora_alpha": 3}, 1.5),
        ({"lora_alpha": 3, "use_rslora": True}, 3 / math.sqrt(2)),
        ({"lora_alpha": 0.5}, 0.25),
        ({"lora_alpha": 3, "alpha_pattern": {"q": 8}}, 4.0),
        ({"lora_alpha": 3, "alpha_pattern": {"m.q": 8}}, 4.0),
        ({"lora_alpha": 3, "alpha_pattern": {"^m.q": 8}}, 4.0),
        ({"lora_alpha": 3, "alpha_pattern": {r"m\.q": 8, "q": 10}}, 4.0),  # the first that matches
        ({"lora_alpha": 3, "alpha_pattern": {"m": 8, "xq": 8, "k": 8}}, 1.5),  # none is the module or its end
        ({"lora_alpha": 3, "r": 16, "rank_pattern": {"q": 2}}, 1.5),
        ({"lora_alpha": 3, "r": 16, "rank_pattern": {"q": 2}, "use_rslora": True}, 3 / math.sqrt(2)),
    ],
    ids=str,
)
def test_scaling(tmp_path, config, scaling) -> None:
    configured(tmp_path, **config)
    assert opened(tmp_path).parts["m.q.weight"].product.scaling == scaling


def test_pattern_of_a_rank_that_is_not_the_stored_one(tmp_path) -> None:
    configured(tmp_path, r=2, rank_pattern={"q": 8})
    with pytest.raises(InputError, match=r"'m\.q' has ranks 2 \(A\) and 2 \(B\), and 8 by adapter_config\.json"):
        opened(tmp_path)


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ["", "default", "birds"])
@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
@pytest.mark.parametrize("torch_file", [False, True])
def test_forms_of_names(tmp_path, adapter, prefix, torch_file) -> None:
    whole = {"head.weight": torch.ones(3, 4), "m.q.base_layer.bias": torch.ones(6)}
    save_adapter(
        tmp_path / "adapter",
        {"m.q": factors(6, 4, 2, 0)},
        whole=whole,
        adapter=adapter,
        prefix=prefix,
        torch_file=torch_file,
    )
    task = opened(tmp_path)
    assert {name: (part.whole is not None, part.product is not None) for name, part in task.parts.items()} == {
        "m.q.weight": (False, True),
        "m.q.bias": (True, False),
        "head.weight": (True, False),
    }
    assert list(task.tensors) == sorted(BASE)
    assert [file.name for file in task.files][1:] == ["adapter_config.json"]


def test_name_of_an_adapter_in_a_saved_module(tmp_path) -> None:
    whole = {"head.modules_to_save.default.weight": torch.ones(3, 4)}
    save_adapter(tmp_path / "adapter", {"m.q": factors(6, 4, 2, 0)}, whole=whole, adapter="default")
    assert set(opened(tmp_path).parts) == {"m.q.weight", "head.weight"}


@pytest.mark.parametrize(
    ("names", "module", "found"),
    [
        (["h.0.q.weight"], "transformer.h.0.q", "h.0.q.weight"),
        (["bert.h.0.q.weight"], "h.0.q", "bert.h.0.q.weight"),
        (["a.model.h.0.q.weight"], "h.0.q", "a.model.h.0.q.weight"),
        (["text.h.0.q.weight", "vision.h.0.q.weight"], "h.0.q", None),  # either could be meant
        (["h.0.q.weight", "model.h.0.q.weight"], "h.0.q", "h.0.q.weight"),
        (["h.1.q.weight"], "transformer.h.0.q", None),
    ],
    ids=str,
)
def test_one_prefix_more_or_less(tmp_path, names, module, found) -> None:
    save_adapter(tmp_path / "adapter", {module: factors(6, 4, 2, 0)})
    task = opened(tmp_path, dict.fromkeys(names, (6, 4)))
    assert set(task.parts) == {found or f"{module}.weight"}


def test_a_prefix_is_found_although_one_name_is_wrong(tmp_path) -> None:
    layers = {"model.h.0.kk": factors(6, 4, 2, 0), "model.h.0.q": factors(6, 4, 2, 0)}
    save_adapter(tmp_path / "adapter", layers)
    assert set(opened(tmp_path, {"h.0.q.weight": (6, 4)}).parts) == {"h.0.q.weight", "model.h.0.kk.weight"}


def test_a_head_may_have_no_prefix_when_the_body_has_one(tmp_path) -> None:
    save_adapter(tmp_path / "adapter", {"bert.q": factors(6, 4, 2, 0)}, whole={"head.weight": torch.ones(3, 4)})
    assert set(opened(tmp_path, {"q.weight": (6, 4), "head.weight": (3, 4)}).parts) == {"q.weight", "head.weight"}


def test_what_the_base_lacks_is_named_with_the_closest(tmp_path) -> None:
    save_adapter(tmp_path / "adapter", {"m.qq": factors(6, 4, 2, 0), "m.k": factors(4, 4, 2, 1)})
    task = opened(tmp_path)
    signatures = [Signature({n: task.tensors[n] for n in BASE}, {}), Signature(task.tensors, {})]
    with pytest.raises(InputError, match=r"task has 'm\.qq\.weight', which the base lacks \(did you mean 'm\.q\.weigh"):
        build_layout(signatures, ["base", "task"])
    assert len(build_layout(signatures, ["base", "task"], exclude=["m.qq.*"]).mergeable) == len(BASE)


def test_tied_tensors_are_one(tmp_path) -> None:
    tied = torch.zeros(6, 4)
    torch.save({"embed.weight": tied, "out.weight": tied}, tmp_path / "base.pt")
    one = save_adapter(tmp_path / "one", {"out": factors(6, 4, 2, 0)})
    two = save_adapter(tmp_path / "two", {"out": factors(6, 4, 2, 0)}, embeddings={"embed": factors(4, 6, 2, 0)})
    with open_checkpoint(tmp_path / "base.pt") as base:
        with open_task(one, base) as task:
            assert isinstance(task, Adapter)
            assert (list(task.parts), dict(task.aliases)) == (["embed.weight"], {"out.weight": "embed.weight"})
        with pytest.raises(InputError, match=r"'embed' and 'out' are one tensor in the base, 'embed\.weight', but"):
            open_task(two, base)


# -- which way round --------------------------------------------------------------------------------------------------

LINEAR, CONV1D = {"f.weight": (8, 4), "f.bias": (8,)}, {"f.weight": (4, 8), "f.bias": (8,)}


@pytest.mark.parametrize(
    ("base", "adapted", "flag", "transposed"),
    [
        ({"q.weight": (6, 4)}, {"q": (6, 4)}, True, {"q": False}),  # the shape knows better
        ({"q.weight": (4, 6)}, {"q": (6, 4)}, False, {"q": True}),
        ({"q.weight": (4, 4)}, {"q": (4, 4)}, False, {"q": False}),
        ({"q.weight": (4, 4)}, {"q": (4, 4)}, True, {"q": True}),
        ({"q.weight": (4, 4), **LINEAR}, {"q": (4, 4)}, True, {"q": False}),
        ({"q.weight": (4, 4), **CONV1D}, {"q": (4, 4)}, False, {"q": True}),
        ({"q.weight": (4, 4), "v.weight": (4, 6)}, {"q": (4, 4), "v": (6, 4)}, False, {"q": True, "v": True}),
        # GPT-2 with an adapted lm_head, after which PEFT writes fan_in_fan_out: false
        (
            {"q.weight": (4, 4), "o.weight": (9, 4), **CONV1D},
            {"q": (4, 4), "o": (9, 4)},
            False,
            {"q": True, "o": False},
        ),
    ],
    ids=str,
)
def test_direction(tmp_path, base, adapted, flag, transposed) -> None:
    layers = {name: factors(*shape, 2, 0) for name, shape in adapted.items()}
    save_adapter(tmp_path / "adapter", layers, fan_in_fan_out=flag)
    parts = opened(tmp_path, base).parts
    assert {name: parts[f"{name}.weight"].product.transposed for name in adapted} == transposed


def test_a_direction_that_nobody_knows(tmp_path) -> None:
    save_adapter(tmp_path / "adapter", {"q": factors(4, 4, 2, 0)})
    base = {"q.weight": (4, 4), "v.weight": (6, 4), "v.bias": (6,), **CONV1D}
    with pytest.raises(InputError, match=r"'q' is square, and the base has layers of both directions"):
        opened(tmp_path, base)


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', and only 'LORA'"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"peft_type": "LOKR"}, "peft_type is 'LOKR'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"use_dora": True}, "use_dora asks for DoRA"),
        ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication asks for layer replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices asks for trainable tokens"),
        ({"lora_bias": True}, "lora_bias asks for LoRA with a bias"),
        ({"target_parameters": ["experts.w"]}, "target_parameters asks for"),
        ({"alora_invocation_tokens": [7]}, "alora_invocation_tokens asks for activated LoRA"),
        ({"use_qalora": True}, "use_qalora asks for QALoRA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which starts from a changed base"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights is 'corda'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"something_new": {"x": 1}}, "something_new is {'x': 1}, a key unknown here"),
    ],
    ids=str,
)
def test_not_supported(tmp_path, config, text) -> None:
    configured(tmp_path, **config)
    with pytest.raises(InputError) as caught:
        opened(tmp_path)
    assert f"adapter_config.json: {text}" in str(caught.value)
    assert "merge_and_unload, and give the merged checkpoint as the task" in str(caught.value)


def test_all_that_is_not_supported_is_named_at_once(tmp_path) -> None:
    configured(tmp_path, use_dora=True, layer_replication=[[0, 1]], init_lora_weights="olora")
    with pytest.raises(InputError, match=r"DoRA; layer_replication .*; init_lora_weights is 'olora'"):
        opened(tmp_path)


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_starts_that_leave_the_base_alone(tmp_path, start) -> None:
    configured(tmp_path, init_lora_weights=start, use_dora=False, layer_replication=None, something_new=None)
    assert list(opened(tmp_path).parts) == ["m.q.weight"]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"r": 0}, "r and rank_pattern must be greater than 0, found 0"),
        ({"r": True}, "r is True"),
        ({"r": "8"}, "r is '8'"),
        ({"lora_alpha": None}, "lora_alpha is None: must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha and alpha_pattern must be finite numbers, found nan"),
        ({"lora_alpha": 10**400}, "a number has 401 digits"),
        ({"rank_pattern": {"q": 1.5}}, "rank_pattern.q is 1.5: must be a whole number"),
        ({"alpha_pattern": [1]}, "alpha_pattern is [1]: must be a mapping"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "'(a+)+$'"),
        ({"rank_pattern": {"q" * 2000: 1}}, "rank_pattern"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes': must be true or false"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_configuration(tmp_path, config, text) -> None:
    configured(tmp_path, **config)
    with pytest.raises(InputError) as caught:
        opened(tmp_path)
    assert text in str(caught.value)
    assert "adapter_config.json" in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '"LORA"', "\x00", "[" * 100_000])
def test_a_configuration_that_is_none(tmp_path, content) -> None:
    configured(tmp_path)
    (tmp_path / "adapter" / "adapter_config.json").write_text(content)
    with pytest.raises(InputError, match=r"adapter_config\.json.*: download or save it again"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("m.q.lora_magnitude_vector", torch.ones(6), "belongs to DoRA"),
        ("m.q.lora_magnitude_vector.default.weight", torch.ones(6), "belongs to DoRA"),
        ("m.q.lora_B.bias", torch.ones(6), "is not a factor of LoRA"),
        ("m.q.ia3_l", torch.ones(6), "is not a factor of LoRA"),
        ("m.q.lora_E", torch.ones(6), "is not a factor of LoRA"),
        ("m.e.token_adapter.trainable_tokens_delta", torch.ones(6), "is not a factor of LoRA"),
        ("m.k.lora_A.weight", torch.ones(2, 4), "'m.k' has no lora_B"),
        ("m.q.lora_A.other.weight", torch.ones(2, 4), "is stored twice, also as"),
        ("m.k.lora_A.other.weight", torch.ones(2, 4), "it holds several adapters"),
        ("m.q.base_layer.weight", torch.ones(4, 6), "has shape [4, 6], but the product of its factors [6, 4]"),
    ],
    ids=str,
)
def test_tensors_that_are_not_known(tmp_path, name, tensor, text) -> None:
    configured(tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({**load_file(file), f"base_model.model.{name}": tensor}, file)
    with pytest.raises(InputError) as caught:
        opened(tmp_path)
    assert text in str(caught.value)
    assert str(tmp_path / "adapter") in str(caught.value)


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (torch.ones(2, 4), torch.ones(6, 3), "'m.q' has ranks 2 (A) and 3 (B), and 2 by"),
        (torch.ones(0), torch.ones(6, 2), "has shape [0]: a shard, or empty; gather all shards"),
        (torch.ones(8), torch.ones(12), "has shape [8]: a shard"),
        (torch.ones(2, 4, dtype=torch.int8), torch.ones(6, 2), "has type I8, expected a floating-point type"),
        (torch.ones(2, 4).to(torch.float8_e4m3fn), torch.ones(6, 2), "has type F8_E4M3"),
        (torch.ones(2, 4, 3, 3), torch.ones(6, 2, 3, 3), "has shape [6, 2, 3, 3], expected [out, rank], with 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_factors_that_do_not_fit(tmp_path, a, b, text) -> None:
    save_adapter(tmp_path / "adapter", {"m.q": (a, b)}, r=2)
    with pytest.raises(InputError) as caught:
        opened(tmp_path)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("base", "text"),
    [
        ({"q.weight": torch.zeros(12, 1, dtype=torch.uint8)}, "the base's 'q.weight' has type U8: it is quantised"),
        ({"q.weight": torch.zeros(6, 4, dtype=torch.int8)}, "the base's 'q.weight' has type I8: it is quantised"),
        ({"q.qweight": torch.zeros(1, 6, dtype=torch.int32)}, "the base has 'q.qweight' instead of 'q.weight': it is"),
    ],
    ids=str,
)
def test_a_quantised_base(tmp_path, base, text) -> None:
    save_file(base, tmp_path / "base.safetensors")
    adapter = save_adapter(tmp_path / "adapter", {"q": factors(6, 4, 2, 0)})
    with open_checkpoint(tmp_path / "base.safetensors") as checkpoint, pytest.raises(InputError) as caught:
        open_task(adapter, checkpoint)
    assert text in str(caught.value)


def test_what_is_missing_or_too_much_in_the_directory(tmp_path) -> None:
    configured(tmp_path)
    folder = tmp_path / "adapter"
    with pytest.raises(InputError, match="holds the weights of an adapter alone: give its directory"):
        opened(tmp_path, adapter=folder / "adapter_model.safetensors")
    with pytest.raises(InputError, match="is an adapter, which is a model only together with its base"):
        open_checkpoint(folder)
    save_file({"m.q.weight": torch.zeros(6, 4)}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"holds a whole model and an adapter \(adapter_model\.safetensors\)"):
        opened(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").rename(folder / "kept.json")
    with pytest.raises(InputError, match=r"adapter_config\.json is missing, and without it the scaling is not known"):
        opened(tmp_path)
    (folder / "kept.json").rename(folder / "adapter_config.json")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(
        InputError, match=r"has adapter_config\.json but no adapter_model\.safetensors or adapter_model"
    ):
        opened(tmp_path)


def test_pickles_are_read_weights_only(tmp_path) -> None:
    configured(tmp_path)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    torch.save({"q.lora_A.weight": os.system}, tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(InputError, match="which runs code when it is loaded"):
        opened(tmp_path)


PEFT_WRITES = """
{"alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": {"base_model_class": "X"},
"base_model_name_or_path": null, "bias": "none", "corda_config": null, "ensure_weight_tying": false, "eva_config": null,
"exclude_modules": null, "fan_in_fan_out": true, "inference_mode": true, "init_lora_weights": true, "kasa_config": null,
"layer_replication": null, "layers_pattern": null, "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 3,
"lora_bias": false, "lora_dropout": 0.1, "lora_ga_config": null, "megatron_config": null, "megatron_core":
"megatron.core", "modules_to_save": null, "monteclora_config": null, "peft_type": "LORA", "peft_version": "0.21.2",
"qalora_group_size": 16, "r": 2, "rank_pattern": {}, "revision": null, "target_modules": ["q"], "target_parameters":
null, "task_type": "CAUSAL_LM", "trainable_token_indices": null, "use_bdlora": null, "use_dora": false, "use_qalora":
false, "use_rslora": false, "velora_config": null}
"""


def test_a_configuration_as_peft_writes_it(tmp_path) -> None:
    (tmp_path / "adapter_config.json").write_text(PEFT_WRITES)
    assert read_adapter_config(tmp_path / "adapter_config.json").scaling("q") == 1.5
