"""outergrad within other training libraries: a file or folder of each alone imports it."""
