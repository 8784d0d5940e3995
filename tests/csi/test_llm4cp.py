"""LLM4CP: what the paper defines, what its ablations share, and that no defect of its public code is repeated."""

import pytest
import torch
from exponentials import exponentials, noisy
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from chanlab.csi import LLM4CP, CSIPredictionModule, load_predictor, save_weights
from chanlab.csi.llm4cp import Branch, CSIAttention, ResidualBlock, planes, sinusoids
from chanlab.csi.module import nmse_loss
from chanlab.data import CSIBatch, CSIDataModule, CSIWindows
from chanlab.errors import UsageError

transformers = pytest.importorskip("transformers")
T, H, K = 16, 4, 12
SMALL = {"layers": 2, "features": 8, "blocks": 1, "dropout": 0.0}


@pytest.fixture(scope="module")
def make(tiny_llama):
    def build(num_subcarriers=K, **options) -> LLM4CP:
        torch.manual_seed(0)
        return LLM4CP(num_subcarriers, **{"backbone": str(tiny_llama), "matched_width": 16} | SMALL | options).eval()

    return build


@pytest.fixture
def config_folder(tmp_path):
    """A folder with nothing but the configuration of a language model: enough for random weights."""

    def write(config) -> str:
        config.save_pretrained(tmp_path)
        return str(tmp_path)

    return write


@pytest.fixture(params=["llama", "random", "no language model"])
def variant(request, make):
    return make(
        **{"llama": {}, "random": {"pretrained": False}, "no language model": {"backbone": None}}[request.param]
    )


def window(batch=3, num_tx=4, num_rx=2, seed=0, **options):
    channels = exponentials(batch, num_tx=num_tx, num_rx=num_rx, num_steps=T + H, num_subcarriers=K, seed=seed)
    return noisy(channels[..., :T, :], 15)[0], channels[..., T:, :]


def trained(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


# Published definitions


def test_prediction_has_the_shape_of_the_target(variant):
    history, target = window()
    assert variant(history).shape == target.shape
    assert variant(history).dtype == torch.complex64


def test_size_is_the_published_one(config_folder):
    """48 subcarriers on GPT-2: 82.9 M parameters, its table of tokens (not kept here) counted, and 1.8 M trained."""
    predictor = LLM4CP(48, backbone=config_folder(transformers.GPT2Config()), pretrained=False)
    table = 50257 * 768
    assert round((sum(p.numel() for p in predictor.parameters()) + table) / 1e6, 1) == 82.9
    assert round(trained(predictor) / 1e6, 1) == 1.8


def test_of_gpt2_norms_and_positions_are_trained(config_folder, make):
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_positions=32)
    predictor = make(backbone=config_folder(config), pretrained=False)
    names = {name for name, p in predictor.backbone.named_parameters() if p.requires_grad}
    assert all(".ln_" in name or "wpe" in name for name in names)
    assert len(names) == 2 * (2 * 2 + 1) + 1, "weights and biases of two norms a layer and the last; positions"


def test_of_a_llama_norms_are_trained(make):
    names = {name for name, p in make().backbone.named_parameters() if p.requires_grad}
    assert all("norm" in name for name in names)
    assert len(names) == 2 * 2 + 1


def test_training_moves_what_is_trained_and_nothing_else(make):
    predictor = make(dropout=0.1).train()
    before = {name: p.detach().clone() for name, p in predictor.named_parameters()}
    optimizer = torch.optim.SGD([p for p in predictor.parameters() if p.requires_grad], lr=1.0)
    history, target = window()
    nmse_loss(predictor(history), target).backward()
    optimizer.step()
    for name, parameter in predictor.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name


def test_patches_of_four_snapshots_share_a_linear_layer():
    branch = Branch(4, 8, 1)
    branch.convolutions = nn.Identity()
    image = torch.randn(2, 2, T, K)
    mixed = branch(image)
    for start in range(0, T, 4):
        patch = image[:, :, start : start + 4]
        expected = torch.einsum("ij,spjk->spik", branch.patch.weight, patch) + branch.patch.bias[:, None]
        torch.testing.assert_close(mixed[:, :, start : start + 4], expected)


def test_csi_attention_is_one_gate_for_each_feature_map():
    attention, maps = CSIAttention(8), torch.randn(3, 8, T, K)
    gate = attention.gate(maps)
    assert gate.shape == (3, 8)
    assert ((gate > 0) & (gate < 1)).all()
    torch.testing.assert_close(attention(maps), maps * gate[:, :, None, None])
    mean, peak = maps.mean((2, 3)), maps.amax((2, 3))
    hidden = [torch.relu(x @ attention.squeeze.weight.T) @ attention.excite.weight.T for x in (mean, peak)]
    torch.testing.assert_close(gate, torch.sigmoid(hidden[0] + hidden[1]))


