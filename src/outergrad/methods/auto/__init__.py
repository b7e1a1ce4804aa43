"""og.Auto(): choice of methods by measured step times."""
