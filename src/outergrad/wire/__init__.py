"""Codecs: lossy encodings of rows of activations and deltas, for fewer bytes on the wire.

Every exchange of factors takes `wire=`: one codec or a sequence of them. In a sequence, each codec
encodes the values that the one before it left, as in `wire=(TopK(0.1), Int8())`. Without a codec,
rows are sent unchanged.
"""

from outergrad.wire.codecs import BF16, Codec, Int8, Plain, TopK
from outergrad.wire.few_bits import Int2, Int3, Int4
from outergrad.wire.signs import Sign

__all__ = ["BF16", "Codec", "Int2", "Int3", "Int4", "Int8", "Plain", "Sign", "TopK"]
