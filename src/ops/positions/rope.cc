#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/coordinates/token_grid.h"
#include "ops/operators/autograd.h"
#include "ops/operators/cuda_stream.h"
#include "ops/operators/tensors.h"
#include "ops/positions/rope_frequencies.h"
#include "ops/positions/rotation.h"

namespace gnomon {
namespace rope {
namespace {

// The number of rotated columns over all axes, a multiple of 2 * axes.
int64_t RotatedColumns(const Component& component, const RotationCall& call, int64_t axes,
                       const std::optional<TokenGrid>& grid) {
  const int64_t free = FreeColumns(call);
  const int64_t step = 2 * axes;
  if (!component.Find("dims")) {
    TORCH_CHECK_VALUE(axes > 1 || grid || call.last_is_height || free % 2 == 0, call.operation,
                      ": RoPE rotates pairs of coordinates, but q has head_dim ", free,
                      "; expected an even number, or dims set to a smaller even number");
    TORCH_CHECK_VALUE(free >= step || (axes == 1 && !grid), call.operation, ": RoPE over ",
                      grid ? "the grid " + grid->Text() : "positions of several axes",
                      " rotates at least one pair of coordinates per axis, but q has head_dim ",
                      free, call.last_is_height ? " without the height" : "",
                      "; expected at least ", step);
    return free - free % step;
  }
  const int64_t dims = component.Integer("dims");
  CheckColumns(component, dims, axes, call);
  return dims;
}

// Sun et al. 2023, section 3: pair i of q is multiplied by zeta_i^(p / 512), and pair i of k is
// divided by it, so their product decays with distance. Only position differences matter; measuring
// from the middle of the sequence keeps the powers within float32 for lengths up to kLongest.
constexpr int64_t kLongest = 65536;

// Throws if the positions of a call are known and too far apart.
void CheckSpread(const at::Tensor& x, const at::Tensor& positions, const at::Tensor& middle) {
  if (x.scalar_type() == at::kDouble || positions.numel() == 0) return;
  if (!HasNumbers(positions) || !HasNumbers(middle)) return;
  const auto farthest = (positions - middle).abs().max().item<double>();
  TORCH_CHECK_VALUE(2 * farthest <= kLongest,
                    "gnomon.attention: RoPE has xpos, and the positions of ", x.scalar_type(),
                    " tokens are up to ", 2 * farthest, " apart; expected at most ", kLongest,
                    ", or float64");
}

at::Tensor Decay(const at::Tensor& x, const at::Tensor& positions, const at::Tensor& middle,
                 bool of_keys, bool half) {
  constexpr double kScaleBase = 512;
  const int64_t dims = x.sym_size(3).guard_int(__FILE__, __LINE__);
  const at::Tensor zeta =
      (at::arange(0, dims, 2, positions.options()) / static_cast<double>(dims) + 0.4) / 1.4;
  const at::Tensor powers = (positions - middle) * ((of_keys ? -1 : 1) / kScaleBase);
  const at::Tensor scale = zeta.pow(powers.unsqueeze(-1)).to(x.scalar_type());
  return x * (half ? at::cat({scale, scale}, -1) : scale.repeat_interleave(2, -1));
}

// The axis whose coordinate rotates each pair, given the number of pairs per axis: contiguous
// sections (Wang et al. 2024, Qwen2-VL), or interleaved pairs, with the remaining ones on the first
// axis (Qwen3-VL).
std::vector<int64_t> AxesOfPairs(const Component& component, const std::vector<int64_t>& sections,
                                 int64_t pairs) {
  const int64_t sum = std::accumulate(sections.begin(), sections.end(), int64_t{0});
  TORCH_CHECK_VALUE(sum == pairs, "gnomon.attention: RoPE has sections = ", SizesText(sections),
                    ", which sum to ", sum, " pairs; expected dims / 2 = ", pairs);
  const auto axes = static_cast<int64_t>(sections.size());
  std::vector<int64_t> of_pairs;
  if (component.Choice("section_order") == "contiguous") {
    for (int64_t axis = 0; axis < axes; ++axis) {
      of_pairs.insert(of_pairs.end(), static_cast<size_t>(sections[static_cast<size_t>(axis)]),
                      axis);
    }
    return of_pairs;
  }
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t turn = pair % axes;
    of_pairs.push_back(pair < axes * sections[static_cast<size_t>(turn)] ? turn : 0);
  }
  for (int64_t axis = 0; axis < axes; ++axis) {
    const auto count = std::count(of_pairs.begin(), of_pairs.end(), axis);
    TORCH_CHECK_VALUE(count == sections[static_cast<size_t>(axis)],
                      "gnomon.attention: RoPE has interleaved sections = ", SizesText(sections),
                      ", but axis ", axis, " gets ", count,
                      " pairs; expected the first section to be the largest");
  }
  return of_pairs;
}

// The angles (..., L, pairs) of pairs that are assigned to axes in sections. One-dimensional
// positions are used for every axis.
at::Tensor SectionAngles(const Component& component, const std::vector<int64_t>& sections,
                         const std::vector<at::Tensor>& coordinates, const at::Tensor& of_pairs) {
  TORCH_CHECK_VALUE(coordinates.size() == 1 || coordinates.size() == sections.size(),
                    "gnomon.attention: RoPE has sections = ", SizesText(sections),
                    ", but positions have ", coordinates.size(), " axes; expected ",
                    sections.size(), ", or one");
  const std::vector<int64_t> axes = AxesOfPairs(component, sections, SizeOf(of_pairs, 0));
  if (coordinates.size() == 1) return coordinates[0].unsqueeze(-1) * of_pairs;
  // Stacks the axes, because indexing would create an index tensor during tracing.
  std::vector<at::Tensor> of_axes;
  for (const int64_t axis : axes) of_axes.push_back(coordinates[static_cast<size_t>(axis)]);
  return at::stack(of_axes, -1) * of_pairs;
}

// The rows of a table (1 or B, heads, n, pairs) at the positions of a call.
at::Tensor RowsAt(const at::Tensor& table, const RotationCall& call) {
  const c10::SymInt rows = call.x.sym_size(2);
  if (!call.firsts && !call.positions) {
    TORCH_CHECK_VALUE(call.position >= 0 && call.position + rows <= table.sym_size(2),
                      "gnomon.attention: angles of RoPE has ", table.sym_size(2),
                      " rows, but the tokens of ", call.of_keys ? "k" : "q", " have positions ",
                      call.position, " to ", call.position + rows - 1,
                      "; expected one row per position, or angles with one row per token of q and "
                      "key_angles with one row per token of k");
    return table.narrow_symint(2, call.position, rows);
  }
  at::Tensor positions;
  if (call.positions) {
    positions = call.positions->of_tokens;
    TORCH_CHECK_VALUE(
        positions.dim() == 2,
        "gnomon.attention: RoPE has angles, but positions have several axes; pass one position per "
        "token");
  } else {
    positions = call.firsts->to(at::kLong).reshape({-1, 1}) +
                at::arange(rows, call.firsts->options().dtype(at::kLong));
  }
  CheckPositions("gnomon.attention: angles of RoPE", positions, SizeOf(table, 2), "rows of angles");
  std::vector<c10::SymInt> sizes = table.sym_sizes().vec();
  if (positions.sym_size(0) != 1) sizes[0] = positions.sym_size(0);
  const at::Tensor whole = table.expand_symint(sizes);
  sizes[2] = rows;
  return whole.gather(2, positions.unsqueeze(1).unsqueeze(3).expand_symint(sizes));
}

// Rotates by angles that the user supplies.
at::Tensor RotateByTable(const Component& component, const std::vector<at::Tensor>& tensors,
                         const RotationCall& call) {
  for (const char* other : {"dims", "shape", "sections"}) {
    TORCH_CHECK_VALUE(!component.Find(other), "gnomon.attention: RoPE has angles and ", other,
                      "; use only one of them");
  }
  TORCH_CHECK_VALUE(!component.Flag("xpos") && component.Choice("scaling") == "none",
                    "gnomon.attention: RoPE has angles and ",
                    component.Flag("xpos") ? "xpos" : "scaling", "; use only one of them");
  for (const char* other : {"base", "prefix", "section_order"}) {
    TORCH_CHECK_VALUE(component.HasDefault(other), "gnomon.attention: RoPE has angles and ", other,
                      "; use only one of them");
  }
  const bool both = tensors.size() > 1;
  const at::Tensor& table = tensors[both && call.of_keys ? 1 : 0];
  const char* name = both && call.of_keys ? "key_angles" : "angles";
  const int64_t heads = table.dim() == 4 ? SizeOf(table, 1) : 0;
  TORCH_CHECK_VALUE((heads == 1 || heads == call.heads || heads == call.key_heads) &&
                        (table.sym_size(0) == 1 || table.sym_size(0) == call.x.sym_size(0)),
                    "gnomon.attention: ", name, " of RoPE has shape ", table.sym_sizes(),
                    "; expected (1 or B, 1 or H, L, dims / 2) with B = ", call.x.sym_size(0),
                    ", H = ", call.heads);
  TORCH_CHECK_VALUE(!both || table.sym_size(2) == call.x.sym_size(2), "gnomon.attention: ", name,
                    " of RoPE has ", table.sym_size(2),
                    " rows; expected one row for each token of ", call.of_keys ? "k, " : "q, ",
                    call.x.sym_size(2));
  return RotateFirst(component, call, both ? table : RowsAt(table, call),
                     component.Choice("layout") == "half");
}

// The positions whose rotations are computed together. Calls with few rows share blocks of 256
// positions, because generation requests one position after the other.
struct TurnedRows {
  static TurnedRows Of(int64_t position, int64_t rows, bool alone) {
    constexpr int64_t kTogether = 256;
    constexpr int64_t kFew = 32;
    const int64_t first = position - (position % kTogether + kTogether) % kTogether;
    if (alone || rows > kFew || position + rows > first + kTogether) {
      return {.first = position, .count = rows, .begin = 0, .rows = rows};
    }
    return {.first = first, .count = kTogether, .begin = position - first, .rows = rows};
  }
  Turns OwnOf(const Turns& all) const {
    if (count == rows) return all;
    return BelowAutograd([&]() -> Turns {
      return {all.cosine.narrow(-2, begin, rows), all.sine.narrow(-2, begin, rows)};
    });
  }

