"""Converts Planetoid's citation graphs (Yang et al. 2016) to text files of numbers."""

from __future__ import annotations

import collections
import pathlib
import pickle
from typing import Any

import numpy as np


class _Rows:
    """The fields of a pickled scipy csr_matrix."""

    indptr: np.ndarray[Any, Any]
    indices: np.ndarray[Any, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def words(self) -> list[list[int]]:
        return [
            sorted(self.indices[start:end].tolist())
            for start, end in zip(self.indptr[:-1], self.indptr[1:], strict=True)
        ]


_KNOWN = {
    ("scipy.sparse.csr", "csr_matrix"): _Rows,
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("collections", "defaultdict"): collections.defaultdict,
    ("builtins", "list"): list,
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that creates only arrays, sparse matrices and dictionaries of lists."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        # In Python 2, the module builtins was called __builtin__.
        module_name = module_name.replace("__builtin__", "builtins")
        try:
            return _KNOWN[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it contains a {module_name}.{global_name}, which is not allowed"
            ) from None


def texts(folder: pathlib.Path, name: str) -> dict[str, str]:
    """Converts the files ``ind.NAME.*`` in a folder, and returns text files by name.

    The files are:

    - edges.txt: two nodes per line, each pair once;
    - features.txt: the indices of one node's words per line;
    - labels.txt: one class per line;
    - train.index, val.index and test.index: one node per line.

    As in the paper, the first nodes, one per row of y, are for training, and the next 500 are for
    validation. Each node must be in ally or in test.index, as in Cora and Pubmed.
    """

    def load(part: str) -> Any:
        path = folder / f"ind.{name}.{part}"
        with path.open("rb") as file:
            try:
                return _Unpickler(file, encoding="latin1").load()
            except (pickle.UnpicklingError, EOFError) as error:
                raise ValueError(f"{path} is not a valid graph file: {error}") from error

    # The rows of allx and ally belong to the first nodes; the rows of tx and ty belong to the nodes
    # listed in test.index.
    tested = [int(line) for line in (folder / f"ind.{name}.test.index").read_text().split()]
    words = dict(enumerate(load("allx").words())) | dict(
        zip(tested, load("tx").words(), strict=True)
    )
    labels = dict(enumerate(load("ally").argmax(1).tolist())) | dict(
        zip(tested, load("ty").argmax(1).tolist(), strict=True)
    )
    edges = {
        (min(node, other), max(node, other))
        for node, others in load("graph").items()
        for other in others
        if node != other
    }
    trained = len(load("y"))
    rows: dict[str, list[Any]] = {
        "edges.txt": sorted(edges),
        "features.txt": [words[node] for node in range(len(words))],
        "labels.txt": [[labels[node]] for node in range(len(labels))],
        "train.index": [[node] for node in range(trained)],
        "val.index": [[node] for node in range(trained, trained + 500)],
        "test.index": [[node] for node in sorted(tested)],
    }
    return {
        file: "".join(" ".join(map(str, line)) + "\n" for line in lines)
        for file, lines in rows.items()
    }
