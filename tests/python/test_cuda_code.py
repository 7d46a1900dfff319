"""Tests of the machine code of the CUDA kernels, which NVRTC compiles without a GPU.

Budgets limit the instructions and shared-memory accesses per matrix product in the main loop, and
require enough resident blocks.
"""

import json
import subprocess

import cuda_model
import pytest
import sass
from test_cli import ROOT

pytestmark = pytest.mark.cpu("compiles GPU code without a GPU")

PROGRAM = ROOT / "build" / "bin" / "gnomon_write_cubins"
# For each kernel of a plain causal call in bf16: instructions and shared-memory wavefronts per
# matrix product, measured with NVRTC 13.0 (the larger of sm_80 and sm_90), and resident blocks.
BUDGETS = {
    "forward-dot-64": (5.06, 1.31, 2),
    "backward-dot-64": (3.54, 2.14, 2),
    "backward_factor-dot-64": (4.97, 2.33, 2),
    "backward_queries-dot-64": (6.00, 2.40, 2),
    "backward_keys-dot-64": (4.77, 2.67, 2),
    "forward-dot-128": (3.69, 1.80, 2),
    "backward-dot-128": (3.49, 2.79, 2),
    "backward_factor-dot-128": (4.20, 2.98, 2),
    "backward_queries-dot-128": (4.56, 2.40, 2),
    "backward_keys-dot-128": (4.90, 2.52, 2),
    "forward-laplacian-64": (9.02, 3.16, 3),
    "backward-laplacian-64": (6.24, 2.39, 2),
    "backward_factor-laplacian-64": (7.73, 2.53, 2),
    "backward_queries-laplacian-64": (12.33, 2.73, 2),
    "backward_keys-laplacian-64": (11.27, 3.00, 2),
    "forward-laplacian-128": (5.41, 2.70, 2),
    "backward-laplacian-128": (4.84, 2.99, 2),
    "backward_factor-laplacian-128": (5.85, 3.14, 2),
    "backward_queries-laplacian-128": (8.58, 3.98, 2),
    "backward_keys-laplacian-128": (9.39, 3.75, 2),
    "forward-umbral-64": (10.64, 3.41, 3),
    "forward_split-umbral-64": (8.34, 2.27, 3),
    "backward-umbral-64": (7.90, 2.44, 2),
    "backward_factor-umbral-64": (9.43, 2.58, 2),
    "backward_queries-umbral-64": (19.17, 2.90, 2),
    "backward_keys-umbral-64": (16.06, 3.12, 2),
    "forward-umbral-128": (7.25, 3.41, 3),
    "forward_split-umbral-128": (5.15, 2.12, 2),
    "backward-umbral-128": (5.63, 3.07, 2),
    "backward_factor-umbral-128": (6.63, 3.21, 2),
    "backward_queries-umbral-128": (12.00, 4.06, 2),
    "backward_keys-umbral-128": (11.56, 3.81, 2),
    "forward-penumbral-64": (18.34, 3.66, 3),
    "forward_split-penumbral-64": (13.50, 2.44, 3),
    "backward-penumbral-64": (13.79, 2.58, 2),
    "backward_factor-penumbral-64": (16.80, 4.23, 2),
    "backward_queries-penumbral-64": (29.62, 3.73, 2),
    "backward_keys-penumbral-64": (23.27, 3.75, 2),
    "forward-penumbral-128": (11.11, 3.53, 3),
    "forward_split-penumbral-128": (7.69, 2.21, 2),
    "backward-penumbral-128": (8.84, 3.19, 2),
    "backward_factor-penumbral-128": (9.75, 3.34, 2),
    "backward_queries-penumbral-128": (17.21, 4.15, 2),
    "backward_keys-penumbral-128": (15.08, 3.88, 2),
}
# For the forward pass on compute capability 9.0: instructions per tile of the warps that multiply.
HOPPER_BUDGETS = {
    "forward_hopper-dot-64": 547,
    "forward_hopper-dot-128": 566,
    "forward_hopper-laplacian-64": 526,
    "forward_hopper-laplacian-128": 560,
    "forward_hopper-umbral-64": 645,
    "forward_hopper-umbral-128": 684,
    "forward_hopper_split-umbral-64": 743,
    "forward_hopper_split-umbral-128": 787,
    "forward_hopper-penumbral-64": 1143,
    "forward_hopper-penumbral-128": 1180,
    "forward_hopper_split-penumbral-64": 1239,
    "forward_hopper_split-penumbral-128": 1285,
}
# Other versions of NVRTC schedule differently.
SLACK = 1.06
# Bytes of registers that a kernel may spill.
MOST_SPILLED = 64
# Kernels that `make test` compiles; `make test-long` compiles all.
SOME = {
    90: [
        "forward-dot-64",
        "backward-umbral-64",
        "backward_keys-dot-64",
        "forward_hopper-dot-64",
    ],
    80: ["forward_split-umbral-64", "backward-dot-64"],
}


@pytest.fixture(scope="module")
def nvdisasm():
    found = sass.find_nvdisasm()
    if found is None:
        pytest.skip("nvdisasm not found; it is part of Triton and of the CUDA toolkit")
    return found