  int64_t first = 0;
  int64_t count = 0;
  int64_t begin = 0;  // of the requested rows, relative to `first`
  int64_t rows = 0;
};

// Caches the most recent rotations of calls with consecutive positions, which q, k and the layers
// of a model share. On a GPU, rotations are shared within a stream, whose work is ordered.
class KnownTurns {
 public:
  // The inputs that determine rotations: the term, and integers that describe the call.
  struct Key {
    std::string term;
    std::array<int64_t, 8> numbers;
    bool operator==(const Key&) const = default;
  };

  // The requested rows of the rotations; make() computes rotations that are not cached.
  template <class Make>
  Turns Get(const Key& key, const TurnedRows& rows, const Make& make) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (Known& known : known_) {
        if (!known.all.cosine.defined() || known.key != key) continue;
        if (known.begin != rows.begin || known.rows != rows.rows) known.Keep(rows);
        return known.own;
      }
    }
    Known found{.key = key, .all = Outside(make)};
    found.Keep(rows);
    if (found.all.cosine.numel() <= kMostNumbers) {
      const std::lock_guard<std::mutex> lock(mutex_);
      known_[next_++ % known_.size()] = found;
    }
    return found.own;
  }

 private:
  static constexpr int64_t kMostNumbers = 1 << 20;

