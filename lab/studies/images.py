"""Tests which grid positions suit vision transformers, on images and on volumes."""

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
        "A vision transformer can encode patch positions with a learned table, sinusoids, axial "
        "RoPE, 2-D relative keys, a table of biases, or distance biases (HyPE, ALiBi). Which of "
        "these classifies digits best, at the training size and on larger images? Does HyPE help "
        "on volumes, as Angelotti 2023 proposes?"
    ),
    answer=(
        "At the training size, RoPE is better than no position. On patches, RoPE and sinusoids "
        "(0.97) are better than a learned table (0.95), and a learned HyPE bias (0.92) is worse. "
        "On convolutional feature maps, RoPE, 2-D relative keys and a learned table are equivalent "
        "(0.98). On larger images, the order reverses: at 44 pixels, HyPE (0.84) is better than "
        "CAPE (0.66), and HyPE, ALiBi and no position are better than sinusoids (0.22) and RoPE "
        "(0.15). The results on volumes are inconclusive, because every model overfits."
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
                    ""
                    "none,learned,sinusoidal:shape=grid,cape:shape=grid,relative2d:shape=grid,grid_bias:shape=grid,"
                    f"{ROPE},alibi:shape=grid,{HYPE},{BOTH}",
                ),
                *("--sizes", "36,44"),
                *("--shift", "2"),
                *("--steps", "1500"),
                *("--seeds", "5"),
            ),
            MNIST,
        ),
        Comparison(
            "mixed",
            "MNIST, axial and mixed RoPE",
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
            "MNIST, attention over a convolutional feature map",
            "mnist.safetensors",
            (
                *("--task", "images"),
                *("--stem", "conv"),
                *("--pool", "mean"),
                *("--position", f"none,learned,relative2d:shape=grid,{ROPE},{HYPE}"),
                *("--shift", "2"),
                *("--steps", "1500"),
                *("--seeds", "5"),
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
            "2-D positions are better than a learned table at the training size.",
            tuple(
                Contrast(f"dot/{position}", 28, "dot/learned", 28, "accuracy")
                for position in (SINUSOIDS, "relative2d:shape=grid", ROPE, HYPE)
            ),
            why=(
                "On patches of digits, the mean accuracy is 0.973 with RoPE, 0.972 with sinusoids, "
                "0.954 with 2-D relative keys, 0.951 with the learned table and 0.922 with a "
                "learned HyPE bias. On convolutional feature maps, 2-D relative keys and RoPE "
                "(0.984) are equivalent to the table (0.982); the bias has 0.979. On the volumes, "
                "all models overfit (see Limits)."
            ),
        ),
        Claim(
            "RoPE is better than sinusoids and no position at the training size.",
            tuple(
                Contrast(f"dot/{ROPE}", 28, f"dot/{other}", 28, "accuracy")
                for other in (SINUSOIDS, "none")
            ),
            why=(
                "On patches, the mean accuracy is 0.973 with RoPE and 0.972 with sinusoids. "
                "Without a position, it is 0.767. On convolutional feature maps, it is 0.984 with "
                "RoPE and 0.967 without a position. On the volumes, all models overfit, and the "
                "mean accuracies with RoPE and without a position differ by 0.006."
            ),
        ),
        Claim(
            (
                "Mixed RoPE, with learned per-head frequencies, is better than axial RoPE at the "
                "training size and on 44-pixel digits."
            ),
            tuple(Contrast(f"dot/{MIXED}", at, f"dot/{ROPE}", at, "accuracy") for at in (28, 44)),
            why=(
                "At 28 pixels, both have a mean accuracy of 0.94. On larger digits, mixed RoPE has "
                "a higher mean accuracy (at 36 pixels, 0.43 compared with 0.38). However, at each "
                "size, its accuracy is lower for one of three seeds. The paper trains far larger "
                "models on ImageNet."
            ),
        ),
        Claim(
            (
                "A bias alone, from a table or a function of distance, is better than no position "
                "at the training size."
            ),
            tuple(
                Contrast(f"dot/{bias}", 28, "dot/none", 28, "accuracy")
                for bias in ("grid_bias:shape=grid", ALIBI, HYPE)
            ),
            why=(
                "On patches, the mean accuracy is 0.922 with HyPE, 0.873 with the table, 0.794 "
                "with ALiBi and 0.767 without a position. Distance biases are symmetric in the "
                "offset. The table is not, because it has a separate bias for each offset, but its "
                "mean accuracy is lower than that of HyPE. On convolutional feature maps, the mean "
                "accuracy is 0.979 with HyPE and 0.967 without a position. On the volumes, all "
                "models overfit."
            ),
        ),
        Claim(
            "Models with distance biases, or without positions, are better than those with RoPE "
            "or sinusoids on 44-pixel digits.",
            tuple(
                Contrast(f"dot/{left}", 44, f"dot/{other}", 44, "accuracy")
                for left in (ALIBI, HYPE, "none")
                for other in (ROPE, SINUSOIDS)
            ),
        ),
        Claim(
            "On 44-pixel digits, CAPE is better than distance biases, which are better than no "
            "position.",
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
                "At 44 pixels, the mean accuracy is 0.836 with HyPE, 0.657 with CAPE, 0.514 with "
                "ALiBi and 0.427 without a position. At 28 pixels, it is 0.922 with HyPE and 0.843 "
                "with CAPE."
            ),
        ),
        Claim(
            "RoPE with a learned HyPE bias is better than RoPE.",
            tuple(Contrast(f"dot/{BOTH}", n, f"dot/{ROPE}", n, "accuracy") for n in (28, 44)),
            why=(
                "At 28 pixels, the mean accuracy is 0.975 with the bias and 0.973 without it. At "
                "44 pixels, it is 0.174 and 0.150; chance is 0.1. The records do not contain the "
                "learned tau, so they do not show whether the model uses the bias. On the volumes, "
                "all models overfit."
            ),
        ),
    ),
    limits=(
        "Digits are easy to classify. The models are small, training on volumes and with mixed "
        "RoPE is short, and all combinations use the same learning rate. The larger images are the "
        "same digits, enlarged. On the volumes (1,188 for training, 298 for testing), every model "
        "overfits. The final training losses have means of at most 0.022 nats; the final test "
        "losses have means of at least 1.25 nats. Predicting the class frequencies would give a "
        "loss of 0.54. Always predicting the majority class would give an accuracy of 0.768; the "
        "models have mean accuracies of 0.748 to 0.776. The area under the ROC curve, which "
        "MedMNIST also reports, is not measured. Whether HyPE helps on volumes remains open."
    ),
    sources=(
        "Dosovitskiy et al. 2021; Touvron et al. 2021, DeiT; Ramachandran et al. 2019; Srinivas "
        "et al. 2021, BoTNet; Liu et al. 2021, Swin; Likhomanenko et al. 2021, CAPE; Heo et al. "
        "2024, RoPE for vision transformers; Angelotti 2023, HyPE. LeCun et al. 1998; Yang et al. "
        "2023, MedMNIST."
    ),
)