def kernels_of(folder, capability, names):
    """The descriptions of compiled kernels by name."""
    command = [PROGRAM, folder, str(capability), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "NVRTC not found" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return {kernel["kernel"]: kernel for kernel in map(json.loads, done.stdout.splitlines())}


def check_hopper(kernel, nvdisasm):
    # The path is that of a group of warps that multiplies: it waits for the tile, for its turn and
    # for its products.
    path = sass.common_path(kernel, nvdisasm)
    assert path is not None
    assert sass.count(path, "BAR.SYNC") == sass.count(path, "BAR.ARV") == 1
    assert sass.count(path, "WARPGROUP.DEPBAR") == 2
    assert sass.count(path, sass.COPY) == 0
    assert len(path) <= SLACK * HOPPER_BUDGETS[kernel["kernel"]]
    assert sass.resident_blocks(kernel) == 1


def check(kernel, nvdisasm):
    name = kernel["kernel"]
    assert kernel["spilled_bytes"] <= MOST_SPILLED
    if name in HOPPER_BUDGETS:
        check_hopper(kernel, nvdisasm)
        return
    # The path is that of a whole tile: it copies the next tile and has a single barrier. In one
    # pass, a second barrier separates the score gradients from the products that read them.
    path = sass.common_path(kernel, nvdisasm)
    assert path is not None
    assert sass.count(path, sass.COPY) >= sass.copies_of(kernel)
    is_one_pass = name.startswith(("backward-", "backward_factor-"))
    assert sass.count(path, "BAR") == (2 if is_one_pass else 1)
    products = [n for n, i in enumerate(path) if i.starts(sass.PRODUCT)]
    exponentials = [n for n, i in enumerate(path) if i.starts(sass.EXPONENTIAL)]
    instructions, wavefronts, blocks = BUDGETS[name]
    assert len(path) / len(products) <= SLACK * instructions
    assert sass.wavefronts(path) / len(products) <= SLACK * wavefronts
    assert sass.resident_blocks(kernel) >= blocks
    if name.startswith("forward"):
        # Exponentials and the second product overlap only if no branch separates them.
        between = path[exponentials[0] : products[-1]]
        assert sass.count(between, "BRA", "BSSY", "BSYNC", "CALL") == 0


@pytest.mark.parametrize("capability", SOME)
def test_kernels_keep_their_budgets(tmp_path, nvdisasm, capability):
    kernels = kernels_of(tmp_path, capability, SOME[capability])
    assert kernels.keys() == set(SOME[capability])
    for kernel in kernels.values():
        check(kernel, nvdisasm)


@pytest.mark.long
@pytest.mark.parametrize("capability", SOME)
def test_all_kernels_keep_their_budgets(tmp_path, nvdisasm, capability):
    kernels = kernels_of(tmp_path, capability, [])
    names = BUDGETS.keys() | (HOPPER_BUDGETS.keys() if capability == 90 else set())
    assert kernels.keys() >= names
    for name in names:
        check(kernels[name], nvdisasm)


def instructions(*opcodes, sets=7, waits=0):
    """Instructions with a stall of one cycle and without read scoreboards."""
    control = 1 | sets << 5 | 7 << 8 | waits << 11
    return [sass.Instruction(16 * n, "", name, "", control) for n, name in enumerate(opcodes)]


@pytest.mark.parametrize(
    ("opcode", "cycles"),
    [
        ("HMMA.16816.F32.BF16", 6),  # the rate of the matrix pipe
        ("MUFU.EX2", 8),
        ("FADD", 1),  # two pipes, each for two cycles
        ("FMNMX", 2),
        ("LDSM.16.M88.4", 16),  # four wavefronts, in a memory that four schedulers share
    ],
)
def test_the_model_keeps_the_rate_of_each_pipe(opcode, cycles):
    # The barrier keeps the warps together.
    path = instructions(*[opcode] * 200, "BAR.SYNC")
    found = cuda_model.predict(path, 90, blocks=1, warps=4)
    barrier = cuda_model.MACHINES[90].barrier
    assert 200 * cycles <= found.cycles <= 200 * cycles + 2 * barrier


def test_the_model_waits_for_results():
    # A warp alone on its scheduler waits for each exponential before it issues the next one.
    path = instructions(*["MUFU.EX2"] * 50, sets=0, waits=1)
    found = cuda_model.predict(path, 90, blocks=1, warps=4)
    assert found.cycles == pytest.approx(50 * cuda_model.MACHINES[90].special_latency, rel=0.02)


@pytest.mark.parametrize(("groups", "cycles"), [(1, 64 + 10 + 24), (3, 64)])
def test_the_model_multiplies_by_groups(groups, cycles):
    # A group waits for each of its products, while those of other groups keep the pipes busy.
    control = 1 | 7 << 5 | 7 << 8
    path = [
        sass.Instruction(0, "", "HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR8], gsb0", control),
        sass.Instruction(16, "", "WARPGROUP.DEPBAR.LE", "gsb0, 0x0", control),
    ]
    found = cuda_model.predict(path, 90, blocks=1, warps=4 * groups)
    assert found.cycles == pytest.approx(cycles, rel=0.05)


def test_the_model_gives_turns_to_groups():
    # Each group holds its turn until it has waited for its product.
    control = 1 | 7 << 5 | 7 << 8
    opcodes = (
        ("BAR.SYNC.DEFER_BLOCKING", "R2, 0x100"),
        ("HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR8], gsb0"),
        ("WARPGROUP.DEPBAR.LE", "gsb0, 0x0"),
        ("BAR.ARV", "R3, 0x100"),
    )
    path = [
        sass.Instruction(16 * n, "", opcode, operands, control)
        for n, (opcode, operands) in enumerate(opcodes)
    ]
    found = cuda_model.predict(path, 90, blocks=1, warps=8)
    assert found.cycles == pytest.approx(64 + 10 + 24, rel=0.1)
