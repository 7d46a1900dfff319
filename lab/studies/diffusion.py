"""Compares positions and similarities in a diffusion transformer."""

from study import CLASSIFIER, MNIST, Claim, Comparison, Contrast, Study

SINUSOIDS = "sinusoidal:shape=grid"
ROPE = "rope:shape=grid"
HYPE = "hype:shape=grid:tau=learned:mode=abs"

STUDY = Study(
    title="Diffusion",
    question=(
        "Tseng et al. 2023 report that cones lower the Fréchet distance of a diffusion transformer "
        "(DiT) from 68.9 to 67.6. Do cones lower the noise prediction loss compared with the dot "
        "product? Do positions in attention lower this loss compared with DiT's sinusoids? Are "
        "images generated with cones closer to the data?"
    ),
    answer=(
        "No difference between cones and the dot product is significant, either in the loss or in "
        "the Fréchet distance. A learned table and RoPE with a learned HyPE bias have "
        "significantly lower losses than no position. With three seeds, the other positions are "
        "not distinguishable from no position, and positions in attention are not distinguishable "
        "from sinusoids."
    ),
    comparisons=(
        Comparison(
            "digits",
            "MNIST",
            "mnist.safetensors",
            (
                *("--task", "diffusion"),
                *(
                    word
                    for run in (
                        f"dot/{SINUSOIDS}",
                        f"penumbral/{SINUSOIDS}",
                        f"umbral/{SINUSOIDS}",
                        "dot/none",
                        "dot/learned",
                        "dot/relative2d:shape=grid",
                        f"dot/{ROPE}",
                        f"dot/{HYPE}",
                        f"dot/{ROPE}+{HYPE}",
                    )
                    for word in ("--run", run)
                ),
                *("--steps", "600"),
                *("--seeds", "3"),
            ),
            MNIST,
        ),
        Comparison(
            "pictures",
            "MNIST, generated images",
            "mnist.safetensors",
            (
                *("--task", "diffusion"),
                *("--similarity", "dot,penumbral,umbral"),
                *("--position", SINUSOIDS),
                *("--classifier", CLASSIFIER),
                *("--frechet-images", "500"),
                *("--steps", "1200"),
                *("--seeds", "3"),
            ),
            MNIST,
            classifier=(
                *("--position", ROPE),
                *("--stem", "conv"),
                *("--shift", "2"),
                *("--steps", "1500"),
            ),
        ),
    ),
    claims=(
        Claim(
            "Cones have a lower loss than the dot product.",
            tuple(
                Contrast(f"{cone}/{SINUSOIDS}", "0-999", f"dot/{SINUSOIDS}", "0-999")
                for cone in ("penumbral", "umbral")
            ),
            why=(
                "After 600 steps, the mean losses with cones and with the dot product differ by at "
                "most 0.0001. Each kind of cone has a lower loss than the dot product for one of "
                "three seeds. After 1200 steps, both kinds have a higher loss than the dot product "
                "for all three seeds, by 0.0001 to 0.0008."
            ),
        ),
        Claim(
            (
                "Images generated with cones have a lower Fréchet distance than images generated "
                "with the dot product."
            ),
            tuple(
                Contrast(
                    f"{cone}/{SINUSOIDS}",
                    "0-999",
                    f"dot/{SINUSOIDS}",
                    "0-999",
                    "frechet",
                    left_in="pictures",
                    right_in="pictures",
                )
                for cone in ("penumbral", "umbral")
            ),
            why=(
                "With the dot product, the mean distance is 35.0. It is 1.2% lower with penumbral "
                "cones and 1.7% lower with umbral cones; in the paper, the reductions are 1.7% and "
                "1.9%, respectively. For the first seed, both kinds of cones have a higher "
                "distance than the dot product. For each similarity, the distances of the three "
                "seeds differ by 3 to 4, so three seeds cannot show a difference of this size."
            ),
        ),
        Claim(
            (
                "Positions in attention have a lower loss than sinusoids or a learned table, which "
                "are added to the patch embeddings."
            ),
            tuple(
                Contrast(f"dot/{position}", "0-999", f"dot/{added}", "0-999")
                for added in (SINUSOIDS, "learned")
                for position in ("relative2d:shape=grid", ROPE, HYPE, f"{ROPE}+{HYPE}")
            ),
            why=(
                "RoPE has the lowest mean loss: 0.0534, compared with 0.0565 for sinusoids. Its "
                "loss is lower than that of sinusoids for all three seeds, by 0.0012 to 0.0048, "
                "but this spread is too large for significance. RoPE with a learned HyPE bias has "
                "a mean loss of 0.0536 with a smaller spread. With the bias alone, the mean loss "
                "is 0.0582. This bias is symmetric in the offset, but whether the symmetry "
                "explains the higher loss was not tested."
            ),
        ),
        Claim(
            "Every positional encoding has a lower loss than no positional encoding.",
            tuple(
                Contrast(f"dot/{position}", "0-999", "dot/none", "0-999")
                for position in (
                    *(SINUSOIDS, "learned", "relative2d:shape=grid"),
                    *(ROPE, HYPE, f"{ROPE}+{HYPE}"),
                )
            ),
            why=(
                "All six positional encodings lower the loss for all three seeds. Sinusoids and a "
                "learned HyPE bias alone lower it by at most 0.0037."
            ),
        ),
    ),
    margins={"loss": 0.001},
    limits=(
        "The noise prediction loss does not measure image quality. The Fréchet distance uses 500 "
        "images and the features of a digit classifier, so it cannot be compared with the paper's "
        "distance, which uses Inception features. The images are digits of 28 x 28 pixels, split "
        "into 49 patches. The model is small, and after 600 or 1200 steps its images are not yet "
        "recognisable as digits."
    ),
    sources="Peebles and Xie 2023, DiT; Ho et al. 2020; Tseng et al. 2023, Coneheads.",
)
