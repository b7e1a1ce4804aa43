"""outergrad within other training libraries: only the file or folder of a library imports it."""
