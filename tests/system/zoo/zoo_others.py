"""Adapters of PEFT on frozen models, and graph networks of PyTorch Geometric."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_case import Batch, Case, labels, numbers
from zoo_text import gpt2, llama, padded, text

FEATURES, CLASSES = 6, 5


def adapted(base: str, *, dora: bool) -> nn.Module:
    """Whose adapters are trained alone; both of their matrices are other than zero."""
    from peft import LoraConfig, get_peft_model

    layers = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}[base]
    config = LoraConfig(
        r=3,
        target_modules=layers,
        use_dora=dora,
        init_lora_weights=False,
        fan_in_fan_out=base == "gpt2",
    )
    return get_peft_model({"llama": llama, "gpt2": gpt2}[base](), config)


class NodeClassifier(nn.Module):
    """Two graph convolutions; every node of the graph has a class."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv, GCNConv

        if kind == "gcn":
            self.convs = nn.ModuleList([GCNConv(FEATURES, 16), GCNConv(16, CLASSES)])
        else:
            self.convs = nn.ModuleList(
                [GATConv(FEATURES, 8, heads=2), GATConv(16, CLASSES, heads=1)]
            )

    def forward(self, x: Tensor, edges: Tensor, classes: Tensor) -> Tensor:
        hidden = F.elu(self.convs[0](x, edges))
        return F.cross_entropy(self.convs[1](hidden, edges), classes)


def graph(source: torch.Generator, site: int) -> Batch:
    """Of a site, with edges at random."""
    nodes = 12 + 4 * site
    edges = torch.randint(0, nodes, (2, 3 * nodes), generator=source)
    x, classes = numbers(source, nodes, FEATURES), labels(source, nodes, CLASSES)
    return {"x": x, "edges": edges, "classes": classes}


CASES = {
    "lora on llama": Case(build=partial(adapted, "llama", dora=False), batch=padded),
    "lora on gpt2": Case(build=partial(adapted, "gpt2", dora=False), batch=text, part="*.h.0.*"),
    "dora on llama": Case(build=partial(adapted, "llama", dora=True), batch=padded),
    "gcn": Case(build=partial(NodeClassifier, "gcn"), batch=graph, loss=lambda y: y, quick=True),
    "gat": Case(build=partial(NodeClassifier, "gat"), batch=graph, loss=lambda y: y),
}
