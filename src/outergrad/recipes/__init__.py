"""Data sets, models and training loops behind ``outergrad train`` and the demo."""
