"""Methods of sharing gradients: frozen dataclasses of settings, and the compressors they make."""
