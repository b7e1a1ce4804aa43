"""Where the lab finds `require`."""

from outergrad.report.recording import require as require
