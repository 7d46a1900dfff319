"""Positions and similarities of a diffusion transformer."""

from study import MNIST, Claim, Comparison, Contrast, Study

SINUSOIDS = "sinusoidal:shape=grid"
ROPE = "rope:shape=grid"
HYPE = "hype:shape=grid:tau=learned:mode=abs"

STUDY = Study(
    title="Diffusion",
    question=(
        "Tseng et al. 2023 report that cones lower the Frechet distance of a diffusion transformer "
        "from 68.9 to 67.6. Is the loss of the predicted noise lower with cones than with the dot "
        "product, and with positions in attention than with the sinusoids that DiT adds to its "
        "patches?"
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
    ),
    claims=(
        Claim(
            "Cones have a lower loss than the dot product.",
            tuple(
                Contrast(f"{cone}/{SINUSOIDS}", "0-999", f"dot/{SINUSOIDS}", "0-999")
                for cone in ("penumbral", "umbral")
            ),
            why=(
                "The losses are equal to three digits. What the source measured, the Frechet "
                "distance of pictures after a long training, was not tried."
            ),
        ),
        Claim(
            "Positions in attention have a lower loss than sinusoids on the patches.",
            tuple(
                Contrast(f"dot/{position}", "0-999", f"dot/{SINUSOIDS}", "0-999")
                for position in ("relative2d:shape=grid", ROPE, HYPE, f"{ROPE}+{HYPE}")
            ),
            why=(
                "The patches are 7 x 7. RoPE and relative keys tell them apart by where they are "
                "to each other; a bias that only falls with the distance does not, and alone it is "
                "hardly better than no position."
            ),
        ),
    ),
    limits=(
        "The loss of the noise is not the quality of the pictures, on which the source judges; "
        "digits of 28 x 28 pixels, a small model, and 600 steps, after which its pictures are not "
        "yet digits."
    ),
    sources="Peebles and Xie 2023, DiT; Ho et al. 2020; Tseng et al. 2023, Coneheads.",
)
