"""The lab: an application built on the library that trains, compares and inspects models.

``gnomon.data``, ``gnomon.inspect``, ``gnomon.models`` and ``gnomon.report`` are aliases of the
lab's packages. ``import gnomon`` loads none of them.
"""
