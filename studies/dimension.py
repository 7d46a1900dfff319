"""Whether few dimensions suffice to cones."""

from study import MNIST, Claim, Comparison, Contrast, Study

SIMILARITIES = ("dot", "penumbral", "umbral", "hyperbolic:model=ball", "entailment")
DIMENSIONS = (2, 4, 8, 16)


def hierarchy(dim: int) -> Comparison:
    return Comparison(
        f"hierarchy-{dim}",
        f"WordNet's mammals in {dim} dimensions",
        "mammals.safetensors",
        (
            *("--task", "hierarchy"),
            *("--similarity", ",".join(SIMILARITIES)),
            *("--position", "none"),
            *("--dim", str(dim)),
            *("--steps", "600"),
            *("--seeds", "5"),
        ),
        ("gnomon", "data", "OUT", "train.pairs=wordnet/mammal_closure.csv:id1,id2"),
    )


def images(heads: int) -> Comparison:
    return Comparison(
        f"images-{64 // heads}",
        f"MNIST with heads of {64 // heads} columns",
        "mnist.safetensors",
        (
            *("--task", "images"),
            *("--similarity", "dot,penumbral,umbral"),
            *("--position", "learned"),
            *("--dim", "64"),
            *("--heads", str(heads)),
            *("--steps", "600"),
            *("--seeds", "5"),
        ),
        MNIST,
    )


STUDY = Study(
    title="Few dimensions",
    question=(
        "Tseng et al. 2023 report that cones need fewer dimensions than the dot product: 16 "
        "columns a head do what 128 do. Is a cone ahead of the dot product where there are few, "
        "and does its lead shrink with more?"
    ),
    comparisons=(*map(hierarchy, DIMENSIONS), *map(images, (16, 4, 1))),
    claims=(
        Claim(
            "Cones rank ancestors higher than the dot product.",
            tuple(
                Contrast(f"{cone}/none", "test", "dot/none", "test", "mrr")
                for cone in ("penumbral", "umbral", "entailment")
            ),
        ),
        Claim(
            "Cones tell images better than the dot product.",
            tuple(
                Contrast(f"{cone}/learned", 28, "dot/learned", 28, "accuracy")
                for cone in ("penumbral", "umbral")
            ),
        ),
    ),
    limits=(
        "One hierarchy of 1180 nodes, and digits, which any of these tell. All similarities have "
        "one learning rate."
    ),
    sources="Tseng et al. 2023, Coneheads; Ganea et al. 2018; Nickel and Kiela 2017.",
)