  // Runs make() outside inference mode, because a later call that records gradients cannot use
  // inference tensors.
  template <class Make>
  static Turns Outside(const Make& make) {
    const c10::InferenceMode outside(false);
    const at::NoGradGuard no_grad;
    return make();
  }

  struct Known {
    void Keep(const TurnedRows& requested) {
      begin = requested.begin;
      rows = requested.rows;
      own = Outside([&] { return requested.OwnOf(all); });
    }

    Key key;
    Turns all;
    int64_t begin = 0;
    int64_t rows = 0;
    Turns own = {};  // [begin, begin + rows)
  };

  std::mutex mutex_;
  std::array<Known, 4> known_;
  size_t next_ = 0;
};

// Su et al. 2021, eq. 34. On a grid, each axis rotates an equal part of the columns by its own
// coordinate. The same applies to multi-axis positions without sections.
at::Tensor Rotate(const Component& component, const std::vector<at::Tensor>& tensors,
                  const RotationCall& call) {
  if (!tensors.empty()) return RotateByTable(component, tensors, call);
  const at::Tensor& x = call.x;
  if (call.as_queries != nullptr && call.as_queries->exists()) {
    *call.pending = *call.as_queries;
    return x;
  }
  const std::optional<TokenGrid> grid = TokenGrid::Find(component);
  const std::optional<std::vector<int64_t>> sections = component.FindShape("sections");
  TORCH_CHECK_VALUE(sections || component.HasDefault("section_order"),
                    "gnomon.attention: RoPE has section_order but no sections; expected both");
  const bool xpos = component.Flag("xpos");
  // Calls with consecutive positions share cached rotations.
  const std::optional<std::array<int64_t, 2>> stream =
      HasNumbers(x) ? LastingStream(x) : std::nullopt;
  const bool has_numbers = HasNumbers(x) && (x.is_cpu() || stream);
  std::optional<int64_t> first;
  if (has_numbers && !call.positions && !call.firsts) first = Concrete(call.position);
  // Reading positions on a GPU would wait for it.
  if (has_numbers && x.is_cpu() && call.positions && !xpos && !grid && !GoByLength(component)) {
    first = call.positions->FirstOfConsecutive();
  }
  const bool in_order = first.has_value();
  std::vector<at::Tensor> coordinates;
  if (!in_order || xpos) coordinates = CoordinatesOf(component, call, grid);
  const auto count = static_cast<int64_t>(coordinates.size());
  // The number of axes that rotate separate parts of the columns.
  const int64_t axes = sections ? 1 : !coordinates.empty() ? count : grid ? grid->axes() : 1;
  const int64_t dims = RotatedColumns(component, call, axes, grid);
  const bool half = component.Choice("layout") == "half";
  TORCH_CHECK_VALUE(
      !xpos || call.is_product,
      "gnomon.attention: RoPE has xpos, which scales inner products; expected the similarity dot");
  TORCH_CHECK_VALUE(
      !xpos || (!grid && coordinates.size() == 1), "gnomon.attention: RoPE has xpos on ",
      grid ? "the grid " + grid->Text() : "positions of several axes", "; expected a sequence");
  const std::optional<int64_t> last = call.positions ? std::nullopt : call.length.maybe_as_int();
  TORCH_CHECK_VALUE(!xpos || x.scalar_type() == at::kDouble || !last || *last <= kLongest,
                    "gnomon.attention: RoPE has xpos, and the sequence of ", x.scalar_type(),
                    " tokens has length ", *last, "; expected at most ", kLongest, ", or float64");
  TORCH_CHECK_VALUE(!grid || !GoByLength(component),
                    "gnomon.attention: RoPE on a grid has scaling=", component.Choice("scaling"),
                    ", which depends on the call's sequence length; expected a scaling that does "
                    "not");
  if (dims == 0) return x;

  const int64_t columns = dims / axes;
  int64_t length = 0;
  if (GoByLength(component)) {
    length = call.positions ? NumberOf(call.positions->Last(),
                                       "gnomon.attention: RoPE with length-dependent scaling") +
                                  1
                            : call.length.guard_int(__FILE__, __LINE__);
  }
  const auto make_turns = [&](const std::vector<at::Tensor>& of_tokens) -> Turns {
    // Angles are computed in float64, because float32 angles have an error of 8e-3 at position
    // 1,000,000.
    const RotationFrequencies frequencies =
        FrequenciesOf(component, columns, length, x.options().dtype(at::kDouble));
    std::vector<at::Tensor> angles;
    for (int64_t axis = 0; axis < axes; ++axis) {
      const at::Tensor& coordinate = of_tokens[static_cast<size_t>(axis)];
      angles.push_back(sections
                           ? SectionAngles(component, *sections, of_tokens, frequencies.of_pairs)
                           : coordinate.unsqueeze(-1) * frequencies.of_pairs);
    }
    const at::Tensor all = axes == 1 ? angles[0] : at::cat(angles, -1);
    const int64_t pairs = SizeOf(all, -1);
    const double factor = frequencies.attention_factor;
    if (!MapsOnGpu(x) || pairs % 4 == 0) return TurnsOf(all, ComputingType(x), factor);
    // GPU kernels load four pairs at once if rows are aligned.
    const Turns padded =
        TurnsOf(at::constant_pad_nd(all, {0, 4 - pairs % 4}), ComputingType(x), factor);
    return {padded.cosine.narrow(-1, 0, pairs), padded.sine.narrow(-1, 0, pairs)};
  };
  Turns turns;
  if (in_order) {
    const TurnedRows rows = TurnedRows::Of(*first, SizeOf(x, 2), grid || GoByLength(component));
    const KnownTurns::Key key{
        component.Text(),
        {rows.first, rows.count, columns, axes, length, static_cast<int64_t>(ComputingType(x)),
         stream ? (*stream)[0] : -1, stream ? (*stream)[1] : 0}};
    // Never destroyed: memory of a GPU must not be freed when the process ends.
    static KnownTurns* const known = new KnownTurns;
    turns = known->Get(key, rows, [&] {
      if (grid) return make_turns(CoordinatesOf(component, call, grid));
      return make_turns(
          {at::arange(rows.first, rows.first + rows.count, x.options().dtype(at::kDouble))});
    });
  } else {
    turns = make_turns(coordinates);
  }
  const at::Tensor turned = xpos ? RotatePairs(InType(x, ComputingType(x)), turns, half, columns)
                                 : RotatePairs(x, turns, half, columns, call.to, call.pending);
  if (!xpos) return turned;
  const at::Tensor& coordinate = coordinates[0];
  const at::Tensor middle =
      call.positions ? (call.positions->First() + call.positions->Last()).to(at::kDouble) / 2
                     : at::scalar_tensor(call.length, coordinate.options()) / 2;
  CheckSpread(x, coordinate, middle);
  return at::cat({Decay(turned.narrow(3, 0, dims), coordinate, middle, call.of_keys, half),
                  turned.slice(3, dims)},
                 3);
}

