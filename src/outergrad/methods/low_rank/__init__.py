"""Low-rank methods: triplets that are gathered or merged, and sketches that are all-reduced."""
