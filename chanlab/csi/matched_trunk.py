"""A trunk without a language model that trains as many parameters as a predictor on a frozen one."""

from __future__ import annotations

from torch import Tensor, nn

from chanlab.errors import UsageError

HEADS = 4


class MatchedTrunk(nn.Module):
    """A transformer trained from scratch, in the place of a frozen language model.

    Of a frozen language model little more than norms is trained, but its width makes the layers before and behind it
    large. Here the width is smaller, and what those layers save is spent on the trunk.

    Attributes:
        width: Size of its hidden states.

    Args:
        width: Size of its hidden states, a multiple of four.
        feed_forward: Hidden size of the feed-forward parts.
        layers: Encoder layers.
    """

    def __init__(self, width: int, feed_forward: int, layers: int) -> None:
        super().__init__()
        self.width = width
        layer = nn.TransformerEncoderLayer(
            width, HEADS, feed_forward, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        layer.compilable = True  # type: ignore[assignment]
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        """Hidden states `[batch, token, width]` of embeddings `[batch, token, width]`; each token sees all."""
        hidden: Tensor = self.encoder(inputs_embeds)
        return hidden


def match(parameters: int, per_width: int, layers: int) -> MatchedTrunk:
    """The widest trunk that, with the layers around it, has a given number of parameters, or just fewer.

    The feed-forward parts are about four times as wide as the trunk, as usual; they take up what rounding leaves.

    Args:
        parameters: Parameters of the trunk and of what depends on its width around it, together.
        per_width: Parameters around the trunk for each unit of its width.
        layers: Encoder layers.

    Raises:
        UsageError: The number is too small for any trunk.
    """

    def size(width: int, feed_forward: int) -> int:
        layer = 4 * width * width + 9 * width + feed_forward * (2 * width + 1)
        return layers * layer + 2 * width + per_width * width

    width = 0
    while size(width + HEADS, 4 * (width + HEADS)) <= parameters:
        width += HEADS
    if not width:
        raise UsageError(f"{parameters} parameters are too few for a trunk of {layers} layers: take fewer layers")
    feed_forward = 4 * width + (parameters - size(width, 4 * width)) // (layers * (2 * width + 1))
    return MatchedTrunk(width, feed_forward, layers)
