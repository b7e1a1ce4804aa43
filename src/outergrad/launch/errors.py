"""Exceptions of a recipe, as the command line reports them."""


class RecipeError(ValueError):
    """A mistake that the user can mend; shown as one line."""


class SiteError(RuntimeError):
    """A site ended before its work was done.

    Attributes:
        lost: Numbers of sites whose processes ended without a report, as a killed one does.
    """

    lost: frozenset[int] = frozenset()


class CheckError(RuntimeError):
    """A measured value differs from what was promised."""
