"""Pictures of encodings, of trained models and of cones: ``python -m gnomon.inspect``.

Nothing here is imported by ``import gnomon``: the modules import matplotlib.
"""
