"""The gradient of copy b is the gradient of sample b, or the use of a parameter is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from outergrad.capture.copies import Copies, copied

B, T, D = 4, 3, 5
TABLE = torch.arange(T * D, dtype=torch.float64).view(T, D).sin()
SQUARE = torch.arange(B * D, dtype=torch.float64).view(B, D).cos()
"""No samples, but as many rows as samples."""

USES = {
    "scale": ((D,), lambda x, p: x * p),
    "reflected": ((D,), lambda x, p: 2 / (3 + p.square()) - p + x),
    "bias of rows": ((T, 1), lambda x, p: x - p),
    "tokens": ((1, 1, D), lambda x, p: torch.cat([p.expand(len(x), -1, -1), x], dim=1)),
    "repeated": ((1, 1, D), lambda x, p: torch.cat([x, p.repeat(len(x), 1, 1)], 1)),
    "places": ((1, T, D), lambda x, p: x + p),
    "places, cut": ((1, T + 2, D), lambda x, p: x + p[:, :T]),
    "as the input": ((D,), lambda x, p: x * p.to(x).expand_as(x)),
    "looked up": ((7, D), lambda x, p: x + p[torch.tensor([0, 3, 3])]),
    "with a buffer": ((D,), lambda x, p: x + p * TABLE),
    "with a buffer of as many rows": ((D,), lambda x, p: x.sum(1) * (p * SQUARE).sum()),
    "expanded to as many rows": ((1, D), lambda x, p: x.sum(1) * (p.expand(B, D) * SQUARE)[0]),
    "layer norm": ((D,), lambda x, p: F.layer_norm(x, (D,), p, p.exp())),
    "rms norm": ((D,), lambda x, p: F.rms_norm(x, (D,), weight=p)),
    "group norm": ((T,), lambda x, p: F.group_norm(x, 1, p, p)),
    "bias of a product": ((T,), lambda x, p: F.linear(x, TABLE, p)),
    "of a selection": ((D,), lambda x, p: torch.where(x > 0, x, p)),
    "in place": ((D,), lambda x, p: (x + 1).mul_(p)),
    "powers": ((D,), lambda x, p: x * 2**p),
    "transposed": ((D, T), lambda x, p: x * p.T),
    "a number": ((), lambda x, p: x * p.exp()),
}


@pytest.mark.parametrize("samples", [B, 1, T])
@pytest.mark.parametrize("name", USES)
def test_copies_have_the_gradients_of_samples(name, samples):
    shape, use = USES[name]
    if "as many rows" in name and samples != B:
        pytest.skip("there are as many rows as samples")
    p, x = torch.randn(shape).double(), torch.randn(samples, T, D).double()
    expected, outputs = [], []
    for b in range(samples):
        one = p.clone().requires_grad_()
        rows = use(x, one)[b] if samples == B else use(x[b : b + 1], one)[0]
        rows.sin().sum().backward()
        expected.append(one.grad)
        outputs.append(rows.detach())
    copies_B = copied(p, samples).requires_grad_()
    y = use(x.requires_grad_() * 1, Copies(copies_B, "p"))
    assert type(y) is torch.Tensor
    y.sin().sum().backward()
    torch.testing.assert_close(y.detach(), torch.stack(outputs))
    torch.testing.assert_close(copies_B.grad, torch.stack(expected))


REFUSED = {
    "a product": ((D, D), lambda x, p: x @ p, "not elementwise"),
    "samples elsewhere": ((D,), lambda x, p: x.transpose(0, 1) * p, "does not count the 4 samples"),
    "fewer dimensions": ((D,), lambda x, p: torch.addcmul(x, x.sum((1, 2)), p), "not elementwise"),
    "a larger one": ((B, 1, T, D), lambda x, p: x + p, "beside samples of rank 3"),
    "joined": ((B, T, D), lambda x, p: torch.cat([x, p]), "along the dimension of the samples"),
    "changed": ((D,), lambda x, p: x * p.add_(1), r"add_\(\) in place"),
    "its data": ((D,), lambda x, p: x * p.data, r"as \.data"),
    "read": ((D,), lambda x, p: x * p.sum().item(), "cannot be computed by sample"),
    "random": ((D,), lambda x, p: x * F.dropout(p), "cannot be computed by sample"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_uses_that_are_refused(name):
    shape, use, match = REFUSED[name]
    copies = Copies(copied(torch.randn(shape), B).requires_grad_(), "a.p")
    with pytest.raises(RuntimeError, match=f"'a.p' is used by .*{match}.*freeze it"):
        use(torch.randn(B, T, D).requires_grad_() * 1, copies)


def test_it_tells_about_itself_as_the_parameter_would():
    p = torch.randn(1, T, D)
    copies = Copies(copied(p, B), "p")
    assert copies.shape == p.shape
    assert copies.dtype == p.dtype
    assert copies.dim() == p.dim()
    assert len(copies) == 1
    assert copies.numel() == p.numel()
    assert copies.size(1) == T
    assert repr(copies) == "Copies('p', (4, 1, 3, 5))"
