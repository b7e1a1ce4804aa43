"""One synchronised backward pass: capture, exchange, commit, write `param.grad`."""
