"""The LightningModule that trains and evaluates codecs of images."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from torch import Tensor, nn
from torchmetrics import MeanMetric

from chanlab.data.counter import keys
from chanlab.errors import ChanlabError, UsageError
from chanlab.jscc.base_batches import training_bases
from chanlab.jscc.bases import Base
from chanlab.jscc.channels import AWGN, SymbolChannel
from chanlab.jscc.codec import Codec, Ratio, as_ratio
from chanlab.jscc.contract import STANDARD, Convention, Received, bandwidth_ratio, channel_uses, find_convention
from chanlab.jscc.draws import training_snr
from chanlab.jscc.gdn import GDN
from chanlab.metrics import ms_ssim, psnr
from chanlab.metrics.images import fitting_scales
from chanlab.schedule import warmup_cosine

if TYPE_CHECKING:
    from chanlab.jscc.separation.payload import PayloadRate

Loss = Literal["psnr", "mse", "ms_ssim"]
LEAST_MSE = 4e-6
"""Added to mean square errors under the logarithm: images better than 54 dB count little."""


class JSCCModule(LightningModule):
    """Trains a codec through a channel and evaluates it at several SNRs and bandwidth ratios.

    Each training image meets an SNR and a bandwidth ratio of its own. AdamW, linear warm-up, then a cosine to zero over
    the steps of the whole run. In evaluation an image's channel depends on (seed, image id) alone.

    Logged for `val` and `test`: `psnr` (mean of per-image dB, over all SNRs and ratios); `psnr_{snr}db` for each SNR,
    with `_at_{ratio}` behind it where there are several ratios; `uses`, channel uses of an image over its source
    values, side information and pilots included.

    Args:
        codec: The codec.
        channel: The channel; None: `AWGN`.
        snr_db: SNR per complex symbol in training [dB]: a number, or [low, high] to draw from uniformly.
        ratios: Bandwidth ratios in training, one of which is drawn for each image; None: the codec's highest.
        eval_snr_db: SNRs of evaluation [dB], each of which every image meets.
        eval_ratios: Bandwidth ratios of evaluation, pilots included; None: the codec's highest, and pilots on top.
        loss: `psnr`: minus the mean over images of the PSNR, which weighs all SNRs, ratios and images alike; `mse`: the
            mean square error, as most papers have it, to which bad channels and textured images contribute most;
            `ms_ssim`: 1 - MS-SSIM, of as many of its five scales as fit the crops (four from 88 pixels on).
        lr: Highest learning rate.
        weight_decay: Of AdamW, on matrices only (not on biases and normalisations).
        warmup: Fraction of the steps over which the learning rate rises.
        compile: Compiles those parts of the codec that are marked `compilable` with `torch.compile` for training: some
            seconds at the start, then faster on a GPU.
        seed: Of the channels of evaluation.
        eval_channel: The channel of evaluation, so that links of stored channels can be held out (`split`, `first` of
            their realisations); None: `channel`.
        refining: Share of training images whose base layer is sent where batches hold base layers (`ImageDataModule`
            with `bases`), over AWGN, to codecs that refine them (`Codec.tells_bases`); others don't see them.
        high_snr_share: Share of training images whose SNR is drawn from the highest quarter of `snr_db`, the rest from
            all of it. One codec for all SNRs falls behind specialists most where there is most to gain.

    Raises:
        UsageError: If SNRs are no range, a ratio is above the codec's, a share is none, or the channels' conventions
            differ.
    """

    def __init__(
        self,
        codec: Codec,
        channel: SymbolChannel | None = None,
        snr_db: float | tuple[float, float] = (0.0, 20.0),
        ratios: list[float | str] | None = None,
        eval_snr_db: list[float] | None = None,
        eval_ratios: list[float | str] | None = None,
        loss: Loss = "psnr",
        lr: float = 1e-3,
        weight_decay: float = 1e-2,
        warmup: float = 0.05,
        compile: bool = False,
        seed: int = 1,
        eval_channel: SymbolChannel | None = None,
        refining: float = 0.7,
        high_snr_share: float = 0.0,
    ) -> None:
        super().__init__()
        # See CSIPredictionModule: from Python the codec is an object, which a checkpoint can't hold.
        self.save_hyperparameters(
            ignore=["codec", "channel", "eval_channel"] if _given_hyperparameters.get() is None else []
        )
        self.codec = codec
        self.channel = channel or AWGN()
        self.eval_channel = eval_channel
        if eval_channel is not None and eval_channel.convention != self.channel.convention:
            raise UsageError("channel and eval_channel differ in their convention: give them the same.")
        for through in (self.channel, eval_channel):
            if getattr(codec, "base_layer", None) is not None and not isinstance(through, AWGN | None):
                raise UsageError(
                    f"base layers are sent over AWGN alone, not over {type(through).__name__}: build the codec with "
                    "base=None."
                )
        codec.convention = self.channel.convention
        self.snr_db = (float(snr_db), float(snr_db)) if isinstance(snr_db, int | float) else tuple(snr_db)
        if len(self.snr_db) != 2 or self.snr_db[0] > self.snr_db[1]:
            raise UsageError(f"snr_db is a number or [low, high], not {snr_db}.")
        self.ratios = None if ratios is None else [as_ratio(r) for r in ratios]
        self.eval_snr_db = [0.0, 5.0, 10.0, 15.0, 20.0] if eval_snr_db is None else list(map(float, eval_snr_db))
        known: list[Fraction | None] = [None]
        self.eval_ratios = known if eval_ratios is None else [as_ratio(r) for r in eval_ratios]
        for asked in self.ratios or []:
            if asked > codec.max_ratio:
                raise UsageError(
                    f"this codec sends at k/n up to {codec.max_ratio}, not {asked}: build it with another max_ratio."
                )
        for name, share in (("refining", refining), ("high_snr_share", high_snr_share)):
            if not 0 <= share <= 1:
                raise UsageError(f"{name} is a share, 0 to 1, not {share}.")
        self.refining, self.high_snr_share = refining, high_snr_share
        self.payload_rate: PayloadRate | None = None
        self.loss = loss
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.compiled = compile
        self.seed = seed
        self.means = nn.ModuleDict({_slot(*key): MeanMetric() for key in self._conditions()})
        self.uses = MeanMetric()

    def forward(
        self,
        images: Tensor,
        snr_db: Tensor,
        ratio: Ratio | None = None,
        randomness: Tensor | None = None,
        base: Base | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Images after the channel, and the channel uses that they took.

        Args:
            images: `[batch, 3, height, width]`, in [0, 1].
            snr_db: SNR per complex symbol [dB], `[batch]`.
            ratio: See `Codec.encode`.
            randomness: A key per image for the channel, int64 `[batch]`; None: PyTorch's generator.
            base: Base layers that symbols refine, for codecs that take them (`Codec.tells_bases`).

        Returns:
            Images `[batch, 3, height, width]` and channel uses `[batch]`.
        """
        decoded, received = self._send(images, snr_db, ratio, randomness, base)
        return decoded, received.uses

    def _send(
        self,
        images: Tensor,
        snr_db: Tensor,
        ratio: Ratio | None,
        randomness: Tensor | None,
        base: Base | None = None,
    ) -> tuple[Tensor, Received]:
        more: dict[str, Any] = {} if base is None else {"base": base}
        sent = self.codec.encode(images, snr_db, ratio, **more)
        received: Received = self._channel()(sent, snr_db, randomness)
        return self.codec.decode(received, _shape(images)), received

    def setup(self, stage: str) -> None:
        """Compiles the codec's blocks for training, if that is asked.

        Raises:
            UsageError: The codec has no blocks that compiling makes faster.
        """
        if stage == "fit" and self.compiled:
            parts = [part for part in self.codec.modules() if getattr(part, "compilable", False)]
            if not parts:
                raise UsageError(f"{type(self.codec).__name__} has no parts to compile: set compile to false")
            for part in parts:
                part.compile()

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch of images."""
        images = batch["image"]
        snr, ratio = self.draw(len(images), images.device)
        received, _ = self(images, snr, ratio, base=self.base(batch, snr))
        loss = reconstruction_loss(received, images, self.loss)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(images))
        return loss

    def draw(self, count: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """SNRs and bandwidth ratios of training images."""
        low, high = self.snr_db
        snr = training_snr(count, (low, high), self.high_snr_share, device)
        if self.ratios is None:
            return snr, None
        choices = torch.tensor([float(r) for r in self.ratios], dtype=torch.float64, device=device)
        return snr, choices[torch.randint(len(choices), (count,), device=device)]

    def base(self, batch: Mapping[str, Tensor], snr_db: Tensor) -> Base | None:
        """Base layers of a training batch, a share `refining` of which is sent; None without, or where none is refined.

        Args:
            batch: See `ImageBatch`.
            snr_db: SNR that each image meets [dB], `[batch]`.

        Raises:
            UsageError: If they would be sent over another channel than AWGN.
        """
        if "base" not in batch or not self.codec.tells_bases:
            return None
        if not isinstance(self.channel, AWGN):
            raise UsageError(
                f"base layers are sent over AWGN alone, not over {type(self.channel).__name__}: train with bases=0."
            )
        if self.payload_rate is None:
            from chanlab.jscc.separation.payload import PayloadRate

            self.payload_rate = PayloadRate().to(snr_db.device)
        base = Base(batch["base"], batch["base_bytes"])
        snr_db = snr_db + self.codec.convention.offset_db
        return training_bases(base, snr_db, self.payload_rate, self.refining)

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Updates the metrics of the validation split."""
        self._evaluate(batch)

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Updates the metrics of the test split."""
        self._evaluate(batch)

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Images as received at each SNR and ratio of evaluation; `ReceivedImageWriter` keeps them.

        Returns:
            `image` `[batch, condition, 3, height, width]`, `id` `[batch]`, `snr_db`, `ratio` (NaN: the codec's own)
            `[condition]`, and channel `uses`, `psnr` [dB] and whether a base was `lost`, `[batch, condition]`.
        """
        images, ids = batch["image"], batch["id"]
        found = [self.receive(images, ids, snr, ratio) for ratio, snr in self._conditions()]
        never = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        return {
            "image": torch.stack([image for image, _ in found], 1),
            "id": ids,
            "snr_db": torch.tensor([snr for _, snr in self._conditions()]),
            "ratio": torch.tensor([float("nan") if ratio is None else float(ratio) for ratio, _ in self._conditions()]),
            "uses": torch.stack([received.uses for _, received in found], 1),
            "psnr": torch.stack([psnr(image.float(), images, "none", validate=False) for image, _ in found], 1),
            "lost": torch.stack([never if got.base_lost is None else got.base_lost for _, got in found], 1),
        }

    def on_validation_epoch_end(self) -> None:
        """Logs the metrics of the validation split."""
        self._log("val")

    def on_test_epoch_end(self) -> None:
        """Logs the metrics of the test split."""
        self._log("test")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Sets the learning rate from the number of steps done and to come."""
        factor = warmup_cosine(self.trainer.global_step, self.trainer.estimated_stepping_batches, self.warmup)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.lr * factor
        self.log("lr", self.lr * factor)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over the codec's parameters."""
        return torch.optim.AdamW(parameter_groups(self.codec, self.weight_decay), lr=self.lr)

    def _channel(self) -> SymbolChannel:
        return self.channel if self.training or self.eval_channel is None else self.eval_channel

    def _conditions(self) -> list[tuple[Fraction | None, float]]:
        return [(ratio, snr) for ratio in self.eval_ratios for snr in self.eval_snr_db]

    def transmit(
        self, images: Tensor, ids: Tensor, snr_db: float, ratio: Fraction | None = None
    ) -> tuple[Tensor, Tensor]:
        """Images through channels that depend on (seed, id) alone: the same ones at each SNR and ratio.

        Args:
            images: `[batch, 3, height, width]`, in [0, 1].
            ids: Int64 `[batch]`.
            snr_db: SNR per complex symbol [dB].
            ratio: Channel uses over source values, pilots included; None: the codec's highest, and pilots on top.

        Returns:
            Images `[batch, 3, height, width]` and the channel uses that they took, `[batch]`.
        """
        decoded, received = self.receive(images, ids, snr_db, ratio)
        return decoded, received.uses

    def receive(
        self, images: Tensor, ids: Tensor, snr_db: float, ratio: Fraction | None = None
    ) -> tuple[Tensor, Received]:
        """As `transmit`; the second value is all that the decoder was handed, pilots counted apart."""
        snr = torch.full((len(images),), snr_db, device=images.device)
        asked = None if ratio is None else self.asked_ratio(_shape(images), ratio)
        return self._send(images, snr, asked, keys(ids, self.seed, "jscc"))

    def asked_ratio(self, image_shape: tuple[int, int, int], ratio: Fraction) -> Fraction:
        """What to ask the codec for, so that symbols and pilots together keep to a ratio; unchanged without pilots."""
        asked = self._channel().encoder_ratio(image_shape, ratio)
        return ratio if channel_uses(image_shape, asked) == channel_uses(image_shape, ratio) else asked

    def _evaluate(self, batch: Mapping[str, Tensor]) -> None:
        images = batch["image"]
        for ratio, snr in self._conditions():
            received, uses = self.transmit(images, batch["id"], snr, ratio)
            self.means[_slot(ratio, snr)].update(psnr(received.float(), images, "none", validate=False))  # type: ignore[operator]
            self.uses.update(bandwidth_ratio(uses, _shape(images), self.channel.convention))

    def _log(self, split: str) -> None:
        values = []
        for ratio, snr in self._conditions():
            metric = self.means[_slot(ratio, snr)]
            assert isinstance(metric, MeanMetric)
            if metric.update_called:
                values.append(metric.compute())
                several = f"_at_{ratio.numerator}_{ratio.denominator}" if ratio and len(self.eval_ratios) > 1 else ""
                self.log(f"{split}/psnr_{snr:g}db{several}", values[-1])
            metric.reset()
        if values:
            self.log(f"{split}/psnr", torch.stack(values).mean(), prog_bar=True)
            self.log(f"{split}/uses", self.uses.compute())
        self.uses.reset()


