import torch
from exponentials import exponentials

from chanlab.csi.linear_prediction import coefficients, extrapolate, stabilise, window_gram


def series(num_paths=2, num_steps=12):
    return exponentials(batch=2, num_steps=num_steps, num_paths=num_paths).movedim(3, -1).flatten(1, 3)


def test_gram_of_many_series_equals_the_sum_over_windows():
    x = series().to(torch.complex128)
    windows = x.unfold(-1, 4, 1).flatten(1, 2)
    assert torch.allclose(window_gram(x, 3), windows.mH @ windows)
    few = window_gram(x[:, :2], 3)
    assert torch.allclose(few, windows.unflatten(1, (-1, 9))[:, :2].flatten(1, 2).mH @ windows[:, :18])


def test_backward_windows_are_the_reversed_conjugate():
    x = series().to(torch.complex128)
    backward = window_gram(x.flip(-1).conj(), 3)
    for part in (slice(None), slice(2)):
        both = window_gram(x[:, part], 3) + window_gram(x[:, part].flip(-1).conj(), 3)
        assert torch.allclose(window_gram(x[:, part], 3, forward_backward=True), both)
    assert backward.shape == (2, 4, 4)


def test_one_exponential_has_one_coefficient():
    x = torch.exp(0.3j * torch.arange(8, dtype=torch.float64))[None, None]
    found = coefficients(window_gram(x, 1))
    assert torch.allclose(found, torch.exp(torch.tensor([[0.3j]], dtype=torch.complex128)))
    future = extrapolate(x[..., -1:], found, 3)
    assert torch.allclose(future, torch.exp(0.3j * torch.arange(8, 11, dtype=torch.float64))[None, None])


def test_two_exponentials_have_the_coefficients_of_their_polynomial():
    roots = torch.exp(1j * torch.tensor([0.4, -0.9], dtype=torch.float64))
    x = (roots[:, None] ** torch.arange(10)).sum(0)[None, None]
    # (z - r1)(z - r2) = z² - (r1 + r2) z + r1 r2
    expected = torch.stack([-roots.prod(), roots.sum()])
    assert torch.allclose(coefficients(window_gram(x, 2, forward_backward=True))[0], expected)


def test_extrapolating_is_iterating_one_step():
    x = series()
    found = coefficients(window_gram(x, 5), ridge=0.1)
    at_once = extrapolate(x[..., -5:], found, 3)
    state = x[..., -5:].to(torch.complex128)
    for step in range(3):
        nxt = (state @ found[..., None])[..., 0]
        assert torch.allclose(at_once[..., step], nxt.to(torch.complex64), atol=1e-5)
        state = torch.cat([state[..., 1:], nxt[..., None]], -1)


def polynomial(poles):
    """Coefficients, ascending time, whose poles are given."""
    found = torch.ones(1, dtype=torch.complex128)
    for pole in poles:
        found = torch.nn.functional.pad(found, (0, 1)) - pole * torch.nn.functional.pad(found, (1, 0))
    return -found[1:].flip(0)


def test_only_growing_poles_are_moved_onto_the_unit_circle():
    decaying = [0.9, 0.5j, -0.7 + 0.1j]
    growing = torch.polar(torch.tensor([1.0, 0.9, 1.7]), torch.tensor([0.2, -1.0, 2.5])).to(torch.complex128)
    onto = torch.polar(torch.tensor([1.0, 0.9, 1.0]), torch.tensor([0.2, -1.0, 2.5])).to(torch.complex128)
    both = torch.stack([polynomial(decaying), polynomial(growing)])
    stable = stabilise(both)
    assert torch.equal(stable[0], both[0])
    assert torch.allclose(stable[1], polynomial(onto), atol=1e-6)
    assert stabilise(torch.tensor([[2.0j]], dtype=torch.complex128)).abs().item() == 1.0
