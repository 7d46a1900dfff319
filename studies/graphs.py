"""Whether another similarity than GAT's own tells the classes of a graph's nodes better."""

from study import CORA, Claim, Comparison, Contrast, Study

SIMILARITIES = (
    "additive",
    "dot",
    "penumbral",
    "umbral",
    "hyperbolic:model=half_space",
    "hyperbolic",
    "laplacian",
    "gaussian",
    "entailment",
)
OWN = "additive/none"

STUDY = Study(
    title="Similarities on a graph",
    question=(
        "A graph attention network scores the ends of an edge by an additive function. Tseng et "
        "al. 2023 put other similarities in its place, and report accuracies on Cora of 0.831 "
        "(additive), 0.834 (dot), 0.835 (penumbral), 0.836 (umbral), 0.834 (distance in the half "
        "space) and 0.823 (Laplacian), each with one number. Which of these differences hold "
        "over 20 seeds?"
    ),
    comparisons=(
        Comparison(
            "cora",
            "Cora, the standard split",
            "cora.safetensors",
            (
                *("--task", "graphs"),
                *("--similarity", ",".join(SIMILARITIES)),
                *("--position", "none"),
                *("--seeds", "20"),
            ),
            CORA,
        ),
    ),
    claims=(
        Claim(
            "Cones are better than the additive score.",
            tuple(
                Contrast(f"{cone}/none", "test", OWN, "test", "accuracy")
                for cone in ("penumbral", "umbral")
            ),
        ),
        Claim(
            "So are the dot product and the distance in the half space.",
            tuple(
                Contrast(f"{name}/none", "test", OWN, "test", "accuracy")
                for name in ("dot", "hyperbolic:model=half_space")
            ),
        ),
        Claim(
            "The Laplacian is worse.",
            (Contrast("laplacian/none", "test", OWN, "test", "accuracy"),),
        ),
        Claim(
            "Cones are better than the dot product.",
            tuple(
                Contrast(f"{cone}/none", "test", "dot/none", "test", "accuracy")
                for cone in ("penumbral", "umbral")
            ),
        ),
    ),
    limits=(
        "One graph, one split, and the settings of Velickovic et al. 2018 for all similarities "
        "(two layers, eight heads of eight columns, dropout 0.6), but 300 steps and the weights of "
        "the best validation accuracy for the paper's patience. The seeds are of the weights and "
        "of dropout: what another split would say is another question, and 140 training nodes "
        "make it a large one."
    ),
    sources=(
        "Velickovic et al. 2018, GAT; Tseng et al. 2023, Coneheads; Yang et al. 2016, Planetoid."
    ),
)
