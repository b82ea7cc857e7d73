"""PEFT as the oracle: its own adapters, saved by it, stand for what its merge_and_unload makes of the base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tunable_magmax.engines.local import merge_checkpoints

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own: of fan_in_fan_out and of tied weights
peft = pytest.importorskip("peft", reason="PEFT is not installed (it is in the extra dev)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (it is in the extra dev)")


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


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 5, 4), nn.Conv2d(3, 6, (3, 2)), nn.Conv2d(4, 6, 1), nn.Linear(5, 5))


CASES: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "r": 3}),
    (gpt2, {"target_modules": ["c_proj"], "r": 3, "bias": "lora_only"}),
    (gpt2, {"target_modules": ["c_attn"], "r": 3, "bias": "all", "lora_alpha": 5}),
    (gpt2, {"target_modules": ["wte", "wpe"], "r": 2}),
    (bert, {"target_modules": ["query", "value"], "r": 4, "task_type": "SEQ_CLS", "use_rslora": True}),
    (bert, {"target_modules": "all-linear", "r": 4, "lora_alpha": 1, "modules_to_save": ["classifier"]}),
    (
        llama,
        {
            "target_modules": ["q_proj", "k_proj", "down_proj", "embed_tokens", "lm_head"],
            "r": 4,
            "rank_pattern": {"k_proj": 2, "model.layers.1.self_attn.q_proj": 6, "embed_tokens": 3},
            "alpha_pattern": {"layers.0.mlp.down_proj": 32, "q_proj": 3.5},
            "use_rslora": True,
        },
    ),
    (llama, {"target_modules": ["gate_proj"], "r": 2, "init_lora_weights": "orthogonal"}),
    (convolutions, {"target_modules": ["0", "1", "2", "3"], "r": 4}),
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
