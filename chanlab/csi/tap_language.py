"""A frozen language model that reads a channel along its delay taps."""

from __future__ import annotations

from torch import Tensor, nn

from chanlab.csi.backbone import Backbone, load_backbone
from chanlab.csi.llm4cp import freeze
from chanlab.csi.matched_trunk import MatchedTrunk, match


class TapLanguage(nn.Module):
    """Tells the beams of each delay tap what a language model makes of the taps, one after the other.

    A tap's beams are averaged to one token; the taps, in the order of delay, are the sentence. Of the language model
    its norms are trained, as in `LLM4CP`; it is read and written through linear layers and a residual.

    Args:
        dim: Width of the tokens of beams and taps.
        backbone: Name fetched by `chanlab backbone fetch`, a folder, or a hub id of any causal model of transformers.
            None is an ablation: a transformer trained from scratch, with as many trained parameters as a Llama of
            width `matched_width` would have here.
        layers: Decoder layers kept, counted from the input.
        pretrained: False is an ablation: the same network with random weights, frozen and trained alike.
        matched_width: See `backbone`; that of SmolLM2-135M.
    """

    def __init__(
        self, dim: int, backbone: str | None, layers: int, pretrained: bool = True, matched_width: int = 576
    ) -> None:
        super().__init__()
        self.backbone: Backbone | MatchedTrunk
        if backbone is None:
            per_width = 2 * dim + 1
            self.backbone = match(matched_width * (per_width + 2 * layers + 1), per_width, layers)
        else:
            self.backbone = load_backbone(backbone, layers, pretrained)
            freeze(self.backbone)
        self.norm = nn.LayerNorm(dim)
        self.read = nn.Linear(dim, self.backbone.width)
        self.write = nn.Linear(self.backbone.width, dim)
        nn.init.normal_(self.write.weight, std=0.02)
        nn.init.zeros_(self.write.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Same shape as its input, `[batch, column, row, tap, dim]`."""
        tokens = self.norm(hidden).mean((1, 2))
        heard: Tensor = self.write(self.backbone(self.read(tokens)))
        return hidden + heard[:, None, None]
