"""Which positions of a grid serve vision transformers, on images and on volumes."""

from study import ADRENAL, MNIST, Claim, Comparison, Contrast, Study

SINUSOIDS = "sinusoidal:shape=grid"
CAPE = "cape:shape=grid"
ALIBI = "alibi:shape=grid"
HYPE = "hype:shape=grid:tau=learned:mode=abs"
ROPE = "rope:shape=grid"
MIXED = "rope_mixed:shape=grid"
BOTH = f"{ROPE}+{HYPE}"

STUDY = Study(
    title="Positions on grids",
    question=(
        "A vision transformer can know the places of its patches by a learned table "
        "(Dosovitskiy et al. 2021), sinusoids, axial RoPE, 2-D relative keys (Ramachandran et "
        "al. 2019; Srinivas et al. 2021), a table of biases (Liu et al. 2021), or biases by "
        "distance (HyPE, ALiBi). Which classifies digits best, at the training size and on "
        "larger images? Does HyPE help on volumes, as Angelotti 2023 proposes?"
    ),
    answer=(
        "At the training size RoPE is better than no position, and a learned HyPE bias is worse "
        "than a learned table; RoPE has the highest mean accuracy (0.94). On larger images the "
        "order reverses: no position, ALiBi and HyPE are better than RoPE, and CAPE is better "
        "than ALiBi. The volumes decide nothing, because every model overfits."
    ),
    comparisons=(
        Comparison(
            "digits",
            "MNIST, patches",
            "mnist.safetensors",
            (
                *("--task", "images"),
                *(
                    "--position",
                    "none,learned,sinusoidal:shape=grid,cape:shape=grid,relative2d:shape=grid,grid_bias:shape=grid,"
                    f"{ROPE},alibi:shape=grid,{HYPE},{BOTH}",
                ),
                *("--sizes", "36,44"),
                *("--steps", "400"),
                *("--seeds", "3"),
            ),
            MNIST,
        ),
        Comparison(
            "mixed",
            "MNIST, RoPE by axes and mixed",
            "mnist.safetensors",
            (
                *("--task", "images"),
                *("--position", f"{ROPE},{MIXED}"),
                *("--sizes", "36,44"),
                *("--steps", "400"),
                *("--seeds", "3"),
            ),
            MNIST,
        ),
        Comparison(
            "features",
            "MNIST, attention over the feature map of convolutions",
            "mnist.safetensors",
            (
                *("--task", "images"),
                *("--stem", "conv"),
                *("--pool", "mean"),
                *("--position", f"none,learned,relative2d:shape=grid,{ROPE},{HYPE}"),
                *("--steps", "400"),
                *("--seeds", "3"),
            ),
            MNIST,
        ),
        Comparison(
            "volumes",
            "AdrenalMNIST3D",
            "adrenal.safetensors",
            (
                *("--task", "volumes"),
                *(
                    "--position",
                    f"none,learned,grid_bias:shape=grid,{ROPE},alibi:shape=grid,{HYPE},{BOTH}",
                ),
                *("--steps", "200"),
                *("--seeds", "3"),
            ),
            ADRENAL,
        ),
    ),
    claims=(
        Claim(
            "Positions on the grid are better than a learned table, at the trained size.",
            tuple(
                Contrast(f"dot/{position}", 28, "dot/learned", 28, "accuracy")
                for position in (SINUSOIDS, "relative2d:shape=grid", ROPE, HYPE)
            ),
            why=(
                "It depends on which. On patches of digits RoPE (0.938) and sinusoids (0.911) are "
                "ahead of a learned table (0.851), and 2-D relative keys (0.773) and a learned "
                "HyPE bias (0.698) behind it. Behind convolutions the differences are smaller: "
                "RoPE 0.956, the table 0.946, the bias 0.915. On the volumes all models overfit "
                "(see the limits)."
            ),
        ),
        Claim(
            "RoPE is better than sinusoids and than no position, at the trained size.",
            tuple(
                Contrast(f"dot/{ROPE}", 28, f"dot/{other}", 28, "accuracy")
                for other in (SINUSOIDS, "none")
            ),
            why=(
                "On digits it is, on patches (0.938, sinusoids 0.911, no position 0.700) and "
                "behind convolutions (0.956, no position 0.908). On the volumes all models "
                "overfit; RoPE has 0.768 and no position 0.763, and the seeds of the latter range "
                "from 0.732 to 0.782."
            ),
        ),
        Claim(
            "Mixed rotations, whose frequencies are learned for each head, are better than RoPE by "
            "axes, at the trained size and on digits of 44 pixels.",
            tuple(Contrast(f"dot/{MIXED}", at, f"dot/{ROPE}", at, "accuracy") for at in (28, 44)),
            why=(
                "At 28 both have 0.94. On larger digits the means are higher with mixed rotations, "
                "0.43 and 0.38 at 36 and 0.17 and 0.13 at 44, and one seed of three is lower at "
                "either size. Their source trains far larger models, on ImageNet."
            ),
        ),
        Claim(
            "A bias alone, of a table or by distance, is better than no position, at the trained "
            "size.",
            tuple(
                Contrast(f"dot/{bias}", 28, "dot/none", 28, "accuracy")
                for bias in ("grid_bias:shape=grid", ALIBI, HYPE)
            ),
            why=(
                "On patches all four are at 0.70, their seeds between 0.69 and 0.71. Biases by "
                "distance are the same to the left and to the right; the table, which has one for "
                "each offset, is no better. What the biases lack was not looked into. On the "
                "volumes all models overfit."
            ),
        ),
        Claim(
            "Models with biases by distance, or without positions, are better than those with "
            "RoPE or sinusoids on digits of 44 pixels.",
            tuple(
                Contrast(f"dot/{left}", 44, f"dot/{other}", 44, "accuracy")
                for left in (ALIBI, HYPE, "none")
                for other in (ROPE, SINUSOIDS)
            ),
        ),
        Claim(
            "On digits of 44 pixels CAPE is better than biases by distance, and these are better "
            "than no position.",
            tuple(
                Contrast(f"dot/{left}", 44, f"dot/{right}", 44, "accuracy")
                for left, right in (
                    (CAPE, ALIBI),
                    (CAPE, HYPE),
                    (ALIBI, "none"),
                    (HYPE, "none"),
                )
            ),
            why=(
                "The biases are ahead of no position by little, 0.383 and 0.387 to 0.362, and "
                "CAPE by more, 0.518. At 28 CAPE has 0.726, and these have 0.70."
            ),
        ),
        Claim(
            "RoPE with a learned HyPE bias is better than RoPE.",
            tuple(Contrast(f"dot/{BOTH}", n, f"dot/{ROPE}", n, "accuracy") for n in (28, 44)),
            why=(
                "At 28 both are at 0.938. At 44 they are near chance, 0.1: 0.152 with the bias "
                "and 0.130 without, and of three seeds it is ahead in two. The records do not "
                "hold what tau became beside RoPE, so they do not tell whether the bias was in "
                "use. On the volumes all models overfit."
            ),
        ),
    ),
    limits=(
        "Digits are easy; the models are small, their training is short, and one learning rate "
        "serves all. Larger images here are the same digits, enlarged. On the volumes (1,188 in "
        "training, 298 in the test) every model overfits: as means over the seeds, its training "
        "loss ends at 0.001 to 0.022 nats and its test loss is 1.25 to 1.51, where always giving "
        "the frequencies of the two classes has 0.54. Of the test's volumes 23% are of the second "
        "class, so that always naming the first has an accuracy of 0.768; the models have 0.748 "
        "to 0.776, which says little of positions. The area under the ROC curve, which MedMNIST "
        "gives too, is not measured. Whether HyPE serves volumes, as its author proposes, is open."
    ),
    sources=(
        "Dosovitskiy et al. 2021; Touvron et al. 2021, DeiT; Ramachandran et al. 2019; Srinivas "
        "et al. 2021, BoTNet; Liu et al. 2021, Swin; Likhomanenko et al. 2021, CAPE; Heo et al. "
        "2024, RoPE for vision transformers; Angelotti 2023, HyPE. LeCun et al. 1998; Yang et al. "
        "2023, MedMNIST."
    ),
)
