"""What compares the methods: the links, and the sites that they join."""
