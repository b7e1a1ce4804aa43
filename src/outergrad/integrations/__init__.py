"""outergrad within other training libraries: a file per library, which only that file imports."""