bool HasAngles(const Component& component) { return component.IsTensor("angles"); }
bool HasKeyAngles(const Component& component) {
  const bool has = component.IsTensor("key_angles");
  TORCH_CHECK_VALUE(!has || HasAngles(component),
                    "gnomon.attention: RoPE has key_angles but no angles; expected both");
  return has;
}

// A table of angles, available only in function calls.
Parameter Angles(const char* name, bool (*present)(const Component&), const char* meaning,
                 const char* otherwise) {
  Parameter angles =
      Table(name, Index::kTokens, {.present = present}).Means(meaning).Otherwise(otherwise);
  angles.argument = CatalogueParameter::Argument::kOptional;
  return angles;
}

std::vector<Parameter> Parameters() {
  std::vector<Parameter> parameters = OnGrid(
      {PositiveNumber("base", "10000").Means("base of the frequencies"),
       Choice("layout", {"interleaved", "half"})
           .Means("\"interleaved\": pairs (2 i, 2 i + 1); \"half\": pairs (i, i + dims / 2)"),
       Integer("dims", "")
           .Means("number of rotated coordinates; default D, or the largest even number below D if "
                  "the last coordinate is a height; on a grid, the largest multiple of 2 * axes "
                  "that fits")
           .Otherwise("all (all but the height)")});
  for (Parameter& parameter : FrequencyParameters()) parameters.push_back(std::move(parameter));
  parameters.push_back(
      Flag("xpos", "false")
          .Means("whether the products of rotated pairs decay with distance (Sun et al. 2023); "
                 "requires the dot product and, except in float64, at most 65,536 tokens"));
  Parameter sections = Shape();
  sections.name = "sections";
  parameters.push_back(sections
                           .Means("number of pairs that each axis rotates, for positions with "
                                  "several axes (Qwen2-VL: time, height and width). The numbers "
                                  "must add up to dims / 2, and the frequencies are the same as "
                                  "for a sequence")
                           .Otherwise("equal numbers, each axis with its own frequencies"));
  parameters.push_back(Choice("section_order", {"contiguous", "interleaved"})
                           .Means("\"contiguous\": one section after another; \"interleaved\": "
                                  "pairs are assigned to the axes in turn until their sections are "
                                  "full; the first axis gets the remaining pairs (Qwen3-VL)"));
  parameters.push_back(
      Angles("angles", HasAngles,
             "(1 or B, 1 or H, L, dims / 2), in radians; may require grad. Pair n of the token at "
             "position p is rotated by angles[..., p, n] instead of p times a frequency. H may "
             "also be the number of key heads",
             "positions times frequencies"));
  parameters.push_back(
      Angles("key_angles", HasKeyAngles,
             "angles of the keys, (1 or B, 1 or H, Lk, dims / 2), if q and k are computed from "
             "different tokens. Row n of angles then belongs to query n, and row n of key_angles "
             "belongs to key n",
             "angles"));
  return parameters;
}

