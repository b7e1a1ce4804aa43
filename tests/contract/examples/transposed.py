"""A layer of one's own, and its rule: a linear layer whose weight is stored transposed."""

import torch
from torch import nn

import outergrad as og


class Transposed(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.table = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)

    def forward(self, x):
        return x @ self.table


class TransposedRule:
    owns = ()  # child modules whose parameters this rule handles

    def objection(self, module):
        return None  # or why this module must travel dense

    def slots(self, module, name):
        # dW = Δᵀ A has the shape (O, I) of the parameter: here A and Δ change places
        inputs, outputs = module.table.shape
        return [og.Slot(name, f"{name}.table".lstrip("."), inputs, outputs)]

    def forward(self, module, tap, x):
        flat = x.reshape(-1, x.shape[-1])
        y = tap(flat @ module.table.detach(), flat, rows=len(flat), samples=len(x))
        return y.view(*x.shape[:-1], y.shape[-1])

    def rows(self, module, args, kwargs):
        x = args[0] if args else kwargs["x"]
        return [x.numel() // x.shape[-1]]

    def factors(self, module, slot, call):
        a = call.a.reshape(1, -1, call.a.shape[-1]).to(call.d.dtype)
        return og.Factors(d_GRO=a, a_GRI=call.d.reshape(1, -1, call.d.shape[-1]))

    def by_sample(self, module, slot, call, samples):  # for transforms that ask for samples
        return og.transforms.sampled(self.factors(module, slot, call), samples)
