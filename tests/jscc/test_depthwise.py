"""Depthwise convolutions: of channels that lie last, with gradients; kernels against float64 on the CPU."""

import pytest
import torch
from torch import nn

from chanlab.jscc.adaptive_networks import GatedBlock
from chanlab.jscc.depthwise import depthwise, use_kernel


def drawn(shape, size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sizes = shape, (shape[-1], 1, size, size), shape[-1:]
    x, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes)
    return x.to(dtype), weight, bias


def test_each_channel_has_its_own_kernel():
    x, weight, bias = drawn((2, 5, 7, 3), 3)
    layer = nn.Conv2d(1, 1, 3, padding=1).double()
    out = depthwise(x, weight, bias)
    for channel in range(3):
        layer.weight.data, layer.bias.data = weight[channel : channel + 1], bias[channel : channel + 1]
        torch.testing.assert_close(out[..., channel], layer(x[:, None, :, :, channel])[:, 0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("shape", "size"), [((2, 7, 9, 20), 5), ((3, 12, 12, 192), 5), ((1, 6, 5, 64), 3)])
def test_kernels_and_their_gradients(shape, size, dtype, limit):
    x, weight, bias = (value.requires_grad_() for value in drawn(shape, size, dtype))
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    want = depthwise(x.double(), weight, bias)
    wanted = [want, *torch.autograd.grad(want, (x, weight, bias), upstream.double())]
    inputs = [x.detach().cuda(), weight.detach().float().cuda(), bias.detach().float().cuda()]
    inputs = [value.requires_grad_() for value in inputs]
    got = depthwise(*inputs)
    found = [got, *torch.autograd.grad(got, inputs, upstream.cuda())]
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.double().cpu() - theirs.double()).norm() <= limit * theirs.double().norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_are_the_same_with_and_without_kernels(compiled):
    block = GatedBlock(32, 5).cuda()
    x, modulation = torch.randn(4, 12, 12, 32, device="cuda"), torch.randn(4, 1, 1, 128, device="cuda")
    found = []
    try:
        for kernel in (True, False):
            use_kernel(kernel)
            run = torch.compile(block.forward, dynamic=False) if compiled and kernel else block.forward
            with torch.autocast("cuda", torch.bfloat16):
                out = run(x, modulation)
            found.append([out, *torch.autograd.grad(out.float().square().sum(), list(block.parameters()))])
    finally:
        use_kernel(True)
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).float().norm() <= 2e-2 * theirs.float().norm()
