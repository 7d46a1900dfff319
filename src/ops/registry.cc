#include "ops/registry.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gnomon/torch/attention.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/operators.h"
#include "ops/token_grid.h"

namespace gnomon {
namespace {

using Kind = TensorParameter::Kind;
using Role = PositionEntry::Role;

constexpr const char* kLearnable = "learned | fixed | number";
constexpr const char* kAnywhere = "attention(), modules";
constexpr const char* kBeside = "modules, beside attention()";
constexpr const char* kNoTokens = "";  // of a similarity
constexpr const char* kSequence = "sequence";
constexpr const char* kSequenceOrGrid = "sequence, grid";
constexpr const char* kTseng = "Tseng et al. 2023, Coneheads: Hierarchy Aware Attention";

at::Tensor SameForAll(int64_t heads, double value) {
  return at::full({heads}, value, at::TensorOptions().dtype(at::kDouble));
}

std::optional<int64_t> LengthOf(const Component& component, int64_t otherwise) {
  const int64_t length = component.Integer("length", otherwise);
  TORCH_CHECK_VALUE(length > 0, "gnomon: ", component.name(), ":length=", length,
                    "; expected a positive number");
  return length;
}

at::Tensor AlibiStart(const Component&, const ModuleShape& n) { return alibi_slopes(n.heads); }

at::Tensor HypeMuStart(const Component& component, const ModuleShape& n) {
  const double mu = ParseNumber(component.Find("mu").value_or("")).value_or(0.001);
  TORCH_CHECK_VALUE(mu > 0, "gnomon: hype:mu=", mu, "; expected a positive number");
  return SameForAll(n.heads, mu);
}

// ALiBi's slopes where mu (p_i - p_j) is small.
at::Tensor HypeTauStart(const Component& component, const ModuleShape& n) {
  return alibi_slopes(n.heads) / HypeMuStart(component, n);
}

// Power starts as ALiBi; log at the quantiles of the uniform distributions, on (0, 2) and (0, 1),
// that the paper's code draws from.
at::Tensor KerpleR1Start(const Component& component, const ModuleShape& n) {
  if (component.Choice("kind", {"log", "power"}) == "power") return alibi_slopes(n.heads);
  return (at::arange(n.heads, at::TensorOptions().dtype(at::kDouble)) + 0.5) *
         (2.0 / static_cast<double>(n.heads));
}

at::Tensor KerpleR2Start(const Component& component, const ModuleShape& n) {
  return SameForAll(n.heads, component.Choice("kind", {"log", "power"}) == "power" ? 1.0 : 0.5);
}

at::Tensor T5TableStart(const Component& component, const ModuleShape& n) {
  return at::zeros({component.Integer("buckets", 32), n.heads},
                   at::TensorOptions().dtype(at::kDouble));
}

at::Tensor GridTableStart(const Component& component, const ModuleShape& n) {
  const std::optional<TokenGrid> grid = TokenGrid::Find(component);
  TORCH_CHECK_VALUE(grid, "gnomon: ", component.name(), " in a module needs a shape, as in ",
                    component.name(), ":shape=14x14");
  std::vector<int64_t> sizes = {n.heads};
  for (const int64_t length : grid->shape()) sizes.push_back(2 * length - 1);
  return at::zeros(sizes, at::TensorOptions().dtype(at::kDouble));
}

at::Tensor OffsetTableStart(const Component& component, const ModuleShape& n) {
  const std::optional<TokenGrid> grid = TokenGrid::Find(component);
  if (!grid) {
    return at::zeros({n.heads, 2 * *LengthOf(component, n.max_length) - 1},
                     at::TensorOptions().dtype(at::kDouble));
  }
  const std::vector<int64_t>& shape = grid->shape();
  const bool alike = std::equal(shape.begin() + 1, shape.end(), shape.begin());
  TORCH_CHECK_VALUE(alike || component.Find("axis"), "gnomon: ", component.name(),
                    ":shape=", SizesText(shape),
                    " without an axis is one table for all axes, whose lengths ",
                    "differ; expected an axis, as in axis=0");
  return at::zeros({n.heads, 2 * shape[component.Integer("axis", 0)] - 1},
                   at::TensorOptions().dtype(at::kDouble));
}

std::optional<int64_t> OffsetTableLength(const Component& component, int64_t otherwise) {
  return component.Find("shape") ? std::nullopt : LengthOf(component, otherwise);
}

// Numbers of their own for each table of a module.
enum class Stream : uint64_t { kTable = 1, kValues, kDistances, kRows, kColumns };

// Rows of N(0, 1 / columns), so that their product with a query of unit variance has variance 1.
// The seed comes from the state of Torch's generator, which stays as it is: the other weights of a
// model start alike with and without them.
at::Tensor RandomRows(Stream stream, std::vector<int64_t> sizes, int64_t columns) {
  sizes.push_back(columns);
  const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble);
  const at::Generator state = at::detail::getDefaultCPUGenerator().clone();
  const auto drawn = at::empty({}, options.dtype(at::kLong)).random_(state).item<int64_t>();
  const at::Generator generator =
      at::detail::createCPUGenerator(static_cast<uint64_t>(drawn) + static_cast<uint64_t>(stream));
  return at::randn(sizes, generator, options) / std::sqrt(static_cast<double>(columns));
}

// (n,), or (H, n) of "per_head".
std::vector<int64_t> TableRows(const Component& component, int64_t rows, const ModuleShape& n) {
  if (component.FindFlag("per_head").value_or(false)) return {n.heads, rows};
  return {rows};
}

int64_t RelativeRows(const Component& component) {
  const int64_t most = MaxOffset(component);
  return component.FindFlag("past").value_or(false) ? most + 1 : 2 * most + 1;
}

at::Tensor RelativeTableStart(const Component& component, const ModuleShape& n) {
  return RandomRows(Stream::kTable, TableRows(component, RelativeRows(component), n), n.head_dim);
}

at::Tensor RelativeValuesStart(const Component& component, const ModuleShape& n) {
  return RandomRows(Stream::kValues, TableRows(component, RelativeRows(component), n), n.value_dim);
}

at::Tensor XlVectorStart(const Component&, const ModuleShape& n) {
  return at::zeros({n.heads, n.head_dim}, at::TensorOptions().dtype(at::kDouble));
}

// A tensor that comes with the specification is a table.
bool HasLearnedDistances(const Component& component) {
  if (component.IsTensor("r")) return true;
  return component.Choice("r", {"sinusoidal", "learned"}) == "learned";
}

// A table of distances, or the map W_R of their sinusoids of E = H Dv columns.
at::Tensor XlDistancesStart(const Component& component, const ModuleShape& n) {
  if (!HasLearnedDistances(component)) {
    return RandomRows(Stream::kDistances, {n.heads, n.head_dim}, n.heads * n.value_dim);
  }
  return RandomRows(Stream::kDistances, {n.heads, *LengthOf(component, n.max_length)}, n.head_dim);
}

at::Tensor XlDistances(const Component& component, const at::Tensor& held,
                       const CallLengths& lengths) {
  if (HasLearnedDistances(component)) return held;
  const at::Tensor distances =
      at::arange(std::max<int64_t>(lengths.positions, 1), held.options().dtype(at::kDouble));
  const at::Tensor waves = sinusoid(distances, SizeOf(held, 2), "split_xl").to(held.scalar_type());
  return at::matmul(waves, held.transpose(1, 2));
}

std::optional<int64_t> XlLength(const Component& component, int64_t otherwise) {
  return HasLearnedDistances(component) ? LengthOf(component, otherwise) : std::nullopt;
}

at::Tensor AxisTableStart(Stream stream, const Component& component, const ModuleShape& n,
                          size_t axis) {
  const std::optional<TokenGrid> grid = TokenGrid::Find(component);
  TORCH_CHECK_VALUE(grid && grid->axes() == 2, "gnomon: ", component.name(),
                    " in a module needs a shape of two axes, as in ", component.name(),
                    ":shape=14x14");
  return RandomRows(stream, TableRows(component, 2 * grid->shape()[axis] - 1, n), n.head_dim);
}

at::Tensor RowsStart(const Component& component, const ModuleShape& n) {
  return AxisTableStart(Stream::kRows, component, n, 0);
}

at::Tensor ColumnsStart(const Component& component, const ModuleShape& n) {
  return AxisTableStart(Stream::kColumns, component, n, 1);
}

at::Tensor AbsoluteKeysStart(const Component& component, const ModuleShape& n) {
  return RandomRows(Stream::kTable, TableRows(component, *LengthOf(component, n.max_length), n),
                    n.head_dim);
}

// The rows of the keys that there are.
at::Tensor FirstKeys(const Component& component, const at::Tensor& held,
                     const CallLengths& lengths) {
  TORCH_CHECK_VALUE(lengths.keys <= SizeOf(held, -2), "gnomon.nn: ", component.name(),
                    ":length=", SizeOf(held, -2), " and Lk = ", lengths.keys,
                    "; expected at least as many");
  return held.slice(-2, 0, lengths.keys);
}

// An encoding or a rotation that knows grids.
std::vector<CatalogueParameter> OnGrid(std::vector<CatalogueParameter> parameters) {
  parameters.push_back({"shape", "sizes of a grid, 14x14 or 4x8x8", "none: a sequence"});
  parameters.push_back({"prefix", "integer, tokens before the grid", "0"});
  return parameters;
}

// A bias by offset, which may lie along an axis of a grid.
std::vector<CatalogueParameter> OnAxis(std::vector<CatalogueParameter> parameters) {
  parameters = OnGrid(std::move(parameters));
  parameters.push_back({"axis", "integer, of the grid", "all, summed"});
  return parameters;
}

bool Always(const Component&) { return true; }

std::vector<std::string> TensorNames(const SimilarityEntry& entry) {
  if (entry.head_parameter == nullptr) return {};
  return {entry.head_parameter};
}

std::vector<std::string> TensorNames(const PositionEntry& entry) {
  std::vector<std::string> names;
  for (const TensorParameter& parameter : entry.tensors) names.push_back(parameter.name);
  return names;
}

// `is_known` says which entries the message for an unknown name has.
template <class Entry>
const Entry& Find(
    const char* kind, const std::vector<Entry>& entries, const Component& component,
    bool (*is_known)(const Entry&) = [](const Entry&) { return true; }) {
  std::vector<std::string> known;
  for (const Entry& entry : entries) {
    if (entry.catalogue.name == component.name()) {
      component.CheckKeys(entry.catalogue, TensorNames(entry));
      return entry;
    }
    if (is_known(entry)) known.push_back(entry.catalogue.name);
  }
  TORCH_CHECK_VALUE(false, UnknownName(kind, component.name(), known));
}

template <class Entry>
std::vector<CatalogueEntry> Catalogue(const std::vector<Entry>& entries) {
  std::vector<CatalogueEntry> catalogue;
  for (const Entry& entry : entries) catalogue.push_back(entry.catalogue);
  return catalogue;
}

}  // namespace

