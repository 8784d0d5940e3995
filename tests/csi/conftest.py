from dataclasses import replace
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory) -> Path:
    """Forty users of the two-ray recipe, with small arrays."""
    from chanlab.data.generate import generate
    from chanlab.data.recipe import load_recipe

    view = {
        "tx_array": {"num_rows": 2, "num_cols": 2},
        "rx_array": {"num_rows": 1, "num_cols": 1},
        "num_subcarriers": 8,
        "subcarrier_spacing": 360e3,
    }
    path = tmp_path_factory.mktemp("stores") / "tiny"
    generate(replace(load_recipe("two_ray"), samples=40, shard_size=40, view=view, text=""), path, progress=False)
    return path


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """A folder in the format of transformers: three layers of a Llama, 16 wide, with random weights."""
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    path = tmp_path_factory.mktemp("backbones") / "llama"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path
