"""Draws figures of encodings, trained models and cones: ``python -m gnomon.inspect``.

``import gnomon`` does not import these modules, because they import matplotlib.
"""