const std::vector<SimilarityEntry>& SimilarityEntries() {
  static const std::vector<SimilarityEntry> entries = {
      {.catalogue = {"dot",
                     "dot product",
                     "q.k / sqrt(D)",
                     "Vaswani et al. 2017, Attention Is All You Need",
                     {},
                     "0 + 0",
                     kAnywhere,
                     kNoTokens,
                     R"(\frac{q \cdot k}{\sqrt{D}})",
                     ""},
       .map = MapDot,
       .takes_scale = true},
      {.catalogue = {"laplacian",
                     "Laplacian",
                     "-gamma |q - k|",
                     kTseng,
                     {{"gamma", kLearnable, "learned"}},
                     "5 + 1",
                     kAnywhere,
                     kNoTokens,
                     R"(-\gamma_h\, |q - k|)",
                     ""},
       .map = MapLaplacian,
       .head_parameter = "gamma"},
      {.catalogue = {"gaussian",
                     "Gaussian",
                     "-gamma |q - k|^2",
                     "Chen et al. 2021, Skyformer",
                     {{"gamma", kLearnable, "learned"}},
                     "5 + 0",
                     kAnywhere,
                     kNoTokens,
                     R"(-\gamma_h\, |q - k|^2)",
                     ""},
       .map = MapGaussian,
       .head_parameter = "gamma"},
      {.catalogue =
           {"umbral",
            "umbral cones",
            "-gamma h or -gamma log h, h the height of the lowest common ancestor of "
            "umbral cones of radius r",
            kTseng,
            {{"gamma", kLearnable, "learned"},
             {"r", "number", "0.1"},
             {"map", "psi | exp | none", "psi"},
             {"score", "height | log", "height"}},
            "height: 9 + 1; log: 11 + 2",
            kAnywhere,
            kNoTokens,
            R"(-\gamma_h\, \text{height} \quad\text{or}\quad -\gamma_h \log \text{height})",
            "the height is that of the lowest common ancestor of umbral cones of radius r"},
       .map = MapUmbral,
       .head_parameter = "gamma",
       .has_height = Always},
      {.catalogue =
           {"penumbral",
            "penumbral cones",
            "-gamma h, -gamma h^2 or gamma log(r / h), h the height of the lowest common "
            "ancestor of penumbral cones below the horosphere of height r",
            kTseng,
            {{"gamma", kLearnable, "learned"},
             {"r", "number", "1"},
             {"map", "xi | exp | none", "xi"},
             {"score", "height | height2 | log", "height"}},
            "height: 23 + 2; height2: 20 + 1; log: 23 + 3",
            kAnywhere,
            kNoTokens,
            R"(-\gamma_h\, \text{height}, \quad -\gamma_h\, \text{height}^2 \quad\text{or}\quad \gamma_h \log\frac{r}{\text{height}})",
            "the height is that of the lowest common ancestor of penumbral cones below the "
            "horosphere of height r"},
       .map = MapPenumbral,
       .head_parameter = "gamma",
       .has_height = Always},
      {.catalogue = {"hyperbolic",
                     "hyperbolic distance",
                     "-beta d, d the distance in hyperbolic space",
                     "Gulcehre et al. 2019, Hyperbolic Attention Networks",
                     {{"beta", kLearnable, "learned"},
                      {"model", "hyperboloid | half_space | ball | klein", "hyperboloid"},
                      {"map", "pseudopolar | psi | xi | exp | none",
                       "pseudopolar of the hyperboloid, psi of half_space, exp of the others"}},
                     "15 + 3",
                     kAnywhere,
                     kNoTokens,
                     R"(-\beta_h\, d(q, k))",
                     "where d is the distance in hyperbolic space"},
       .map = MapHyperbolic,
       .head_parameter = "beta",
       .has_height = HyperbolicHasHeight},
      {.catalogue =
           {"entailment",
            "entailment cones",
            "-gamma max(0, Xi - psi), Xi the angle of k off the axis of the cone of q in "
            "the Poincare ball, psi = arcsin(K (1 - |q|^2) / |q|) the cone's aperture",
            "Ganea et al. 2018, Hyperbolic Entailment Cones",
            {{"gamma", kLearnable, "learned"},
             {"K", "number", "0.1"},
             {"map", "ball | none", "ball"}},
            "20 + 2",
            kAnywhere,
            kNoTokens,
            R"(-\gamma_h \max(0, \Xi - \psi), \qquad \psi = \arcsin\left(K\, \frac{1 - |q|^2}{|q|}\right))",
            "where Xi is the angle of k off the axis of the cone of q in the Poincare ball, and "
            "psi is the cone's aperture"},
       .map = MapEntailment,
       .head_parameter = "gamma"},
      {.catalogue = {"additive",
                     "additive",
                     "LeakyReLU(q + k), of one column",
                     "Velickovic et al. 2018, Graph Attention Networks",
                     {{"slope", "number", "0.2"}},
                     "4 + 0, and no product",
                     kAnywhere,
                     kNoTokens,
                     R"(\text{LeakyReLU}(q + k))",
                     "where q and k have one column"},
       .map = MapAdditive,
       .columns = 1},
  };
  return entries;
}

