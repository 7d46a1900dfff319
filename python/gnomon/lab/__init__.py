"""The lab: an application of the library that trains, compares and inspects models.

``gnomon.data``, ``gnomon.inspect``, ``gnomon.models`` and ``gnomon.report`` are short names of its
packages. ``import gnomon`` loads none of them.
"""