const RegisterPosition rope({
    .catalogue =
        {.name = "rope",
         .title = "RoPE",
         .formula = "rotates coordinate pair i of q and k at position p by the angle p base^(-2 i "
                    "/ dims); on a grid, each axis rotates dims / axes coordinates",
         .latex = R"(\theta_i = p\; \text{base}^{-2i/\text{dims}})",
         .note = "p is the position of the token, and i is the index of the pair. On a grid, each "
                 "axis rotates dims / axes coordinates",
         .details = "The rotation applies to the first dims coordinates, before the similarity "
                    "maps the tokens. If a shape is given, the first `prefix` tokens are not "
                    "rotated, and the remaining tokens lie on a grid. The rotated coordinates are "
                    "then divided evenly among the axes. Each part is rotated according to the "
                    "token's position along the corresponding axis, with dims / axes in place of "
                    "dims. If there are fewer tokens than grid cells, as during generation, they "
                    "fill the grid from the start.",
         .source = "Su et al. 2021, RoFormer",
         .role = CatalogueEntry::Role::kRotation,
         .cost = "0 + 0",
         .class_name = "RoPE"},
    .parameters = Parameters(),
    .rotate = Rotate,
    .may_wait = true,
    .goes_by_length = GoByLength,
});

}  // namespace
}  // namespace rope
}  // namespace gnomon