const std::vector<PositionEntry>& PositionEntries() {
  static const std::vector<PositionEntry> entries = {
      {{"none",
        "no position",
        "nothing: a causal mask or a convolution tells positions apart (NoPE)",
        "Haviv et al. 2022, Transformer Language Models without Positional Encodings Still Learn "
        "Positional Information",
        {},
        "0 + 0",
        kAnywhere,
        kSequence,
        "",
        ""},
       Role::kNone,
       {}},
      {{"sinusoidal", "sinusoids",
        "sin and cos of p 10000^(-2 i / E), added to the embeddings (E columns); on a grid, "
        "E / axes columns of each coordinate",
        "Vaswani et al. 2017, Attention Is All You Need",
        OnGrid({{"layout", "interleaved | split | split_xl", "interleaved"}}), "0 + 0", kBeside,
        kSequenceOrGrid,
        R"(\sin\left(p\, 10000^{-2i/E}\right), \quad \cos\left(p\, 10000^{-2i/E}\right))",
        "added to the embeddings of E columns; on a grid, E / axes columns of each coordinate"},
       Role::kEmbedding,
       {},
       nullptr,
       MakeSinusoidal},
      {{"learned",
        "learned positions",
        "a learned table, added to the embeddings",
        "Gehring et al. 2017, Convolutional Sequence to Sequence Learning",
        {{"length", "integer", "the model's"}},
        "0 + 0",
        kBeside,
        kSequence,
        "",
        ""},
       Role::kEmbedding,
       {},
       nullptr,
       MakeLearned},
      {{"conv",
        "convolution",
        "GELU(conv(x)), added to the embeddings x; on the left alone in a causal model",
        "Baevski et al. 2020, wav2vec 2.0",
        {{"kernel", "integer", "128"}, {"groups", "integer, a divisor of E", "16"}},
        "0 + 0",
        kBeside,
        kSequence,
        R"(\text{GELU}(\text{conv}(x)))",
        "added to the embeddings x; on the left alone in a causal model"},
       Role::kEmbedding,
       {},
       nullptr,
       MakeConvolutional},
      {{"cape", "CAPE",
        "sinusoids of p, added to the embeddings; in training of (p + D + e_p) exp(l), D ~ "
        "U(+-global_shift), e_p ~ U(+-local_shift) spacings, l ~ U(+-ln global_scale); normalize: "
        "p - mean(p); on a grid waves of (x, y) in [-1, 1]^2, x the column, y the row",
        "Likhomanenko et al. 2021, CAPE: Encoding Relative Positions with Continuous Augmented "
        "Positional Embeddings",
        OnGrid({{"global_shift", "number", "5 (grid: 0.5)"},
                {"local_shift", "number", "0.5"},
                {"global_scale", "number", "1.03 (grid: 1.4)"},
                {"normalize", "true | false", "false"}}),
        "0 + 0", kBeside, kSequenceOrGrid,
        R"(\text{sinusoids of}\quad (p + \Delta + \epsilon_p)\, e^{\lambda})",
        "added to the embeddings; in training Delta is uniform within global_shift, epsilon within "
        "local_shift spacings and lambda within ln global_scale, in evaluation they are 0. On a "
        "grid the waves are those of (x, y) in [-1, 1], x the column and y the row"},
       Role::kEmbedding,
       {},
       nullptr,
       MakeCape},
      {{"rope", "RoPE",
        "q and k rotated by p base^(-2 i / dims); on a grid, dims / axes by each coordinate",
        "Su et al. 2021, RoFormer",
        OnGrid({{"base", "number", "10000"},
                {"layout", "interleaved | half", "interleaved"},
                {"dims", "integer", "all (all but the height)"}}),
        "0 + 0", kAnywhere, kSequenceOrGrid, R"(\theta_i = p\; \text{base}^{-2i/\text{dims}})",
        "is the angle by which pair i of the coordinates of q and k is rotated; on a grid, dims / "
        "axes of them by each coordinate"},
       Role::kRotation,
       {}},
      {{"alibi", "ALiBi", "-slopes_h |p_i - p_j|", "Press et al. 2022, Train Short, Test Long",
        OnAxis({{"slopes", kLearnable, "fixed"}}), "1 + 0", kAnywhere, kSequenceOrGrid,
        R"(-\text{slope}_h\, |p_i - p_j|)", ""},
       Role::kBias,
       {{"slopes", Kind::kHeads, /*learned=*/false, AlibiStart}},
       AlibiBias},
      {{"hype", "HyPE",
        "-tau_h sinh(mu_h |p_i - p_j|); odd: of p_i - p_j; cosh: tau_h (1 - cosh(...))",
        "Angelotti 2023, HyPE: Attention with Hyperbolic Biases for Relative Positional Encoding",
        OnAxis({{"tau", kLearnable, "fixed, ALiBi's slopes / mu"},
                {"mu", kLearnable, "0.001"},
                {"mode", "abs | odd | cosh", "abs"}}),
        "1 + 0", kAnywhere, kSequenceOrGrid,
        R"(\begin{aligned}\text{abs} && -\tau_h \sinh(\mu_h |p_i - p_j|) \\ \text{odd} && -\tau_h \sinh(\mu_h (p_i - p_j)) \\ \text{cosh} && \tau_h \left(1 - \cosh(\mu_h (p_i - p_j))\right)\end{aligned})",
        ""},
       Role::kBias,
       {{"tau", Kind::kHeads, /*learned=*/false, HypeTauStart},
        {"mu", Kind::kHeads, /*learned=*/false, HypeMuStart}},
       HypeBias},
      {{"t5", "T5", "table[bucket(p_j - p_i), h]",
        "Raffel et al. 2020, Exploring the Limits of Transfer Learning",
        OnAxis({{"buckets", "integer", "32"},
                {"max_distance", "integer", "128"},
                {"bidirectional", "true | false", "unless causal in a sequence"}}),
        "1 + 0", kAnywhere, kSequenceOrGrid, R"(\text{table}[\text{bucket}(p_j - p_i), h])", ""},
       Role::kBias,
       {{"table", Kind::kTable, /*learned=*/true, T5TableStart}},
       T5Bias},
      {{"kerple", "KERPLE", "log: -r1_h log(1 + r2_h |p_i - p_j|); power: -r1_h |p_i - p_j|^r2_h",
        "Chi et al. 2022, KERPLE: Kernelized Relative Positional Embedding",
        OnAxis({{"r1", kLearnable, "learned"},
                {"r2", kLearnable, "learned"},
                {"kind", "log | power", "log"}}),
        "1 + 0", kAnywhere, kSequenceOrGrid,
        R"(\begin{aligned}\text{log} && -r_{1h} \log(1 + r_{2h} |p_i - p_j|) \\ \text{power} && -r_{1h}\, |p_i - p_j|^{r_{2h}}\end{aligned})",
        ""},
       Role::kBias,
       {{"r1", Kind::kHeads, /*learned=*/true, KerpleR1Start},
        {"r2", Kind::kHeads, /*learned=*/true, KerpleR2Start}},
       KerpleBias},
      {.catalogue = {"offset_bias", "offset bias",
                     "attention(): table[h, j - i + Lq - 1]; modules: "
                     "table[h, p_j - p_i + length - 1]",
                     "Shaw et al. 2018, Self-Attention with Relative Position Representations",
                     OnAxis({{"length", "integer, of a module's sequence", "the module's"}}),
                     "1 + 0", kAnywhere, kSequenceOrGrid, R"(\text{table}[h, j - i + L_q - 1])",
                     "in attention(); in modules table[h, p_j - p_i + length - 1]"},
       .role = Role::kBias,
       .tensors = {{"table", Kind::kTable, /*learned=*/true, OffsetTableStart}},
       .bias = RawBias,
       .max_length = OffsetTableLength},
      {{"grid_bias", "grid bias",
        "table[h, dy + height - 1, dx + width - 1], dy = y_j - y_i and dx = x_j - x_i; any number "
        "of axes",
        "Liu et al. 2021, Swin Transformer", OnGrid({}), "1 + 0", kAnywhere, "grid",
        R"(\text{table}[h, y_j - y_i + \text{height} - 1, x_j - x_i + \text{width} - 1])",
        "or over any number of axes"},
       Role::kGridBias,
       {{"table", Kind::kTable, /*learned=*/true, GridTableStart}}},
      {.catalogue = {"relative",
                     "relative keys",
                     "q_i.E[p_j - p_i + max_offset] scale, past first; with values, v_j + "
                     "W[p_j - p_i + max_offset] for v_j; far: the nearest row, or none",
                     "Shaw et al. 2018, Self-Attention with Relative Position Representations; "
                     "Huang et al. 2019, Music Transformer",
                     {{"max_offset", "integer", "128"},
                      {"far", "clip | zero", "clip"},
                      {"values", "true | false", "false"},
                      {"per_head", "true | false", "false"},
                      {"past", "true | false: rows for the past alone", "false"}},
                     "1 + 0, and q times the rows; with values: 2 + 0",
                     kAnywhere,
                     kSequence,
                     R"(\frac{q_i \cdot E[p_j - p_i + m]}{\sqrt{D}})",
                     "where m is max_offset, past first; beyond it the nearest row, or none. With "
                     "values, W[p_j - p_i + m] is added to the value"},
       .role = Role::kContent,
       .tensors = {{"table", Kind::kTable, /*learned=*/true, RelativeTableStart},
                   {"values", Kind::kTable, /*learned=*/true, RelativeValuesStart,
                    HasRelativeValues}},
       .content = RelativeContent},
      {.catalogue = {"transformer_xl",
                     "Transformer-XL",
                     "(u_h.k_j + (q_i + v_h).r_h[p_i - p_j]) scale, r = W_R sinusoid, or learned",
                     "Dai et al. 2019, Transformer-XL",
                     {{"r", "sinusoidal | learned", "sinusoidal"},
                      {"length", "integer, distances of a learned r", "the module's"}},
                     "2 + 0, and q times the rows",
                     "attention(), modules; dot and causal",
                     kSequence,
                     R"(\frac{u_h \cdot k_j + (q_i + v_h) \cdot r_h[p_i - p_j]}{\sqrt{D}})",
                     "where r maps sinusoids of the distance, or is learned"},
       .role = Role::kContent,
       .tensors = {{"u", Kind::kTable, /*learned=*/true, XlVectorStart},
                   {"v", Kind::kTable, /*learned=*/true, XlVectorStart},
                   {"r", Kind::kTable, /*learned=*/true, XlDistancesStart, nullptr, XlDistances}},
       .content = TransformerXlContent,
       .max_length = XlLength},
      {.catalogue =
           {"relative2d", "2-D relative keys",
            "q_i.(R[dy + height - 1] + C[dx + width - 1]) scale, dy = y_j - y_i and "
            "dx = x_j - x_i",
            "Ramachandran et al. 2019, Stand-Alone Self-Attention; Srinivas et al. 2021, "
            "Bottleneck Transformers",
            OnGrid({{"per_head", "true | false", "false"}}), "2 + 0, and q times the rows",
            kAnywhere, "grid",
            R"(\frac{q_i \cdot \left(R[y_j - y_i + \text{height} - 1] + C[x_j - x_i + \text{width} - 1]\right)}{\sqrt{D}})",
            ""},
       .role = Role::kContent,
       .tensors = {{"rows", Kind::kTable, /*learned=*/true, RowsStart},
                   {"columns", Kind::kTable, /*learned=*/true, ColumnsStart}},
       .content = Relative2dContent},
      {.catalogue = {"absolute_keys",
                     "absolute keys",
                     "q_i.R[j] scale: learned absolute positions inside attention",
                     "Ke et al. 2021, Rethinking Positional Encoding in Language Pre-training",
                     {{"length", "integer", "the module's"}, {"per_head", "true | false", "false"}},
                     "1 + 0, and q times the rows",
                     kAnywhere,
                     kSequence,
                     R"(\frac{q_i \cdot R[j]}{\sqrt{D}})",
                     "learned absolute positions inside attention"},
       .role = Role::kContent,
       .tensors = {{"table", Kind::kTable, /*learned=*/true, AbsoluteKeysStart, nullptr,
                    FirstKeys}},
       .content = AbsoluteKeysContent,
       .max_length = LengthOf},
  };
  return entries;
}

