"""One backward that is shared: collect, send, commit, write."""
