"""Codecs for inference: encoding and decoding, each compiled as a whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from chanlab.errors import UsageError
from chanlab.jscc.bases import Base
from chanlab.jscc.codec import Codec, Ratio
from chanlab.jscc.contract import Received, Transmission, exact_ratio, per_image


class CompiledCodec:
    """`encode` and `decode` of a codec in evaluation, without gradients, as one compiled program each.

    A codec's layers are small: run one by one, starting them takes longer than their arithmetic. Programs are made for
    each shape of the inputs and each ratio when these are first seen, which takes some seconds, and can be captured in
    CUDA graphs. They hold a copy of the weights as they are now.

    Budgets aren't checked, which would wait for the device: where a ratio of a tensor is above `max_ratio` it is cut to
    it, and where the side information leaves no symbol none is sent.

    Args:
        codec: On the device where it shall run.
        dtype: Of matrix products and convolutions, as under `torch.autocast`.

    Raises:
        UsageError: If the codec searches for symbols.
    """

    def __init__(self, codec: Codec, dtype: torch.dtype = torch.bfloat16) -> None:
        if getattr(codec, "search", 0):
            raise UsageError("a search for symbols takes gradients, programs have none: build the codec with search=0.")
        self.codec = copy.deepcopy(codec).eval().requires_grad_(False)
        self.codec.checks_budget = False
        self.dtype = dtype
        _convert(self.codec, dtype)
        self._programs: dict[Hashable, Callable[..., Any]] = {}

    def encode(
        self, images: Tensor, snr_db: Tensor | float, ratio: Ratio | None = None, base: Base | None = None
    ) -> Transmission:
        """See `Codec.encode`, and `AdaptiveJSCC.encode` for the base."""
        inputs = [images, per_image(snr_db, images).contiguous()]
        agreed = None if ratio is None or isinstance(ratio, Tensor) else exact_ratio(ratio)
        layer = getattr(self.codec, "base_layer", None)
        if base is None and layer is not None:
            with torch.no_grad(), torch.autocast(images.device.type, self.dtype):
                base = layer.best(self.codec, images, inputs[1], ratio)
        has = isinstance(ratio, Tensor), base is not None, base is not None and base.power is not None
        if isinstance(ratio, Tensor):
            inputs.append(ratio)
        if base is not None:
            inputs += [base.image, base.taken]
            if base.power is not None:
                inputs.append(base.power)
        symbols, used, bits, side, taken = self._run(
            _Encoding(self.codec, self.dtype, agreed, has), inputs, (agreed, has)
        )
        loss, power = (None, None) if base is None else (base.loss, base.power)
        return Transmission(torch.view_as_complex(symbols), used, bits, side, taken, loss, power)

    def decode(self, received: Received, image_shape: tuple[int, int, int]) -> Tensor:
        """See `Codec.decode`."""
        inputs = [
            torch.view_as_real(received.symbols.resolve_conj()),
            received.used,
            received.snr_db,
            received.noise_variance,
            received.gain,
        ]
        if received.side is not None:
            inputs.append(received.side)
        program = _Decoding(self.codec, self.dtype, tuple(image_shape), received.power)
        images: Tensor = self._run(program, inputs, (*image_shape, received.power))
        return received.shown(images)

    def _run(self, module: nn.Module, inputs: list[Tensor], setting: Hashable) -> Any:
        forms = tuple((tuple(x.shape), x.stride(), x.dtype, x.device) for x in inputs)
        key = (type(module), setting, forms)
        with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
            if key not in self._programs:
                # Recorded by running it: what Python does, on fractions say, is done once.
                program = make_fx(module)(*inputs)
                _without_detours(program)
                self._programs[key] = torch.compile(program, dynamic=False, fullgraph=True)
            return self._programs[key](*inputs)


class _Encoding(nn.Module):
    """Tensors in, tensors out; symbols as real and imaginary parts."""

    def __init__(self, codec: Codec, dtype: torch.dtype, ratio: Fraction | None, has: tuple[bool, bool, bool]) -> None:
        super().__init__()
        self.codec, self.dtype, self.ratio, self.has = codec, dtype, ratio, has

    def forward(self, images: Tensor, snr_db: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        ratio = others[0] if self.has[0] else self.ratio
        more = {}
        if self.has[1]:
            image, uses, *power = others[int(self.has[0]) :]
            more["base"] = Base(image, uses, uses, power=power[0] if power else None)  # bytes aren't read
        with torch.autocast(images.device.type, self.dtype):
            sent = self.codec.encode(images, snr_db, ratio, **more)
        return torch.view_as_real(sent.symbols), sent.used, sent.side_bits, sent.side, sent.base_uses


class _Decoding(nn.Module):
    """What a codec's decoder reads, as tensors; channel uses aren't."""

    def __init__(self, codec: Codec, dtype: torch.dtype, image_shape: tuple[int, ...], power: float) -> None:
        super().__init__()
        self.codec, self.dtype, self.image_shape, self.power = codec, dtype, image_shape, power

    def forward(
        self,
        parts: Tensor,
        used: Tensor,
        snr_db: Tensor,
        noise_variance: Tensor,
        gain: Tensor,
        side: Tensor | None = None,
    ) -> Tensor:
        symbols, uses = torch.view_as_complex(parts), used.sum(1)
        received = Received(symbols, used, snr_db, noise_variance, gain, uses, uses, self.power, side)
        channels, height, width = self.image_shape
        with torch.autocast(used.device.type, self.dtype):
            return self.codec.decode(received, (channels, height, width))


class _Linear(nn.Linear):
    """A linear layer: one matrix product, or for vectors products and sums, which a compiler fuses with others."""

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim > 2:
            missing = -self.in_features % 8  # fast products read 16 bytes at once
            rows = input.reshape(-1, self.in_features)
            rows = F.linear(F.pad(rows, (0, missing)), F.pad(self.weight, (0, missing)), self.bias)
            return rows.view(*input.shape[:-1], self.out_features)
        weight = self.weight.float()
        if self.bias is not None:  # as a weight, so that nothing is left to do behind the sum
            input, weight = F.pad(input, (0, 1), value=1.0), torch.cat([weight, self.bias.float()[:, None]], 1)
        return (input.float()[:, None] * weight).sum(-1)


def _without_detours(module: torch.fx.GraphModule) -> None:
    """Real numbers that become complex ones and real ones again stay real: compilers don't fuse complex arithmetic."""
    complex_, real = torch.ops.aten.view_as_complex.default, torch.ops.aten.view_as_real.default
    for node in module.graph.find_nodes(op="call_function", target=real):
        source = node.args[0]
        if isinstance(source, torch.fx.Node) and source.target == complex_:
            node.replace_all_uses_with(source.args[0])
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


def _convert(network: nn.Module, dtype: torch.dtype) -> None:
    """Weights in the type that autocast would bring them to at every call, and as kernels take them."""
    for module in network.modules():
        vars(module).pop("forward", None)  # compiled for training: it would run with the weights of the original
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.to(dtype)
        if isinstance(module, nn.Conv2d):
            if module.groups == 1:
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            else:  # taps one after the other, each for all channels
                module.weight.data = module.weight.data.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
        if type(module) is nn.Linear:
            module.__class__ = _Linear