void SimilarityEntry::CheckColumns(const Component& component, int64_t head_dim,
                                   const std::string& what) const {
  TORCH_CHECK_VALUE(!HasHeight(component) || head_dim >= 2, what, head_dim, "; ", catalogue.name,
                    " needs two columns, the last of them the height");
  TORCH_CHECK_VALUE(columns == 0 || head_dim == columns, what, head_dim, "; ", catalogue.name,
                    " has ", columns);
}

const SimilarityEntry& FindSimilarity(const Component& component) {
  return Find("similarity", SimilarityEntries(), component);
}

const PositionEntry& FindPosition(const Component& component) {
  return Find("position", PositionEntries(), component);
}

const PositionEntry& FindPositionInAttention(const char* operation, const Component& component,
                                             bool holds_tables) {
  const auto acts = [](const PositionEntry& entry) { return entry.role != Role::kEmbedding; };
  const auto has_no_table = [](const PositionEntry& entry) {
    return entry.role != Role::kEmbedding &&
           std::none_of(entry.tensors.begin(), entry.tensors.end(), [](const TensorParameter& p) {
             return p.kind == Kind::kTable && p.present == nullptr;
           });
  };
  const PositionEntry& entry =
      holds_tables ? Find<PositionEntry>("position", PositionEntries(), component, acts)
                   : Find<PositionEntry>("position", PositionEntries(), component, has_no_table);
  TORCH_CHECK_VALUE(acts(entry), operation, ": position ", component.name(),
                    " is added to the embeddings and does nothing here; expected it in ",
                    "gnomon.nn.TokenPosition");
  return entry;
}

