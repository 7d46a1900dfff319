"""Other libraries; each module needs the package that it is named after, gnomon needs none."""
