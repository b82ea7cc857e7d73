"""LoRA adapters as models: whose tensor a factor belongs to, which way round, how scaled; and what is refused."""

import math
from pathlib import Path

import pytest
import torch
from adapters import factors, save_adapter
from safetensors.torch import load_file, save_file

from tunable_magmax.checkpoints.adapter import Adapter
from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.checkpoints.tensors import Signature, TensorInfo
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.errors import InputError
from tunable_magmax.merging.methods import read_options

BASE = {"m.q.weight": (6, 4), "m.q.bias": (6,), "m.k.weight": (4, 4), "m.norm.bias": (4,), "head.weight": (3, 4)}


def opened(folder: Path, shapes: dict[str, tuple[int, ...]] = BASE, dtype: str = "F32") -> Adapter:
    """The adapter in folder/adapter on a base with these shapes; headers are all that is asked."""
    base = {name: TensorInfo(name, dtype, shape) for name, shape in shapes.items()}
    return Adapter(folder / "adapter", Signature(dict(sorted(base.items())), {}))


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


def test_tied_tensors_are_one(tmp_path) -> None:
    base = Signature({"embed.weight": TensorInfo("embed.weight", "F32", (6, 4))}, {"out.weight": "embed.weight"})
    one = save_adapter(tmp_path / "one", {"out": factors(6, 4, 2, 0)})
    two = save_adapter(tmp_path / "two", {name: factors(6, 4, 2, 0) for name in ("embed", "out")})
    assert (list(Adapter(one, base).parts), dict(Adapter(one, base).aliases)) == (["embed.weight"], base.aliases)
    with pytest.raises(InputError, match=r"'embed' and 'out' are one tensor in the base, 'embed\.weight'"):
        Adapter(two, base)


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
    with pytest.raises(InputError, match="'q' is square, and the base has both"):
        opened(tmp_path, base)


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"layer_replication": [[0, 4], [2, 5]]},
        {"target_parameters": ["experts.w"]},
        {"init_lora_weights": "pissa_niter_4"},
        {"something_new": {"x": 1}},
        {"use_dora": True, "lora_bias": True, "init_lora_weights": "olora"},
    ],
    ids=str,
)
def test_what_is_not_supported_is_named_at_once(tmp_path, config) -> None:
    configured(tmp_path, **config)
    with pytest.raises(InputError, match=r"adapter_config\.json") as caught:
        opened(tmp_path)
    assert all(key in str(caught.value) for key in config)


@pytest.mark.parametrize(
    ("config", "value"),
    [
        ({"r": 0}, "0"),
        ({"lora_alpha": float("nan")}, "nan"),
        ({"lora_alpha": 10**400}, "401"),
        ({"rank_pattern": {"q": 1.5}}, "rank_pattern.q is 1.5"),
        ({"alpha_pattern": [1]}, "[1]"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "'(a+)+$'"),
        ({"rank_pattern": {"q" * 2000: 1}}, "rank_pattern"),
        ({"use_rslora": "yes"}, "'yes'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_configuration(tmp_path, config, value) -> None:
    configured(tmp_path, **config)
    with pytest.raises(InputError, match=r"adapter_config\.json") as caught:
        opened(tmp_path)
    assert value in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "m.q.lora_magnitude_vector",
        "m.q.lora_B.bias",
        "m.e.lora_embedding_A",
        "m.q.ia3_l",
        "m.e.token_adapter.trainable_tokens_delta",
        "m.k.lora_A.weight",  # without lora_B
        "m.q.lora_A.other.weight",  # of another adapter
        "m.q.base_layer.weight",  # of another shape than the product
    ],
)
def test_tensors_that_are_not_known(tmp_path, name) -> None:
    configured(tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({**load_file(file), f"base_model.model.{name}": torch.ones(4, 6)}, file)
    with pytest.raises(InputError, match=".".join(name.split(".")[:2])) as caught:
        opened(tmp_path)
    assert str(tmp_path / "adapter") in str(caught.value)


@pytest.mark.parametrize(
    ("a", "b", "value"),
    [
        (torch.ones(2, 4), torch.ones(6, 3), "'m.q' has ranks 2 (A) and 3 (B)"),
        (torch.ones(0), torch.ones(6, 2), "[0]"),
        (torch.ones(8), torch.ones(12), "[8]"),
        (torch.ones(2, 4, dtype=torch.int8), torch.ones(6, 2), "I8"),
        (torch.ones(2, 4).to(torch.float8_e4m3fn), torch.ones(6, 2), "F8_E4M3"),
        (torch.ones(2, 4, 3, 3), torch.ones(6, 2, 1, 1), "[2, 4, 3, 3]"),  # of a convolution
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_factors_that_do_not_fit(tmp_path, a, b, value) -> None:
    save_adapter(tmp_path / "adapter", {"m.q": (a, b)}, r=2)
    with pytest.raises(InputError, match=r"m\.q") as caught:
        opened(tmp_path)
    assert value in str(caught.value)


def test_a_quantised_base(tmp_path) -> None:
    configured(tmp_path)
    with pytest.raises(InputError, match=r"'m\.q\.weight'.*quantised"):
        opened(tmp_path, dtype="I8")


def test_what_is_missing_or_too_much_in_the_directory(tmp_path) -> None:
    configured(tmp_path)
    folder = tmp_path / "adapter"
    save_file({"m.q.weight": torch.zeros(6, 4)}, tmp_path / "base.safetensors")
    with pytest.raises(InputError, match=r"adapter_model\.safetensors"):
        Inputs(tmp_path / "base.safetensors", [folder / "adapter_model.safetensors"], read_options(1))
    with pytest.raises(InputError, match="is an adapter"):
        open_checkpoint(folder)
    save_file({"m.q.weight": torch.zeros(6, 4)}, folder / "model.safetensors")
    with pytest.raises(InputError, match="a whole model and an adapter"):
        Inputs(tmp_path / "base.safetensors", [folder], read_options(1))
    (folder / "model.safetensors").unlink()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).rename(tmp_path / "aside")
        with pytest.raises(InputError, match=name):
            opened(tmp_path)
        (tmp_path / "aside").rename(folder / name)
