"""Weights as small files: what is in them, how exact they are, and what is refused."""

import pytest
import safetensors
import safetensors.torch
import torch
from exponentials import exponentials
from small_predictors import OnBackbone
from torch import nn

from chanlab.csi import GRU, load_weights, save_weights, trained_state
from chanlab.errors import ChanlabError, UsageError

K = 8


def gru(seed=0, hidden=64):
    torch.manual_seed(seed)
    model = GRU(K, hidden=hidden)
    nn.init.normal_(model.head.weight)  # zero before training
    return model


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "weights.safetensors"


@pytest.mark.parametrize("bits", [16, 32])
def test_round_trip(path, bits):
    one, two = gru(0), gru(1)
    save_weights(one, path, bits)
    load_weights(two, path)
    for name, value in one.state_dict().items():
        expected = value.half().float() if bits == 16 else value
        assert torch.equal(two.state_dict()[name], expected), name
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing but the file is left"


def test_eight_bits_move_no_entry_by_more_than_half_a_step_of_its_row(path):
    one, two = gru(0), gru(1)
    with torch.no_grad():
        one.gru.weight_hh_l0[0] = 0
        one.gru.weight_hh_l0[1] *= 1e-9
        one.gru.weight_hh_l0[2] *= 1e5
    save_weights(one, path)
    load_weights(two, path)
    for name, value in one.state_dict().items():
        moved = two.state_dict()[name] - value
        if value.ndim < 2 or value.numel() < 4096:
            assert not moved.any(), name
            continue
        bound = value.abs().amax(1) / 253 + 3.1e-8  # half the least float16
        assert (moved.abs().amax(1) <= bound).all(), name
    assert not two.gru.weight_hh_l0[0].any()


def test_whoever_may_read_the_folders_other_files_may_read_weights(path):
    save_weights(gru(), path)
    beside = path.with_name("beside")
    beside.write_bytes(b"")
    assert path.stat().st_mode == beside.stat().st_mode


def test_eight_bits_take_a_quarter(path):
    one = gru(hidden=256)
    save_weights(one, path, 32)
    whole = path.stat().st_size
    save_weights(one, path, 8)
    assert path.stat().st_size < 0.27 * whole


def test_predictions_survive_eight_bits(path):
    one, two = gru(0), gru(1)
    save_weights(one, path)
    load_weights(two, path)
    history = exponentials(num_subcarriers=K, num_steps=16)
    expected = one(history)
    assert (two(history) - expected).abs().square().sum() < 1e-3 * expected.abs().square().sum()


def test_a_file_again_written_from_what_was_read_is_the_same(path):
    one, two = gru(0), gru(1)
    save_weights(one, path, 16)
    first = path.read_bytes()
    load_weights(two, path)
    save_weights(two, path, 16)
    assert path.read_bytes() == first


def test_frozen_weights_with_a_name_are_left_out(path, tiny_llama):
    one, two = OnBackbone(str(tiny_llama)), OnBackbone(str(tiny_llama))
    with torch.no_grad():
        for parameter in one.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    save_weights(one, path, 32)
    trained = {name for name, p in one.named_parameters() if p.requires_grad}
    assert set(safetensors.torch.load_file(path)) == set(trained_state(one)) == trained
    load_weights(two, path)
    history = exponentials(num_subcarriers=K, num_steps=16)
    assert torch.equal(one(history), two(history))


def test_random_frozen_weights_are_kept(path, tiny_llama):
    """No name brings them back."""
    one, two = (OnBackbone(str(tiny_llama), pretrained=False) for _ in range(2))
    save_weights(one, path, 32)
    load_weights(two, path)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


class Others(nn.Module):
    """Buffers, integers, complex numbers, tied weights and a parameter that is called scale."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.BatchNorm1d(4)
        self.norm.num_batches_tracked.fill_(2**40 + seed)
        self.filters = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(64, 64))
        self.tied = self.scale
        self.precise = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.register_buffer("fixed", torch.randn(2), persistent=False)


def test_any_state_is_kept(path):
    one, two = Others(1), Others(2)
    save_weights(one, path, 8)
    load_weights(two, path)
    assert two.norm.num_batches_tracked == 2**40 + 1
    assert (two.filters - one.filters).abs().max() < 0.04
    assert (two.scale - one.scale).abs().max() < 0.02
    assert two.tied is two.scale
    assert two.precise.dtype == torch.float64
    assert not torch.equal(two.fixed, one.fixed)


def test_a_missing_or_foreign_weight_is_named_and_nothing_is_changed(path):
    model = gru(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for other, message in (
        (GRU(K, hidden=64, layers=1), r"lacks gru.bias_hh_l1, .*: build GRU with the arguments"),
        (GRU(K, hidden=64, layers=3), r"has gru.bias_hh_l2, .*, which the module has not"),
        (GRU(K, hidden=32), r"is \[.*\], not \[.*\]: build GRU"),
    ):
        save_weights(other, path)
        with pytest.raises(ChanlabError, match=message):
            load_weights(model, path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_another_backbone_is_refused(path, tmp_path, tiny_llama):
    import transformers

    save_weights(OnBackbone(str(tiny_llama)), path)
    torch.manual_seed(5)
    config = transformers.AutoConfig.from_pretrained(tiny_llama)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ChanlabError, match=r"weights.safetensors was trained on backbone"):
        load_weights(OnBackbone(str(tmp_path / "other")), path)
    with pytest.raises(ChanlabError, match=r"lacks backbone\."):
        load_weights(OnBackbone(str(tiny_llama), pretrained=False), path)


def test_other_files_are_refused(path, tmp_path):
    with pytest.raises(UsageError, match="There are no weights"):
        load_weights(gru(), path)
    (tmp_path / "text").write_text("x")
    with pytest.raises(ChanlabError, match="not a whole safetensors file"):
        load_weights(gru(), tmp_path / "text")
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "foreign")
    with pytest.raises(ChanlabError, match="no weights written by"):
        load_weights(gru(), tmp_path / "foreign")
    save_weights(gru(), path)
    (tmp_path / "cut").write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ChanlabError, match="not a whole safetensors file"):
        load_weights(gru(), tmp_path / "cut")


@pytest.mark.parametrize("bits", [8, 16])
def test_what_fits_no_float16_is_refused(path, bits):
    model = gru()
    with torch.no_grad():
        model.gru.weight_hh_l0[0, 0] = 1e9
    with pytest.raises(ChanlabError, match=r"gru.weight_hh_l0 .* bits=32"):
        save_weights(model, path, bits)
    assert not path.exists()
    with pytest.raises(UsageError, match="8, 16 or 32"):
        save_weights(model, path, 4)
