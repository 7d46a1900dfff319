"""Tests whether another similarity classifies the nodes of a graph better than GAT's own."""

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
OTHERS = (
    "additive",
    "cosine",
    "lorentz",
    "hyperbolic:model=ball",
    "hyperbolic:model=klein",
)
OWN = "additive/none"


def cora(name: str, title: str, similarities: tuple[str, ...]) -> Comparison:
    return Comparison(
        name,
        title,
        "cora.safetensors",
        (
            *("--task", "graphs"),
            *("--similarity", ",".join(similarities)),
            *("--position", "none"),
            *("--seeds", "20"),
        ),
        CORA,
    )


STUDY = Study(
    title="Similarities on a graph",
    question=(
        "A graph attention network (GAT) scores the two ends of an edge with an additive function. "
        "Tseng et al. 2023 replace this function with other similarities and report one accuracy "
        "on Cora for each. In the paper, the additive score has an accuracy of 0.831; the other "
        "accuracies range from 0.823 (Laplacian) to 0.836 (umbral cones). Which of these "
        "differences hold over 20 seeds?"
    ),
    answer=(
        "None of the published differences is confirmed: over 20 seeds, no similarity is better "
        "than the additive score. Umbral cones, the hyperbolic distances, the Laplacian and the "
        "Lorentzian distance are equivalent to the additive score, with a margin of 0.005 in "
        "accuracy. Cosine similarity and entailment cones are worse: their mean accuracies are "
        "lower by 0.019 and 0.044."
    ),
    comparisons=(
        cora("cora", "Cora, similarities in the paper", SIMILARITIES),
        cora("cora-others", "Cora, similarities not in the paper", OTHERS),
    ),
    claims=(
        Claim(
            "Cones are better than the additive score.",
            tuple(
                Contrast(f"{cone}/none", "test", OWN, "test", "accuracy")
                for cone in ("penumbral", "umbral")
            ),
            why=(
                "The published accuracies come from single runs and differ from that of the "
                "additive score by 0.003 to 0.008. Over 20 seeds, the standard deviation of the "
                "accuracy is 0.004 to 0.007 (except for entailment cones), so a single run cannot "
                "show such a difference."
            ),
        ),
        Claim(
            "The dot product and the half-space distance are better than the additive score.",
            tuple(
                Contrast(f"{name}/none", "test", OWN, "test", "accuracy")
                for name in ("dot", "hyperbolic:model=half_space")
            ),
            why="The published differences are smaller than the variation between seeds.",
        ),
        Claim(
            "The Laplacian is worse than the additive score.",
            (Contrast("laplacian/none", "test", OWN, "test", "accuracy"),),
            left_is="worse",
            why=(
                "The 95% interval excludes a difference larger than 0.003; the published "
                "difference is 0.008."
            ),
        ),
        Claim(
            "A similarity that the paper does not test is better than the additive score.",
            tuple(
                Contrast(f"{name}/none", "test", OWN, "test", "accuracy")
                for name in ("hyperbolic", "gaussian", "entailment", *OTHERS[1:])
            ),
            why=(
                "The hyperbolic distances in the ball and in the Klein model are the same function "
                "in different coordinates, so they give the same accuracies. Cosine similarity and "
                "entailment cones are worse; settings other than GAT's were not tried."
            ),
        ),
        Claim(
            "Cones are better than the dot product.",
            tuple(
                Contrast(f"{cone}/none", "test", "dot/none", "test", "accuracy")
                for cone in ("penumbral", "umbral")
            ),
            why=("The published differences are 0.001 to 0.002."),
        ),
    ),
    margins={"accuracy": 0.005},
    limits=(
        "The study uses one graph, one split, and the settings of Velickovic et al. 2018 for all "
        "similarities (two layers, eight heads of dimension 8, dropout 0.6). However, training "
        "takes 300 steps and keeps the weights with the best validation accuracy. The seed "
        "determines the initial weights and the dropout. Other splits may give different results, "
        "because there are only 140 training nodes."
    ),
    sources=(
        "Velickovic et al. 2018, GAT; Tseng et al. 2023, Coneheads; Yang et al. 2016, Planetoid."
    ),
)
