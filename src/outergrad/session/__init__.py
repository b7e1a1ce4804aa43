"""The life of a distributed model, from `distribute()` to `detach()`."""
