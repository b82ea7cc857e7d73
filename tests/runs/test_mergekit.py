"""The same YAML gives mergekit's numbers. Needs mergekit-yaml (0.1.5) on PATH, from an environment of its own."""

import copy
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

pytestmark = pytest.mark.stress
MERGEKIT = shutil.which("mergekit-yaml")
CLOSE = 4 * 2**-24
"""In units of a tensor's largest value: two roundings of a float32. mergekit adds in float32, we in float64."""
BY_MODEL = [{"weight": 0.3, "density": 0.37}, {"weight": 1.0, "density": 0.61}, {"weight": 0.7, "density": 1.0}]
CASES = {
    "ties": {"merge_method": "ties"},
    "ties, no normalize": {"merge_method": "ties", "parameters": {"normalize": False}},
    "ties, lambda and int8_mask": {"merge_method": "ties", "parameters": {"lambda": 0.7, "int8_mask": True}},
    "task_arithmetic": {"merge_method": "task_arithmetic"},
    "task_arithmetic, lambda": {"merge_method": "task_arithmetic", "parameters": {"lambda": 0.4}},
    "task_arithmetic, normalize": {"merge_method": "task_arithmetic", "parameters": {"normalize": True}},
    "linear": {"merge_method": "linear"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A base and three tasks of a small language model, in float32."""
    if MERGEKIT is None:
        pytest.skip("mergekit-yaml is not on PATH: pip install mergekit==0.1.5 into an environment of its own")
    import transformers

    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=300, tie_word_embeddings=False, **sizes))
    base.save_pretrained(folder / "base")
    for k in range(3):
        task = copy.deepcopy(base)
        with torch.no_grad():
            for parameter in task.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
        task.save_pretrained(folder / f"task-{k}")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers(models, tmx, tmp_path, name) -> None:
    case = CASES[name]
    listed = []
    for k, parameters in enumerate(BY_MODEL):
        kept = parameters if case["merge_method"] == "ties" else {"weight": parameters["weight"]}
        listed.append({"model": str(models / f"task-{k}"), "parameters": kept})
    config = {**case, "models": listed, "dtype": "float32"}
    if case["merge_method"] != "linear":
        config["base_model"] = str(models / "base")
    file = tmp_path / "merge.yml"
    file.write_text(yaml.safe_dump(config))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    assert MERGEKIT is not None
    command = [MERGEKIT, str(file), str(tmp_path / "theirs"), "--no-copy-tokenizer"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = tmx("merge", file, "-o", tmp_path / "ours", "-q")
    assert result.code == 0, result.err
    ours, theirs = (load_file(tmp_path / made / "model.safetensors") for made in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    differences = {
        tensor: float((values - theirs[tensor]).abs().max() / values.abs().max()) for tensor, values in ours.items()
    }
    worst = max(differences, key=differences.__getitem__)
    elements = sum(int((ours[t] != theirs[t]).sum()) for t in ours)
    print(f"{name}: largest difference {differences[worst]:.2g} of the tensor's largest value; {elements} differ")  # noqa: T201
    assert differences[worst] <= CLOSE
