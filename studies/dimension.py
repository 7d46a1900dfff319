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


def translation(heads: int) -> Comparison:
    return Comparison(
        f"translation-{128 // heads}",
        f"Multi30k with heads of {128 // heads} columns",
        "multi30k",
        (
            *("--task", "translation"),
            *("--source-language", "de"),
            *("--splits", "valid"),
            *("--similarity", "dot,penumbral,umbral"),
            *("--position", "sinusoidal"),
            *("--vocabulary", "4000"),
            *("--dim", "128"),
            *("--depth", "2"),
            *("--heads", str(heads)),
            *("--learning-rate", "0.002"),
            *("--steps", "600"),
            *("--seeds", "3"),
        ),
    )


STUDY = Study(
    title="Few dimensions",
    question=(
        "Tseng et al. 2023 report that cones need fewer dimensions than the dot product: 16 "
        "columns a head do what 128 do. Is a cone ahead of the dot product where there are few, "
        "and does its lead shrink with more?"
    ),
    comparisons=(
        *map(hierarchy, DIMENSIONS),
        *map(images, (16, 4, 1)),
        *map(translation, (32, 8, 2)),
    ),
    claims=(
        Claim(
            "Penumbral and umbral cones rank ancestors higher than the dot product.",
            tuple(
                Contrast(f"{cone}/none", "test", "dot/none", "test", "mrr")
                for cone in ("penumbral", "umbral")
            ),
            why=(
                "Their score of a pair is symmetric: it tells an ancestor from a descendant, or "
                "from a sibling, only by what else lies near. So are the dot product and "
                "distances, so that this is not all of it. By themselves such scores can order a "
                "tree: `gnomon inspect rank` finds, for a binary one of 15 nodes, a wider margin "
                "with penumbral cones than with the dot product from three dimensions on, with "
                "umbral ones from four ([Which position, which "
                "similarity?](../choosing.md#similarity)). What was tried, in 4 dimensions with "
                "one seed, by `gnomon train --task hierarchy --data mammals.safetensors --position "
                "none --dim 4 --steps 600 --similarity penumbral`: `--steps 2400` lifts the mean "
                "reciprocal rank to 0.12; `--learning-rate` of 0.01, 0.03 and 0.1 leaves it at "
                "0.01 to 0.03, and map=exp, score=log and r=4 at 0.04 to 0.05. The Laplacian and "
                "the Gaussian have 0.02: a score that is highest between a node and itself ranks "
                "its neighbours before its ancestors."
            ),
        ),
        Claim(
            "Entailment cones rank ancestors higher than the dot product.",
            (Contrast("entailment/none", "test", "dot/none", "test", "mrr"),),
            why="Their score is not symmetric: a descendant lies in the cone of its ancestor.",
        ),
        Claim(
            "Penumbral and umbral cones tell images better than the dot product.",
            tuple(
                Contrast(f"{cone}/learned", 28, "dot/learned", 28, "accuracy")
                for cone in ("penumbral", "umbral")
            ),
            why=(
                "The source's claim is of data that form hierarchies; the patches of a digit form "
                "none. Other learning rates and longer runs were not tried."
            ),
        ),
        Claim(
            "Penumbral and umbral cones translate better than the dot product.",
            tuple(
                Contrast(f"{cone}/sinusoidal", "valid", "dot/sinusoidal", "valid", metric)
                for cone in ("penumbral", "umbral")
                for metric in (None, "bleu")
            ),
            why=(
                "Penumbral cones are behind with heads of 4 columns, level with 16, and with 64 "
                "ahead in the loss: the other way round than the source has it. Umbral cones are "
                "behind by 3 to 4 BLEU with each. The learning rate is not the reason: with heads "
                "of 4 columns and one seed, at `--learning-rate 0.004` the dot product has 24.5 "
                "BLEU, penumbral cones 22.7 and umbral ones 19.4, and at 0.001 12.7, 12.7 and "
                "11.6. One column of a cone's head is its height, a fourth of 4; whether that is "
                "why, and what longer training would give, was not tried."
            ),
        ),
    ),
    limits=(
        "One hierarchy of 1180 nodes, digits, which any of these tell, and 29,000 pairs of "
        "sentences, seen less than three times. All similarities have one learning rate."
    ),
    sources="Tseng et al. 2023, Coneheads; Ganea et al. 2018; Nickel and Kiela 2017.",
)
