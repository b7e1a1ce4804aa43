"""What codecs make of normally distributed rows: bytes, error, and time on one thread.

python benchmarks/encode.py --rows 32 --width 1024
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from canonical import median_ms

from outergrad.core.coding import decode, encode, nbytes, received, tensors
from outergrad.wire import BF16, Int2, Int3, Int4, Int8, TopK

CODECS = (
    (BF16(),),
    (Int8(),),
    (Int4(),),
    (Int3(),),
    (Int2(),),
    (TopK(0.3),),
    (TopK(0.3), BF16()),
    (TopK(0.3), Int8()),
    (TopK(0.1), Int8()),
)


def main() -> None:
    """A table with a line per stack of codecs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(1, options.rows, options.width)
    shape = tuple(x.shape)
    print("| codecs | times fewer bytes than float32 | error | to encode, ms | to decode, ms |")
    print("|---|---|---|---|---|")
    for codecs in CODECS:
        written = zip(encode(codecs, x), tensors(codecs, shape, x.dtype), strict=True)
        message = [t.to(plain.dtype) for t, plain in written]
        fewer = x.nbytes / nbytes(codecs, shape)
        error = ((received(codecs, x) - x).norm() / x.norm()).item()
        encode_ms = median_ms(partial(encode, codecs, x), 200)
        decode_ms = median_ms(partial(decode, codecs, message, shape, x.dtype), 200)
        name = ", ".join(map(repr, codecs))
        figures = f"{fewer:.2f} | {100 * error:.2g} % | {encode_ms:.3f} | {decode_ms:.3f}"
        print(f"| `{name}` | {figures} |")


if __name__ == "__main__":
    main()
