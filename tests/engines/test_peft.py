"""PEFT as the oracle: its own adapters stand for what its merge_and_unload makes of the base, and it loads ours."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError
from tunable_magmax.merging.state_dicts import merge_state_dicts
from tunable_magmax.runs.recipe import read_recipe
from tunable_magmax.workflows.verify import verify_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own: of fan_in_fan_out and of tied weights


def gpt2() -> nn.Module:
    """Conv1D layers, one of them square; the head is tied to the embedding."""
    size = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 8}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**size, vocab_size=30))


def llama() -> nn.Module:
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**size, intermediate_size=24, vocab_size=30, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config)


CASES: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "r": 3}),
    (gpt2, {"target_modules": ["c_proj"], "r": 3, "bias": "lora_only"}),
    (gpt2, {"target_modules": ["c_attn"], "r": 3, "bias": "all", "lora_alpha": 5}),
    (bert, {"target_modules": ["query", "value"], "r": 4, "task_type": "SEQ_CLS", "use_rslora": True}),
    (bert, {"target_modules": "all-linear", "r": 4, "lora_alpha": 1, "modules_to_save": ["classifier"]}),
    (
        llama,
        {
            "target_modules": ["q_proj", "k_proj", "down_proj", "lm_head"],
            "r": 4,
            "rank_pattern": {"k_proj": 2, "model.layers.1.self_attn.q_proj": 6},
            "alpha_pattern": {"layers.0.mlp.down_proj": 32, "q_proj": 3.5},
            "use_rslora": True,
        },
    ),
    (llama, {"target_modules": ["gate_proj"], "r": 2, "init_lora_weights": "orthogonal"}),
]


def trained(model: nn.Module, config: dict[str, Any]) -> Any:
    """A PEFT model all of whose own parameters have been moved from where they began."""
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**config))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * 0.1
    return adapted


def distinct(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict without second names of tied tensors, as a Hugging Face checkpoint has it."""
    found: dict[int, str] = {}
    return {n: v.clone() for n, v in model.state_dict().items() if found.setdefault(v.data_ptr(), n) == n}


