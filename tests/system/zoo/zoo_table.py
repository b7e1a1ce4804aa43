"""Every model of other libraries that must train as under DDP."""

from __future__ import annotations

import zoo_others
import zoo_speech
import zoo_text
import zoo_vision

ZOO = zoo_text.CASES | zoo_vision.CASES | zoo_speech.CASES | zoo_others.CASES