def test_a_branch_has_four_residual_blocks_of_64_maps_and_each_adds_to_its_input(make):
    convolutions = make(features=64, blocks=4).frequency.convolutions
    assert [type(m) for m in convolutions] == [nn.Conv2d, *[ResidualBlock] * 4, nn.Conv2d]
    assert convolutions[0].out_channels == 64
    block, x = convolutions[1], torch.randn(2, 64, T, K)
    nn.init.zeros_(block.second.weight)
    nn.init.zeros_(block.second.bias)
    assert torch.equal(block(x), x)


def test_branches_see_frequency_and_delay(make):
    """A channel of one delay tap: flat over subcarriers in one branch, in one column in the other."""
    predictor = make()
    seen = {}
    for name in ("frequency", "delay"):
        getattr(predictor, name).register_forward_pre_hook(lambda _, image, name=name: seen.update({name: image[0]}))
    gain = torch.randn(T, 1, dtype=torch.complex64)
    channel = gain * torch.exp(-2j * torch.pi * 3 * torch.arange(K) / K)
    predictor(channel.expand(1, 1, 1, T, K))
    unit = gain / gain.abs().square().mean().sqrt()
    expected = torch.zeros(T, K, dtype=torch.complex64)
    expected[:, 3] = unit[:, 0] * K**0.5
    torch.testing.assert_close(torch.complex(*seen["delay"][0]), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.complex(*seen["frequency"][0]).abs(), unit.abs().expand(T, K))


def test_positions_are_sinusoids():
    positions = sinusoids(T, 6)
    assert positions.shape == (T, 6)
    torch.testing.assert_close(positions[:, 0], torch.arange(T).sin())
    torch.testing.assert_close(positions[:, 5], (torch.arange(T) * 10_000 ** (-4 / 6)).cos())


@pytest.mark.parametrize("length", [4, 8, 24])
def test_any_multiple_of_the_patch_is_a_history(make, length):
    channel = exponentials(2, num_steps=length, num_subcarriers=K)
    assert make(history=length)(channel).shape == (2, 1, 4, H, K)


def test_bad_histories_and_options_are_named(make):
    with pytest.raises(UsageError, match="history=18 must be a multiple of patch=4"):
        make(history=18)
    with pytest.raises(UsageError, match="at least 1"):
        make(blocks=0)
    with pytest.raises(UsageError, match=r"made for 16 snapshots of 12 subcarriers, not 20 of 12"):
        make()(exponentials(num_subcarriers=K))
    with pytest.raises(UsageError, match="too few for a trunk"):
        make(backbone=None, layers=500)