@pytest.mark.parametrize(("make", "config"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_equals_merge_and_unload(make, config, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make()
    base = distinct(model)
    save_file(base, tmp_path / "base.safetensors")
    adapted = trained(model, config)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    out = tmp_path / "out.safetensors"
    report = merge_checkpoints(tmp_path / "base.safetensors", [tmp_path / "adapter"], out, method="last_task", scale=1)
    wanted, found = distinct(adapted.merge_and_unload()), load_file(out)
    assert found.keys() == wanted.keys()
    changed = {name for name, value in wanted.items() if not torch.equal(value, base[name])}
    assert set(report.tensors) == changed
    assert changed
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


def adapters(make: Callable[[], nn.Module], folder: Path, *configs: dict[str, Any]) -> tuple[Path, list[Path]]:
    """The checkpoint of a model and adapters on it, trained apart."""
    torch.manual_seed(0)
    state = distinct(model := make())
    save_file(state, folder / "base.safetensors")
    tasks = [folder / f"task-{k}" for k in range(len(configs))]
    for k, (task, config) in enumerate(zip(tasks, configs, strict=True), 1):
        adapted = trained(copy.deepcopy(model), config)
        with torch.no_grad():
            for parameter in adapted.parameters():
                parameter *= k if parameter.requires_grad else 1
        adapted.save_pretrained(task, save_embedding_layers=False)
    return folder / "base.safetensors", tasks


def loaded(make: Callable[[], nn.Module], base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The state that PEFT makes of a base and an adapter."""
    model = make()
    model.load_state_dict(load_file(base), strict=False)
    return distinct(peft.PeftModel.from_pretrained(model, adapter).merge_and_unload())


LINEAR = [
    (gpt2, {"target_modules": ["c_attn", "c_proj"]}),
    (bert, {"target_modules": ["query", "value"], "task_type": "FEATURE_EXTRACTION"}),
    (llama, {"target_modules": ["q_proj", "k_proj", "down_proj"], "task_type": "CAUSAL_LM"}),
]


@pytest.mark.parametrize(("make", "config"), LINEAR, ids=lambda value: getattr(value, "__name__", None))
def test_an_adapter_of_enough_rank_is_the_merge(make, config, tmp_path: Path) -> None:
    base, tasks = adapters(make, tmp_path, {**config, "r": 2}, {**config, "r": 3})
    options: dict[str, Any] = {"method": "average", "weights": [1, 3], "scale": 0.7}
    merge_checkpoints(base, tasks, tmp_path / "whole.safetensors", **options)
    report = merge_checkpoints(base, tasks, tmp_path / "out", adapter=5, **options)
    assert report.reduced is not None
    assert report.reduced["error"] <= report.reduced["worst_error"] < 1e-6
    found, wanted = loaded(make, base, tmp_path / "out"), load_file(tmp_path / "whole.safetensors")
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["task_type"]) == (5, 5, config.get("task_type"))
    assert written["auto_mapping"] == json.loads((tasks[0] / "adapter_config.json").read_text())["auto_mapping"]
    names = {"adapter_config.json", "adapter_model.safetensors", "tmx-report.json", "tmx-config.yaml", "README.md"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    # It can be a task again, and its report and configuration are those of any merge.
    merge_checkpoints(base, [tmp_path / "out"], tmp_path / "again.safetensors", method="last_task", scale=1)
    for name, value in load_file(tmp_path / "again.safetensors").items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
    assert verify_checkpoint(tmp_path / "out").ok
    assert read_recipe(tmp_path / "out" / "tmx-config.yaml").options["adapter"] == 5


@pytest.mark.parametrize("method", ["tunable_magmax", "tsv"])
def test_the_report_says_what_a_lower_rank_lacks(method, tmp_path: Path) -> None:
    config = {"target_modules": ["q_proj", "k_proj"]}
    base, tasks = adapters(llama, tmp_path, {**config, "r": 2}, {**config, "r": 3})
    start = load_file(base)
    merge_checkpoints(base, tasks, tmp_path / "whole.safetensors", method=method)
    whole = load_file(tmp_path / "whole.safetensors")
    before = 1.0
    for rank in (1, 3, 8):
        report = merge_checkpoints(base, tasks, tmp_path / f"out-{rank}", method=method, adapter=rank)
        found = loaded(llama, base, tmp_path / f"out-{rank}")
        squares = {
            n: (((found[n] - v) ** 2).sum().item(), ((v - start[n]) ** 2).sum().item()) for n, v in whole.items()
        }
        errors = {name: (lost / step) ** 0.5 for name, (lost, step) in squares.items() if step}
        assert report.reduced is not None
        lost, step = (sum(parts) for parts in zip(*squares.values(), strict=True))
        assert report.reduced["error"] == pytest.approx((lost / step) ** 0.5, abs=1e-5)
        assert report.reduced["worst_error"] == pytest.approx(max(errors.values()), abs=1e-5)
        assert errors[report.reduced["worst"]] == pytest.approx(max(errors.values()), abs=1e-5)
        assert report.reduced["error"] < before
        before = report.reduced["error"]
        best = {n: torch.linalg.svdvals((whole[n] - start[n]).double())[rank:] for n in errors}
        assert lost == pytest.approx(sum(float((rest**2).sum()) for rest in best.values()), rel=1e-3, abs=1e-8)


@pytest.mark.parametrize(
    ("config", "rank", "value"),
    [
        ({"target_modules": ["query"], "modules_to_save": ["classifier"], "task_type": "SEQ_CLS"}, 2, "'classifier"),
        ({"target_modules": ["query"], "bias": "lora_only"}, 2, "query.bias'"),
        ({"target_modules": ["query", "word_embeddings"]}, 2, "word_embeddings"),
        ({"target_modules": ["query"]}, 17, "rank is 17"),
        ({"target_modules": ["query"]}, 0, "adapter is 0"),
    ],
)
def test_what_cannot_stay_an_adapter_is_refused(config, rank, value, tmp_path: Path) -> None:
    base, tasks = adapters(bert, tmp_path, {**config, "r": 2})
    with pytest.raises(InputError, match=value):
        merge_checkpoints(base, tasks, tmp_path / "out", adapter=rank)
    assert not (tmp_path / "out").exists()


def test_a_whole_model_among_the_tasks_and_other_outputs_are_refused(tmp_path: Path) -> None:
    base, tasks = adapters(bert, tmp_path, {"target_modules": ["query"], "r": 2})
    shutil.copy(base, tmp_path / "copy.safetensors")
    with pytest.raises(InputError, match="task 2"):
        merge_checkpoints(base, [*tasks, tmp_path / "copy.safetensors"], tmp_path / "out", adapter=2)
    with pytest.raises(InputError, match="adapter"):
        merge_checkpoints(base, tasks, tmp_path / "out.safetensors", adapter=2)
    with pytest.raises(InputError, match="adapter"):
        merge_state_dicts({"w": torch.zeros(2, 2)}, [{"w": torch.ones(2, 2)}], adapter=1)
