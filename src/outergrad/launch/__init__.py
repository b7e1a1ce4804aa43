"""Sites as processes or threads, supervised, behind shaped links."""

from outergrad.core.packages import require

require("psutil", "rich", "sklearn", "typer")
