"""Which positions of a grid serve vision transformers, on images and on volumes."""

from study import MNIST, Claim, Comparison, Contrast, Study

HYPE = "hype:shape=grid:tau=learned:mode=abs"
ROPE = "rope:shape=grid"
BOTH = f"{ROPE}+{HYPE}"
ADRENAL = (
    *("gnomon", "data", "OUT"),
    "train.volumes=adrenalmnist3d/adrenalmnist3d.npz:train_images",
    "train.labels=adrenalmnist3d/adrenalmnist3d.npz:train_labels",
    "valid.volumes=adrenalmnist3d/adrenalmnist3d.npz:test_images",
    "valid.labels=adrenalmnist3d/adrenalmnist3d.npz:test_labels",
)

STUDY = Study(
    title="Positions on grids",
    question=(
        "What a vision transformer is told of the places of its patches is a choice: a learned "
        "table (Dosovitskiy et al. 2021), sinusoids, axial RoPE, relative keys by rows and columns "
        "(Ramachandran et al. 2019; Srinivas et al. 2021), a table of biases (Liu et al. 2021), or "
        "biases by distance along the axes, HyPE's and ALiBi's. Which tells digits best, and "
        "which does on images of another size than the training's? On volumes, which have "
        "three axes, Angelotti 2023 proposes HyPE."
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
            "Positions on the grid are better than a learned table.",
            tuple(
                Contrast(f"dot/{position}", 28, "dot/learned", 28, "accuracy")
                for position in ("relative2d:shape=grid", ROPE, HYPE)
            ),
            why=(
                "It depends on which. On digits RoPE is ahead of a learned table; biases by "
                "distance alone tell no more of patches than no position does (0.70). Behind "
                "convolutions, which tell of places themselves, the differences shrink. On the "
                "volumes none does better than who names the larger class always (0.77)."
            ),
        ),
        Claim(
            "Biases by distance tell larger images better than RoPE and sinusoids do.",
            tuple(
                Contrast(f"dot/{bias}", 44, f"dot/{other}", 44, "accuracy")
                for bias in ("alibi:shape=grid", HYPE)
                for other in (ROPE, "sinusoidal:shape=grid")
            ),
            why=(
                "No position at all does about as well as these biases on larger images (0.36), "
                "and CAPE better (0.52)."
            ),
        ),
        Claim(
            "RoPE with a learned HyPE bias is better than RoPE.",
            tuple(Contrast(f"dot/{BOTH}", n, f"dot/{ROPE}", n, "accuracy") for n in (28, 44)),
            why=(
                "By itself the bias tells no more than no position does, at the trained size. What "
                "it learned beside RoPE was not looked into."
            ),
        ),
    ),
    limits=(
        "Digits are easy and the volumes few (1,188 in training, 298 in the test), so that most "
        "choices tell them about as well; the models are small, their training is short, and one "
        "learning rate serves all. Larger images here are the same digits, enlarged."
    ),
    sources=(
        "Dosovitskiy et al. 2021; Touvron et al. 2021, DeiT; Ramachandran et al. 2019; Srinivas "
        "et al. 2021, BoTNet; Liu et al. 2021, Swin; Likhomanenko et al. 2021, CAPE; Heo et al. "
        "2024, RoPE for vision transformers; Angelotti 2023, HyPE. LeCun et al. 1998; Yang et al. "
        "2023, MedMNIST."
    ),
)
