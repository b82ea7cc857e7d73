"""A merged Hugging Face directory loads with `from_pretrained`, and computes what the merged state dict computes."""

import pytest
import torch
import transformers

import tunable_magmax

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours to mend

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def bert():
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    return transformers.BertForMaskedLM(config), {"input_ids": TOKENS}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": TOKENS}


def answer(model, inputs):
    model.eval()
    with torch.no_grad():
        return model(**inputs)[0]


def save(model, folder, kind):
    """As transformers saves it; `bin`: as `torch.save` of the state dict, where tied tensors have all their names."""
    model.save_pretrained(folder)
    if kind == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")


@pytest.fixture
def saved(tmp_path):
    """Saves a base and two tasks: the last model, the folders, their state dicts, and inputs to compute with."""

    def make(build, kind):
        torch.manual_seed(0)
        model, inputs = build()
        state_dicts = []
        for k in range(3):
            if k:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter += 0.05 * torch.randn_like(parameter)
            save(model, tmp_path / str(k), kind)
            state_dicts.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return model, [tmp_path / str(k) for k in range(3)], state_dicts, inputs

    return make


@pytest.mark.parametrize(("build", "kind"), [(bert, "bin"), (gpt2, "safetensors"), (gpt2, "bin")])
def test_a_merge_loads_and_computes_what_it_should(tmx, tmp_path, saved, build, kind):
    model, folders, state_dicts, inputs = saved(build, kind)
    tasks = [part for folder in folders[1:] for part in ("--task", folder)]
    out = tmp_path / "merged"
    done = tmx("merge", "--base", folders[0], *tasks, "--weights", "3,1", "--shard-size", "8KB", "-o", out)
    assert done.code == 0, done.err
    assert (out / "model.safetensors.index.json").exists()

    # The oracle merges the parameters, where tied tensors are one and the same, and loads them into the model.
    model.tie_weights()
    names = {name for name, _ in model.named_parameters()}
    base, *others = [{n: t for n, t in state_dict.items() if n in names} for state_dict in state_dicts]
    expected = tunable_magmax.merge_state_dicts(base, others, weights=[3, 1]).state_dict
    loaded, report = type(model).from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, expected[name]), name
    model.load_state_dict(expected, strict=False)
    assert torch.equal(answer(loaded, inputs), answer(model, inputs))
    assert not torch.equal(answer(loaded, inputs), answer(type(model).from_pretrained(folders[2]), inputs))