def reconstruction_loss(received: Tensor, images: Tensor, loss: Loss) -> Tensor:
    """What training minimises; see `JSCCModule`.

    Raises:
        UsageError: Unknown loss.
    """
    received, images = received.float(), images.float()
    if loss == "ms_ssim":
        scales = max(1, fitting_scales(min(images.shape[-2:])))
        return 1 - ms_ssim(received, images, scales, validate=False)
    error = (received - images).square().mean((1, 2, 3))
    if loss == "psnr":
        return 10 * (error + LEAST_MSE).log10().mean()
    if loss == "mse":
        return error.mean()
    raise UsageError(f"loss must be psnr, mse or ms_ssim, not {loss!r}.")


def parameter_groups(codec: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters for an optimiser: weights of layers decay, biases and what normalisations learn don't."""
    kept = {p for m in codec.modules() if isinstance(m, GDN | nn.PReLU) for p in m.parameters()}
    trained = [p for p in codec.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim > 1 and p not in kept]
    others = [p for p in trained if p.ndim <= 1 or p in kept]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def load_codec(checkpoint: str | os.PathLike[str], map_location: str = "cpu") -> Codec:
    """The codec of a checkpoint that `chanlab fit` wrote, in evaluation mode; its channel's data isn't needed.

    Args:
        checkpoint: Path; read as plain weights, never as a pickle.
        map_location: Device.

    Raises:
        UsageError: There is no such file.
        ChanlabError: It is no such checkpoint.
    """
    name = os.fspath(checkpoint)
    if not os.path.isfile(checkpoint):
        raise UsageError(f"There is no checkpoint {name}: train one with `chanlab fit`")
    try:
        found = torch.load(name, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what its reader and its unpickler come across
        raise ChanlabError(f"{name} can't be read as a checkpoint: train one with `chanlab fit`") from error
    given = found.get(JSCCModule.CHECKPOINT_HYPER_PARAMS_KEY, {})
    if "codec" not in given:
        raise ChanlabError(
            f"{name} doesn't say which codec its weights are of, as checkpoints of `chanlab fit` do: build the codec, "
            "and load the checkpoint with JSCCModule.load_from_checkpoint(..., codec=codec)"
        )
    # The channel isn't built: it may ask for a store that lies elsewhere. Its convention is the codec's.
    module = JSCCModule.load_from_checkpoint(
        name, map_location=map_location, weights_only=True, channel=None, eval_channel=None
    )
    convention = ((given.get("channel") or {}).get("init_args") or {}).get("convention", STANDARD)
    module.codec.convention = find_convention(Convention(**convention) if isinstance(convention, dict) else convention)
    return module.codec.eval()


def _shape(images: Tensor) -> tuple[int, int, int]:
    return images.shape[1], images.shape[2], images.shape[3]


def _slot(ratio: Fraction | None, snr_db: float) -> str:
    """A key of a ModuleDict, which takes no dots."""
    return f"{ratio}_{snr_db}".replace(".", "_")