std::optional<int64_t> LongestSequence(const std::vector<Component>& components,
                                       int64_t max_length) {
  std::optional<int64_t> longest = SmallestGrid(components);
  for (const Component& component : components) {
    const PositionEntry& entry = FindPosition(component);
    if (entry.max_length == nullptr) continue;
    if (const std::optional<int64_t> length = entry.max_length(component, max_length)) {
      longest = std::min(longest.value_or(*length), *length);
    }
  }
  return longest;
}

static std::string TitleOf(const CatalogueEntry& entry, const Component& component) {
  std::string title = entry.title;
  std::string details;
  for (const auto& [key, value] : component.options()) {
    if (value == "learned" || value == "fixed") {
      if (title == entry.title) title = value + " " + entry.title;
    } else {
      details += (details.empty() ? "" : ", ") + key + (value == "true" ? "" : " " + value);
    }
  }
  return details.empty() ? title : title + " (" + details + ")";
}

std::string SimilarityTitle(const std::string& specification) {
  const Component component = Component::Parse(specification);
  return TitleOf(FindSimilarity(component).catalogue, component);
}

std::string PositionTitle(const std::string& specification) {
  std::string title;
  for (const Component& component : ParseSum(specification)) {
    title += (title.empty() ? "" : " + ") + TitleOf(FindPosition(component).catalogue, component);
  }
  return title;
}

const std::vector<CatalogueEntry>& SimilarityCatalogue() {
  static const std::vector<CatalogueEntry> catalogue = Catalogue(SimilarityEntries());
  return catalogue;
}

const std::vector<CatalogueEntry>& PositionCatalogue() {
  static const std::vector<CatalogueEntry> catalogue = Catalogue(PositionEntries());
  return catalogue;
}

}  // namespace gnomon
