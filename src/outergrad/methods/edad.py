"""edAD: sites send activations and one delta per chain, and recompute the other deltas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outergrad.core.blocks import Replays
from outergrad.core.coding import Wire
from outergrad.drift.on_drift import OnDrift
from outergrad.methods.common import Settings, require
from outergrad.methods.dad import DAD, DADCompressor


@dataclass(frozen=True, kw_only=True, repr=False)
class EDAD(Settings):
    """Sites send activations and one delta per chain of layers, and recompute the others (edAD).

    Choose it for slow links between few sites of one owner: rows of activations travel. Exact.

    A chain is linear layers and convolutions in an `nn.Sequential`, with elementwise functions,
    norms, pooling or dropout between. For a chain a site sends the activations of every layer and
    the delta of the last one. For a block, named in `blocks`, it sends only the block's inputs and
    the delta of its output. Every site then computes the block's forward and backward again, for
    the rows of all sites. That is fewer bytes for more arithmetic. `nn.RNN`, `nn.GRU` and `nn.LSTM`
    are blocks without being named. All other layers travel as with `DAD`, and dense where that is
    fewer bytes. Source: Baker et al., arXiv 2102.09631 (edAD).

    Attributes:
        blocks: Patterns of full names of modules that are computed again, as ("layers.*",). Modules
            of one parent that only read each other's outputs need one delta together. They must
            read nothing but their arguments and parameters, which every step checks.
        inputs: "canonical": no input of the model is sent: the first layer of each chain, and every
            layer outside chains, sends canonical factors, as `DAD` does, and blocks must read
            outputs of other trained layers. "raw": rows of activations are sent for these layers,
            too. Activations of hidden layers always travel: docs/methods.md says what they reveal.
        always: Sends factors even where the dense gradient is fewer bytes.
        wire: Codecs of `og.wire` for activations and deltas: fewer bytes, at a loss that is not
            made up for later.
        every: k: gradients are shared at every k-th synchronised backward pass only. Until then
            each site sums up its gradients; their mean is shared (docs/methods.md). Or
            `og.OnDrift(...)`: whenever a site's data drift. Above 1 nothing is computed again: rows
            are kept, and travel as with `DAD`.
        bucket_bytes: Payload of one message, bytes, before the next layer opens another.
    """

    blocks: tuple[str, ...] | list[str] = ()
    inputs: Literal["canonical", "raw"] = "canonical"
    always: bool = False
    wire: Wire = ()
    every: int | OnDrift = 1
    bucket_bytes: int = 1 << 18

    def __post_init__(self) -> None:
        super().__post_init__()
        patterns = not isinstance(self.blocks, str) and all(isinstance(b, str) for b in self.blocks)
        require(patterns, self, "blocks", 'a list of patterns, as ["layers.*"]')
        object.__setattr__(self, "blocks", tuple(self.blocks))
        require(self.inputs in ("canonical", "raw"), self, "inputs", "'canonical' or 'raw'")
        require(self.every == 1 or not self.blocks, self, "every", "1 with blocks=")

    def compressor(self) -> DADCompressor:
        """Returns a new compressor with these settings."""
        raw = self.inputs == "raw"
        rows = DAD(
            always=self.always,
            reveal="activations" if raw else "gradient",
            wire=self.wire,
            every=self.every,
            bucket_bytes=self.bucket_bytes,
        )
        if self.every != 1:
            return DADCompressor(rows)
        blocks = tuple(self.blocks)
        replays = Replays(blocks=blocks, chains=True, recurrent=True, raw_inputs=raw)
        return DADCompressor(rows, replays)
