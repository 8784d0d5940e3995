"""Two processes that each see a part (of unequal length) give the value of one process that sees all."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from chanlab.metrics import NMSE, SGCS, BeamGainLoss, NMSEByStep, SpectralEfficiency


def data():
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(7, 2, 4, 3, 5, dtype=torch.complex64, generator=generator)
    scale = torch.rand(7, 1, 1, 1, 1, generator=generator)
    return h + scale * torch.randn(h.shape, dtype=torch.complex64, generator=generator), h


def metrics():
    reductions = ("pooled", "per_sample", "per_antenna_step", "median")
    return [
        *(NMSE(r) for r in reductions),
        *(NMSEByStep(3, r) for r in reductions),
        SGCS(),
        SGCS(steps=3),
        SpectralEfficiency(relative=True),
        BeamGainLoss(torch.eye(4)),
    ]


def values(slices):
    prediction, target = data()
    found = []
    for metric in metrics():
        for s in slices:
            if isinstance(metric, BeamGainLoss):
                metric.update(target[s], torch.arange(7)[s] % 4)
            else:
                metric.update(prediction[s], target[s])
        found.append(metric.compute())
    return found


def process(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.save(values([slice(0, 3), slice(3, 5)] if rank == 0 else [slice(5, 7)]), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ddp_equals_one_process(tmp_path):
    mp.spawn(process, args=(str(tmp_path),), nprocs=2)
    single = values([slice(0, 7)])
    for rank in range(2):
        for got, want in zip(torch.load(tmp_path / f"{rank}.pt", weights_only=True), single, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
