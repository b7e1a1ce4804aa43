def write_figures(*args):
    return []
