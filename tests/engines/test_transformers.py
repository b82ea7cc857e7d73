"""A merged Hugging Face directory loads with `from_pretrained`, and computes what the merged state dict computes."""

import pytest
import torch
import transformers
from models import tiny

import tunable_magmax

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours to mend

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def answer(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS)[0]


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "GPT2LMHeadModel"])
def test_a_merge_loads_and_computes_what_it_should(tmx, tmp_path, architecture, kind):
    """`bin`: saved by `torch.save`, where tied tensors have all their names."""
    model = tiny.classifier("bert" if "Bert" in architecture else "gpt2", None, 0, architecture)
    states = []
    for k in range(3):
        model = tiny.changed(model, 0.05 * bool(k), seed=k)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        model.save_pretrained(tmp_path / str(k))
        if kind == "bin":
            (tmp_path / str(k) / "model.safetensors").unlink()
            torch.save(model.state_dict(), tmp_path / str(k) / "pytorch_model.bin")
    tasks, out = ["--task", tmp_path / "1", "--task", tmp_path / "2"], tmp_path / "merged"
    done = tmx("merge", "--base", tmp_path / "0", *tasks, "--weights", "3,1", "--shard-size", "8KB", "-o", out)
    assert done.code == 0, done.err
    assert (out / "model.safetensors.index.json").exists()

    # The oracle merges the parameters, where tied tensors are one and the same, and loads them into the model.
    last = answer(model)
    names = {name for name, _ in model.named_parameters()}
    base, *others = [{name: state[name] for name in names} for state in states]
    expected = tunable_magmax.merge_state_dicts(base, others, weights=[3, 1]).state_dict
    loaded, told = getattr(transformers, architecture).from_pretrained(out, output_loading_info=True)
    assert not any(told.values()), told
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, expected[name]), name
    model.load_state_dict(expected, strict=False)
    assert torch.equal(answer(loaded), answer(model))
    assert not torch.equal(answer(loaded), last)