@pytest.mark.parametrize("offset", [0, 4], ids=["tdd", "fdd"])
@pytest.mark.parametrize("llm", [True, False])
def test_it_learns_either_band(make, config_folder, llm, offset):
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    predictor = make(backbone=config_folder(config) if llm else None, pretrained=False, matched_width=128).train()
    optimizer = torch.optim.Adam([p for p in predictor.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for step in range(80):
        channels = exponentials(8, 4, T + H, K + offset, num_paths=1, max_doppler=0.02, seed=step)
        history, target = channels[..., :T, :K], channels[..., T:, offset:]
        loss = nmse_loss(predictor(history), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) / 10 < 0.5, "on channels never seen; predicting 0 makes 1"


# Ablations


def test_random_weights_are_other_weights_of_the_same_network_frozen_alike(make):
    one, other = make(), make(pretrained=False)
    shapes = [[(n, p.shape, p.requires_grad) for n, p in x.named_parameters()] for x in (one, other)]
    assert shapes[0] == shapes[1]
    weights = [x.backbone.model.layers[0].self_attn.q_proj.weight for x in (one, other)]
    assert not torch.equal(*weights)


def test_as_much_is_trained_without_a_language_model(config_folder):
    """At the sizes of SmolLM2-135M, 300 subcarriers."""
    config = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    llm, none = LLM4CP(300, backbone=config_folder(config), pretrained=False), LLM4CP(300, backbone=None)
    assert trained(none) == pytest.approx(trained(llm), rel=0.02)
    assert trained(none) == sum(p.numel() for p in none.parameters()), "nothing is frozen"


@pytest.mark.parametrize(("layers", "subcarriers"), [(1, 6), (2, 12), (3, 48)])
def test_as_much_is_trained_at_other_sizes(make, layers, subcarriers):
    llm = make(subcarriers, layers=layers)
    assert trained(make(subcarriers, layers=layers, backbone=None)) == pytest.approx(trained(llm), rel=0.02)


def test_what_is_trained_fits_into_three_megabytes(tmp_path):
    """300 subcarriers; without a language model, hence as much as with one."""
    save_weights(LLM4CP(300, backbone=None), tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").stat().st_size < 3e6


# On the device


@pytest.mark.parametrize("backbone", ["llama", None])
def test_compiles_into_one_graph(make, backbone):
    predictor = make(**({"backbone": None} if backbone is None else {}))
    history, _ = window()
    compiled = torch.compile(predictor, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(history), predictor(history))
    torch._dynamo.reset()


def test_bfloat16_costs_little(variant):
    history, _ = window()
    expected = variant(history)
    with torch.autocast("cpu", torch.bfloat16):
        low = variant(history)
    assert low.dtype == torch.complex64
    assert (low - expected).abs().square().sum() < 1e-3 * expected.abs().square().sum()


# Defects of the public code, not repeated


def test_a_prediction_depends_on_its_antenna_alone(variant):
    """There: mean and deviation of the whole batch."""
    history, _ = window()
    together = variant(history)
    mixed = history.clone()
    mixed[1:] *= 1e3
    mixed[0, 0, 1:] = 0
    torch.testing.assert_close(variant(mixed)[0, 0, 0], together[0, 0, 0])
    torch.testing.assert_close(variant(history[:1])[0], together[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(variant(1e-6 * history), 1e-6 * together, atol=1e-10, rtol=1e-4)
    assert variant(torch.zeros_like(history)).isfinite().all()


def test_planes_are_split_as_they_were_joined(make):
    """There: joined real part by imaginary part, split as if they alternated."""
    x = torch.randn(2, T, K, dtype=torch.complex64)
    assert torch.equal(planes(x)[:, 0], x.real)
    assert torch.equal(planes(x)[:, 1], x.imag)
    predictor = make()
    value = torch.randn(K, dtype=torch.complex64)
    for layer in (predictor.to_values, predictor.to_horizons):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    with torch.no_grad():
        predictor.to_values.bias.copy_(torch.cat([value.real, value.imag]))
        predictor.to_horizons.weight[:, 0] = torch.arange(1.0, H + 1)
    unit = window()[0]
    unit = unit / unit.abs().square().mean((-2, -1), keepdim=True).sqrt()
    expected = torch.arange(1.0, H + 1)[:, None] * value
    torch.testing.assert_close(predictor(unit), expected.expand(3, 2, 4, H, K))


def test_both_planes_of_every_subcarrier_reach_the_embedding_in_order(make):
    predictor = make()
    for branch in (predictor.frequency, predictor.delay):
        branch.convolutions = nn.Identity()
        nn.init.zeros_(branch.patch.bias)
        nn.init.eye_(branch.patch.weight)
    nn.init.zeros_(predictor.delay.patch.weight)
    seen = []
    predictor.embed.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    history = window(1, 1, 1)[0]
    history = history / history.abs().square().mean().sqrt()
    predictor(history)
    torch.testing.assert_close(seen[0][0].mT, torch.cat([history[0, 0, 0].real, history[0, 0, 0].imag], -1))


def test_targets_carry_no_noise(tiny_store):
    """There: targets of 18 dB at test time, so that no NMSE falls below 0.0156."""
    noisy_windows, clean = (CSIWindows(tiny_store, "test", snr_db=snr) for snr in (0.0, float("inf")))
    rows = range(len(clean))
    assert torch.equal(noisy_windows.batch(rows).target, clean.batch(rows).target)
    assert not torch.equal(noisy_windows.batch(rows).history, clean.batch(rows).history)


def test_train_and_validation_share_no_trajectory(tiny_store):
    data = CSIDataModule(tiny_store, num_workers=0)
    ids = [set(data.windows(split).sample_ids.tolist()) for split in ("train", "val", "test")]
    assert all(ids)
    assert len(set.union(*ids)) == sum(map(len, ids))


def test_few_shot_keeps_a_tenth_of_the_users(tiny_store):
    """There: a tenth of the windows of every user."""
    whole, few = (CSIWindows(tiny_store, train_fraction=f, windows_per_sample=5) for f in (1.0, 0.1))
    users = set(few.sample_ids.tolist())
    assert len(users) == round(0.1 * len(set(whole.sample_ids.tolist())))
    assert users < set(whole.sample_ids.tolist())
    assert len(few) == 5 * len(users), "each with all its windows"


class Windows(LightningDataModule):
    """Two batches of exponentials."""

    def train_dataloader(self):
        batches = []
        for seed in range(2):
            history, target = window(seed=seed)
            one, zero = torch.ones(3), torch.zeros(3, dtype=torch.int64)
            batches.append(CSIBatch(history, target, one, one, torch.arange(3), zero, one))
        return DataLoader(batches, batch_size=None)


def fit(folder, backbone):
    seed_everything(3, verbose=False)
    module = CSIPredictionModule(LLM4CP(K, backbone=backbone, **SMALL | {"dropout": 0.1}))
    trainer = Trainer(
        default_root_dir=folder,
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, datamodule=Windows())
    trainer.save_checkpoint(folder / "x.ckpt")
    return module


def test_a_seed_repeats_a_run_and_no_pickle_is_needed_to_read_it(tmp_path, tiny_llama):
    """There: no seed, and whole modules as pickles."""
    one, two = (fit(tmp_path, str(tiny_llama)) for _ in range(2))
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q), name
    stored = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    assert set(stored) == {name for name, p in one.named_parameters() if p.requires_grad}, "the frozen part is left out"
    assert all(isinstance(value, torch.Tensor) for value in stored.values())
    with pytest.raises(TypeError):
        load_predictor(tmp_path / "x.ckpt")  # made from Python: its arguments are not in the file
