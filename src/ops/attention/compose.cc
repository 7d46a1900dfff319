#include "ops/attention/compose.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "ops/attention/call_checks.h"
#include "ops/attention/call_positions.h"
#include "ops/attention/einstein_midpoint.h"
#include "ops/attention/grid_bias.h"
#include "ops/attention/key_bias.h"
#include "ops/attention/outputs.h"
#include "ops/attention/placed_bias.h"
#include "ops/coordinates/token_grid.h"
#include "ops/geometry/geometry.h"
#include "ops/operators/attention_operators.h"
#include "ops/operators/devices.h"
#include "ops/operators/kept_tensor.h"
#include "ops/operators/pair_rotation.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

constexpr const char* kOperation = OperatorArguments::kOperation;

// The only position with that role, or null.
const ResolvedPosition* FindOne(const std::vector<ResolvedPosition>& positions,
                                PositionEntry::Role role, const char* what) {
  const ResolvedPosition* found = nullptr;
  for (const ResolvedPosition& position : positions) {
    if (position.entry->role() != role) continue;
    TORCH_CHECK_VALUE(found == nullptr, "gnomon.attention: position contains two ", what,
                      "; expected at most one");
    found = &position;
  }
  return found;
}

// One past the farthest position. With per-batch offsets, this is the number of keys, because
// shapes cannot depend on data.
c10::SymInt LengthOf(const at::Tensor& q, const at::Tensor& k, const c10::SymInt& query_offset,
                     const OptionalTensor& query_offsets) {
  const c10::SymInt queries = q.sym_size(2) + query_offset;
  return query_offsets ? k.sym_size(2) : queries.max(k.sym_size(2));
}

// q or k after the norms.
at::Tensor Normed(const at::Tensor& x, const std::vector<ResolvedPosition>& positions,
                  bool of_keys) {
  at::Tensor normed = x;
  for (const ResolvedPosition& position : positions) {
    if (position.entry->norm == nullptr) continue;
    normed = position.entry->Normed(*position.component, position.tensors,
                                    normed.to(ComputingType(normed)), of_keys);
  }
  return normed;
}

// Whether the term transforms keys with its own parameters.
bool LearnsFromKeys(const ResolvedPosition& position) {
  const bool rotates =
      position.entry->role() == PositionEntry::Role::kRotation && !position.of_turned_keys;
  return position.entry->norm != nullptr || (rotates && !position.tensors.empty());
}

void CheckScale(const char* operation, double scale) {
  TORCH_CHECK_VALUE(std::fabs(scale) <= std::numeric_limits<float>::max(), operation, ": scale is ",
                    scale, "; expected a finite number that float32 can represent");
}

// A call under construction. Each step adds the contributions of some terms to the operator's
// arguments; the order of the steps is the order in which errors are reported.
class Composition {
 public:
  // With `pages`, k and v have only the shape of the keys and values.
  Composition(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
              const ResolvedSimilarity& similarity, const std::vector<ResolvedPosition>& positions,
              const CallArguments& arguments, const Pages* pages)
      : pages_(pages),
        given_q_(q),
        v_(v),
        similarity_(similarity),
        entry_(*similarity.entry),
        positions_(positions),
        arguments_(arguments),
        // Low-precision tokens are passed to the kernels unchanged. Kernels that multiply such
        // values natively round the weights (gnomon/attention.h). Derived tensors are computed in
        // float32, and rounded only for kernels that require a single token type.
        computing_(ComputingType(q)),
        q_(q),
        k_(k),
        range_{.queries = q_.sym_size(2),
               .keys = k_.sym_size(2),
               .query_offset = 0,
               .heads = Concrete(q_.sym_size(1)),
               .query_offsets = std::nullopt,
               .options = q_.options().dtype(computing_)} {}

  Outputs Run(bool returns_lse) {
    Check();
    at::Tensor query = entry_.WithHeightLast(*similarity_.component, q_);
    at::Tensor key = entry_.WithHeightLast(*similarity_.component, k_);
    FindKeyOrder();
    AddOffsetBiases();
    Rotate(query, key);
    AddContent();
    AddPairBiases();
    AddKeyBiases();
    AddMask();
    AddTemperature();
    at::Tensor value = WeighedValues();
    const MappedTokens tokens = Map(query, key);
    // Query heads that map the same keys differently get separate keys.
    const int64_t copies = SizeOf(tokens.y, 1) / std::max<int64_t>(1, SizeOf(value, 1));
    if (copies > 1) {
      value = value.repeat_interleave(copies, 1);
      if (call_.relative_key) {
        call_.relative_key = call_.relative_key->repeat_interleave(copies, 1);
      }
    }
    AddTokens(tokens, value);
    AddCallPositions();
    AddDropout();
    AddSoftcap(tokens);
    call_.rows_first = HasRowsFirst(given_q_);
    auto [o, lse, statistics] = AttentionOperator::CallForward(call_);
    if (weighs_values_) UnweighValues(o, lse, statistics);
    const OptionalTensor sink = Sink();
    if (sink || returns_lse) {
      if (call_.key_bias_base) lse = lse + Tempered(*call_.key_bias_base);
      if (tokens.row_constant) lse = lse + Tempered(tokens.row_constant());
    }
    if (row_bias_) {
      AddRowBias(o, lse, statistics, *row_bias_, call_.temperature, sink || returns_lse);
    }
    const bool takes_centroid = arguments_.aggregation == "lorentz_centroid";
    if (sink) {
      auto [less, with] = AddSink(o, lse, *sink);
      // The centroid does not depend on the scale of the sum, so the sink's factor is omitted.
      if (!takes_centroid) o = less;
      lse = with;
    }
    if (takes_centroid) o = LorentzCentroid(o, similarity_);
    o = InType(Gated(o), given_q_.scalar_type());
    if (!returns_lse) return {o, {}, {}};
    return {o, lse, statistics};
  }

 private:
  void Check() {
    TORCH_CHECK_NOT_IMPLEMENTED(
        (pages_ != nullptr) == arguments_.page_table.has_value(), kOperation,
        ": page_table is supported only by attention(); leave it out in other calls");
    call_.key_starts = CheckIntegers(kOperation, "key_starts", arguments_.key_starts, q_);
    call_.key_lengths = CheckIntegers(kOperation, "key_lengths", arguments_.key_lengths, q_);
    // Hidden keys may be NaN, which would propagate to the gradients of parameters.
    if (std::any_of(positions_.begin(), positions_.end(), LearnsFromKeys)) k_ = Visible(k_);
    q_ = Normed(q_, positions_, /*of_keys=*/false);
    k_ = Normed(k_, positions_, /*of_keys=*/true);
    const int64_t head_dim = Concrete(q_.sym_size(3));
    FindOne(positions_, PositionEntry::Role::kNorm, "QK-norms");
    FindOne(positions_, PositionEntry::Role::kGate, "gates");
    content_ = FindOne(positions_, PositionEntry::Role::kContent, "content terms");
    // With any similarity, content terms use the call's scale.
    const bool is_for_content = content_ != nullptr && !entry_.catalogue.takes_scale;
    for (const ResolvedPosition& position : positions_) {
      const CatalogueEntry& entry = position.entry->catalogue;
      TORCH_CHECK_VALUE(!entry.needs_dot || entry_.is_product, kOperation, ": ", entry.name,
                        " works only with the similarity dot, not with ", entry_.catalogue.name);
      if (!entry.needs_causal || IsCausal()) continue;
      // Tables with rows for keys before and after the query do not require a causal mask.
      const bool may_be_both = entry.Find("bidirectional") != nullptr;
      TORCH_CHECK_VALUE(may_be_both && position.component->Flag("bidirectional"), kOperation, ": ",
                        entry.name, " requires causal=True",
                        may_be_both ? ", or bidirectional=True" : "");
    }
    factor_ =
        HeadFactor(kOperation, similarity_, q_, is_for_content ? std::nullopt : arguments_.scale);
    scale_ = arguments_.scale.value_or(1 / std::sqrt(static_cast<double>(head_dim)));
    CheckScale("gnomon.attention", scale_);
    CheckOptions(arguments_);
    TORCH_CHECK_VALUE(
        arguments_.query_segments.has_value() == arguments_.key_segments.has_value(),
        "gnomon.attention: ", arguments_.query_segments ? "key_segments" : "query_segments",
        " is None; expected both query_segments and key_segments, or neither");
    call_.query_segments =
        CheckIntegers(kOperation, "query_segments", arguments_.query_segments, q_, range_.queries);
    call_.key_segments =
        CheckIntegers(kOperation, "key_segments", arguments_.key_segments, q_, range_.keys);
    range_.query_offsets = CheckIntegers(kOperation, "query_offset", arguments_.query_offsets, q_);
    TORCH_CHECK_VALUE(
        !range_.query_offsets || !arguments_.query_offset,
        "gnomon.attention: query_offset and query_offsets are both given; pass only one of them");
    call_positions_ = CallPositions::Find(q_, k_, arguments_);
    coordinates_ = Coordinates::Find(q_, k_, positions_, arguments_);
    grid_ = FindGrid(q_, k_, positions_, arguments_);
    rotation_ = FindOne(positions_, PositionEntry::Role::kRotation, "rotations");
    const bool has_position =
        !coordinates_ && std::any_of(positions_.begin(), positions_.end(), DependsOnPositions);
    range_.query_offset = QueryOffset(q_, k_, has_position, arguments_);
  }

  // Determines the order of the keys, if a term requires it and it differs from the order of the
  // columns.
  void FindKeyOrder() {
    const bool asks_for_order =
        std::any_of(positions_.begin(), positions_.end(), [](const ResolvedPosition& position) {
          return position.entry->catalogue.sums_over_keys ||
                 position.entry->role() == PositionEntry::Role::kTemperature;
        });
    if (!asks_for_order || (!call_positions_ && !call_.key_segments)) return;
    order_.emplace(call_positions_ ? *call_positions_ : CallPositions::Consecutive(q_, range_),
                   call_.query_segments, call_.key_segments, call_.key_starts, call_.key_lengths);
    of_keys_ = {order_->columns(), order_->segment_begin()};
  }

  void AddOffsetBiases() {
    OptionalTensor bias;
    for (const ResolvedPosition& position : positions_) {
      if (!IsBias(position)) continue;
      if (call_positions_ && !grid_) {
        TORCH_CHECK_NOT_IMPLEMENTED(
            !position.entry->GoesByLength(*position.component), kOperation, ": ",
            position.component->name(),
            " depends on the call's sequence length and does not support positions; pass "
            "query_offset instead");
        packed_.Add(*position.entry, *position.component, position.tensors);
        continue;
      }
      const at::Tensor term =
          grid_ ? GridTable(*position.entry, *position.component, position.tensors, *grid_,
                            range_.heads, range_.options)
                : position.entry->BiasByOffset(*position.component, position.tensors, range_);
      bias = bias ? *bias + term : term;
    }
    if (bias && grid_) bias = FlatGridTable(*bias, *grid_);
    if (bias && bias->dim() == 2) bias = bias->unsqueeze(0);
    call_.bias = bias;
  }

  void Rotate(at::Tensor& query, at::Tensor& key) {
    if (rotation_ == nullptr) return;
    const PositionEntry& entry = *rotation_->entry;
    // On a GPU, a rotation waits for the token map, so that one kernel computes both.
    const bool waits = entry.may_wait && MapsOnGpu(query) && MapsOnGpu(key);
    RotationCall rotated{.x = waits ? query : query.to(computing_),
                         .position = range_.query_offset,
                         .firsts = range_.query_offsets,
                         .length = LengthOf(q_, k_, range_.query_offset, range_.query_offsets),
                         .of_keys = false,
                         .is_product = entry_.is_product,
                         .last_is_height = entry_.HasHeight(*similarity_.component),
                         .heads = range_.heads,
                         .key_heads = SizeOf(k_, 1)};
    const auto set_positions = [&] {
      if (call_positions_) rotated.positions = call_positions_->Of(rotated.of_keys);
      if (coordinates_) rotated.positions = coordinates_->Of(rotated.of_keys);
    };
    set_positions();
    if (waits) rotated.pending = &q_rotation_;
    query = entry.Rotated(*rotation_->component, rotation_->tensors, rotated);
    if (rotation_->of_turned_keys) return;
    rotated.x = waits ? key : key.to(computing_);
    rotated.position = 0;
    rotated.firsts = std::nullopt;
    rotated.of_keys = true;
    set_positions();
    if (waits) {
      rotated.pending = &k_rotation_;
      if (KeysAreAtQueries()) rotated.as_queries = &q_rotation_;
    }
    key = entry.Rotated(*rotation_->component, rotation_->tensors, rotated);
  }

  // Whether row n of q and row n of k have the same position, as far as this is known.
  bool KeysAreAtQueries() const {
    if (call_positions_ || coordinates_ || range_.query_offsets) return false;
    const std::optional<int64_t> first = range_.query_offset.maybe_as_int();
    const std::optional<int64_t> queries = range_.queries.maybe_as_int();
    return first == 0 && queries && queries == range_.keys.maybe_as_int();
  }

  // The value of ContentCall::farthest.
  std::optional<int64_t> FarthestOffset() const {
    if (call_positions_ || coordinates_ || range_.query_offsets) return std::nullopt;
    const std::optional<int64_t> queries = range_.queries.maybe_as_int();
    const std::optional<int64_t> keys = range_.keys.maybe_as_int();
    const std::optional<int64_t> first = range_.query_offset.maybe_as_int();
    if (!queries || !keys || !first) return std::nullopt;
    return std::max<int64_t>({0, *first + *queries - 1, *keys - 1 - *first});
  }

  // The number of columns of the term's values. It equals that of v, unless only weights are
  // requested: v then contains unit vectors.
  int64_t ValueColumns() const {
    if (content_->of_weights_alone) {
      const std::vector<const Parameter*> parameters =
          content_->entry->Tensors(*content_->component);
      for (size_t n = 0; n < parameters.size(); ++n) {
        if (parameters[n]->tensor.of_values) return SizeOf(content_->tensors[n], -1);
      }
    }
    return Concrete(v_.sym_size(3));
  }

  // Throws if kernels cannot read a table of a content term.
  void CheckTable(const ContentTerm& term, const char* what, const at::Tensor& table) const {
    if (!table.defined()) return;
    TORCH_CHECK_VALUE(
        table.dim() == 3 && (table.sym_size(0) == 1 || table.sym_size(0) == range_.heads),
        kOperation, ": ", content_->component->name(), " returns a table of ", what, " of shape ",
        table.sym_sizes(), "; expected (1 or H, rows, columns) with H = ", range_.heads);
    TORCH_CHECK_VALUE(
        (term.layout != "clip" && term.layout != "zero") || table.sym_size(1) % 2 == 1, kOperation,
        ": ", content_->component->name(), " returns a table of ", what, " with ",
        table.sym_size(1),
        " rows; expected an odd number of rows, because the offsets run in both directions");
  }

  void AddContent() {
    if (content_ == nullptr) return;
    ContentTerm term = content_->entry->content(
        *content_->component, content_->tensors,
        {q_.to(computing_), k_.to(computing_), range_.heads, Concrete(q_.sym_size(3)),
         ValueColumns(), IsCausal(), FarthestOffset()});
    if (content_->of_weights_alone) {
      term.values = at::Tensor();
      // Weights do not depend on relative values.
      if (!term.keys.defined() && !term.queries.defined() && !term.key_weights.defined()) return;
    }
    TORCH_CHECK_VALUE(term.query.defined() == term.keys.defined() &&
                          term.key.defined() == term.queries.defined() &&
                          (term.keys.defined() || term.queries.defined() || term.values.defined()),
                      kOperation, ": ", content_->component->name(),
                      " returns an incomplete content term; expected both query and keys, both "
                      "key and queries, or values");
    CheckTable(term, "keys", term.keys);
    CheckTable(term, "queries", term.queries);
    CheckTable(term, "values", term.values);
    const double factor = term.takes_scale ? scale_ : term.factor;
    if (term.key_weights.defined()) {
      call_.key_bias = KeyProducts(term.key_weights, Visible(k_.to(computing_))) * factor;
    }
    if (!term.takes_scale) {
      TORCH_CHECK_VALUE(!arguments_.scale || entry_.catalogue.takes_scale, kOperation,
                        ": scale applies to similarities such as dot and to content terms without "
                        "their own scale; omit scale, because this call has neither");
    }
    if (term.keys.defined()) {
      call_.relative_query = std::move(term.query);
      call_.relative_keys = std::move(term.keys);
    }
    if (term.values.defined()) call_.relative_values = std::move(term.values);
    if (term.queries.defined()) {
      call_.relative_key = std::move(term.key);
      call_.relative_queries = std::move(term.queries);
    }
    relative_layout_ = std::move(term.layout);
    call_.relative_layout = relative_layout_;
    call_.relative_factor = factor;
  }

  // Throws unless `bias` has the shape of a key bias.
  void CheckKeyBias(const char* what, const Component& component, const at::Tensor& bias) const {
    const bool fits = bias.defined() && bias.dim() == 3 &&
                      (bias.sym_size(0) == 1 || bias.sym_size(0) == q_.sym_size(0)) &&
                      (bias.sym_size(1) == 1 || bias.sym_size(1) == range_.heads) &&
                      bias.sym_size(2) == range_.keys;
    TORCH_CHECK_VALUE(fits, kOperation, ": the ", what, " of ", component.name(), " has shape ",
                      bias.defined() ? bias.sym_sizes() : c10::SymIntArrayRef(),
                      "; expected (1 or B, 1 or H, Lk) = (", q_.sym_size(0), ", ", range_.heads,
                      ", ", range_.keys, ")");
  }

  // The key bias of a position.
  at::Tensor KeyBiasOf(const ResolvedPosition& position) const {
    const Component& component = *position.component;
    std::vector<at::Tensor> tensors = position.tensors;
    CheckKeyBias("tensor", component, tensors[0]);
    // Sums include hidden keys, whose values are arbitrary, so these values are set to 0.
    tensors[0] = Visible(tensors[0].unsqueeze(3)).squeeze(3);
    if (position.entry->key_bias == nullptr) return tensors[0];
    at::Tensor bias = position.entry->key_bias(component, tensors, of_keys_);
    CheckKeyBias("bias", component, bias);
    TORCH_CHECK_TYPE(bias.scalar_type() == computing_ || bias.scalar_type() == at::kDouble,
                     kOperation, ": the bias of ", component.name(), " has dtype ",
                     bias.scalar_type(), "; expected ", computing_, " or Double");
    return bias;
  }

  void AddKeyBiases() {
    OptionalTensor given = std::move(shared_by_rows_);
    if (call_.key_bias) AddBias(given, *call_.key_bias);
    OptionalTensor sums;
    for (const ResolvedPosition& position : positions_) {
      if (position.entry->role() != PositionEntry::Role::kKeyBias) continue;
      const at::Tensor bias = KeyBiasOf(position);
      AddBias(bias.scalar_type() == computing_ ? given : sums, bias);
    }
    const auto whole = [&](const OptionalTensor& bias) {
      const std::vector<c10::SymInt> sizes = {q_.sym_size(0), q_.sym_size(1), range_.keys};
      return bias->expand_symint(sizes);
    };
    if (!sums) {
      if (given) call_.key_bias = whole(given);
      return;
    }
    KeyBias split = SplitKeyBias(given ? *given : at::zeros({}, sums->options()), whole(sums),
                                 computing_, range_, order_);
    call_.key_bias = std::move(split.bias);
    call_.key_bias_low = std::move(split.low);
    call_.key_bias_base = std::move(split.base);
  }

  // A bias shared by all rows becomes a key bias, and one shared by all keys becomes a row bias, so
  // neither the bias nor its gradient takes memory per pair. With a soft cap, a bias shared by all
  // keys changes the weights, so it remains a pair bias.
  void AddPairBiases() {
    for (const ResolvedPosition& position : positions_) {
      if (position.entry->role() != PositionEntry::Role::kPairBias) continue;
      const PairBiasFunction function = position.entry->pair_bias;
      at::Tensor given = function == nullptr ? position.tensors[0]
                                             : function(*position.component, position.tensors);
      const std::string name = "the tensor of " + position.component->name();
      const at::Tensor pairs = BroadcastPairs(name.c_str(), given, q_, k_);
      while (given.dim() < 4) given = given.unsqueeze(0);
      if (given.sym_size(3) == 1 && !arguments_.score_softcap) {
        AddBias(row_bias_, given.squeeze(3));
      } else if (given.sym_size(2) == 1) {
        AddBias(shared_by_rows_, given.squeeze(2));
      } else {
        AddBias(call_.pair_bias, pairs);
      }
    }
  }

  void AddMask() {
    if (!arguments_.mask) return;
    const at::Tensor& mask = *arguments_.mask;
    TORCH_CHECK_TYPE(mask.scalar_type() == at::kBool, kOperation, ": mask has dtype ",
                     mask.scalar_type(),
                     "; expected bool; to add values to the scores, pass position.PairBias");
    TORCH_CHECK_TYPE(mask.device() == q_.device(), kOperation, ": mask is on ", mask.device(),
                     ", but q is on ", q_.device(), "; expected the same device");
    call_.mask = BroadcastPairs("mask", mask, q_, k_);
  }

  void AddTemperature() {
    const std::vector<c10::SymInt> rows = {q_.sym_size(0), q_.sym_size(1), range_.queries};
    if (arguments_.temperature) {
      call_.temperature = Broadcast(
          "temperature", "(B, H, Lq)",
          AsParameter(*arguments_.temperature, given_q_, "gnomon.attention: temperature"), rows);
    }
    for (const ResolvedPosition& position : positions_) {
      if (position.entry->temperature == nullptr) continue;
      const std::string name = "the temperature of " + position.component->name();
      const at::Tensor own =
          Broadcast(name.c_str(), "(B, H, Lq)",
                    position.entry->temperature(*position.component, position.tensors, Rows()),
                    rows)
              .to(computing_);
      call_.temperature = call_.temperature ? *call_.temperature * own : own;
    }
  }

  // The positions of the rows, and the number of available keys up to each.
  TemperatureCall Rows() const {
    const at::Tensor positions =
        (call_positions_ ? call_positions_->queries() : range_.QueryPositions(q_.options()))
            .unsqueeze(1);
    return {positions.to(at::kDouble), KeysUpTo(positions).clamp_min(1).to(at::kDouble)};
  }

  // The number of keys in a row's segment; with a causal mask, only those up to the row's position.
  at::Tensor KeysUpTo(const at::Tensor& positions) const {
    if (order_) return (IsCausal() ? order_->Seen() : order_->All()).unsqueeze(1);
    const auto of_batch = [](const at::Tensor& keys) { return keys.unsqueeze(1).unsqueeze(2); };
    const at::Tensor end = call_.key_lengths
                               ? of_batch(*call_.key_lengths)
                               : at::full_symint({}, range_.keys, positions.options());
    const at::Tensor last = IsCausal() ? at::minimum(positions + 1, end) : end + positions * 0;
    return call_.key_starts ? last - of_batch(*call_.key_starts) : last;
  }

  // The values to aggregate. Midpoints weight each value by its Lorentz factor, whose logarithm is
  // added to the scores.
  at::Tensor WeighedValues() {
    if (arguments_.aggregation != "einstein_midpoint") {
      TORCH_CHECK_VALUE(
          arguments_.aggregation == "mean" || arguments_.aggregation == "lorentz_centroid",
          "gnomon.attention: aggregation is \"", arguments_.aggregation,
          "\"; expected mean, einstein_midpoint or lorentz_centroid");
      return v_;
    }
    const at::Tensor value = InUnitBall(Visible(v_.to(computing_)));
    // A temperature would also multiply these logarithms. With a temperature, the values are
    // therefore multiplied by the factors instead, and an additional column accumulates the sum of
    // the factors.
    weighs_values_ = call_.temperature.has_value();
    if (weighs_values_) {
      TORCH_CHECK_NOT_IMPLEMENTED(arguments_.dropout == 0, kOperation,
                                  ": dropout is not supported together with temperature and "
                                  "aggregation=\"einstein_midpoint\"; set dropout to 0");
      TORCH_CHECK_NOT_IMPLEMENTED(!call_.relative_values, kOperation,
                                  ": relative values are not supported together with temperature "
                                  "and aggregation=\"einstein_midpoint\"; leave one of them out");
      return WeighValues(value);
    }
    const at::Tensor log_factor = LogLorentzFactor(value, range_.heads);
    if (call_.key_bias_low) {
      // The logarithm is added to the low part, because it would lose precision in a long sum; the
      // second line adds its gradient.
      call_.key_bias_low = *call_.key_bias_low + log_factor.detach();
      AddBias(call_.key_bias, log_factor - log_factor.detach());
    } else {
      AddBias(call_.key_bias, log_factor);
    }
    return value;
  }

  MappedTokens Map(at::Tensor query, at::Tensor key) const {
    // The dot product has no token map and uses the keys unchanged. Kernels do not read hidden
    // pages.
    if (!entry_.is_product && pages_ == nullptr) key = Visible(key);
    const HeadParameters heads{factor_, similarity_.others};
    const at::ScalarType kernel_type =
        WantsOneType(given_q_.device()) ? given_q_.scalar_type() : computing_;
    if (entry_.raw_map != nullptr && (key.is_cuda() || MapsOnGpu(key)) &&
        query.scalar_type() == key.scalar_type()) {
      return entry_.Mapped(*similarity_.component,
                           RawTokens{query, key, q_rotation_, k_rotation_, kernel_type}, heads);
    }
    if (q_rotation_.exists() || k_rotation_.exists()) {
      std::tie(query, key) = RotateTokens(query, q_rotation_, key, k_rotation_,
                                          entry_.keeps_tokens ? kernel_type : computing_);
    }
    if (!entry_.keeps_tokens || query.scalar_type() != key.scalar_type()) {
      query = InType(query, computing_);
      key = InType(key, computing_);
    }
    return entry_.Mapped(*similarity_.component, query, key, heads);
  }

  void AddTokens(const MappedTokens& tokens, const at::Tensor& value) {
    const auto as_token = [&](const at::Tensor& token) {
      return WantsOneType(given_q_.device()) ? token.to(given_q_.scalar_type()) : token;
    };
    call_.x = as_token(tokens.x);
    call_.y = as_token(tokens.y);
    call_.v = as_token(value);
    if (call_.relative_query) call_.relative_query = as_token(*call_.relative_query);
    if (call_.relative_key) call_.relative_key = as_token(*call_.relative_key);
    call_.row_scalars = AsOptional(tokens.row_scalars);
    call_.column_scalars = AsOptional(tokens.column_scalars);
    call_.head_scalars = AsOptional(tokens.head_scalars);
    call_.factor = tokens.factor;
    call_.function = tokens.function;
    if (pages_ == nullptr) return;
    call_.key_pages = pages_->keys;
    call_.value_pages = pages_->values;
    call_.page_table = pages_->table;
  }

  void AddCallPositions() {
    call_.query_offset = range_.query_offset;
    call_.query_offsets = range_.query_offsets;
    if (call_positions_) {
      call_.query_positions = call_positions_->queries();
      call_.key_positions = call_positions_->keys();
    }
    if (!packed_.empty()) {
      call_.bias_parameters = packed_.Parameters(range_.options);
      call_.bias_terms = packed_.terms();
      call_.bias_shapes = at::OptionalSymIntArrayRef(packed_.shapes());
    }
    call_.left = arguments_.left;
    call_.right = arguments_.causal ? c10::SymInt(0) : arguments_.right;
    if (arguments_.chunks) {
      chunks_.assign(arguments_.chunks->begin(), arguments_.chunks->end());
      call_.chunks = at::OptionalSymIntArrayRef(chunks_);
    }
    if (grid_) {
      axes_.push_back(grid_->prefix());
      axes_.insert(axes_.end(), grid_->shape().begin(), grid_->shape().end());
      call_.grid = at::OptionalSymIntArrayRef(axes_);
    }
  }

  void AddDropout() {
    call_.tolerance = arguments_.tolerance;
    if (arguments_.dropout <= 0) return;
    call_.dropout = arguments_.dropout;
    call_.seed = SeedOrDrawn(arguments_.seed);
  }

  // Whether heads are adjacent in memory, as in the transpose of (B, L, H, D). The output then has
  // the same layout, so that its transpose is contiguous.
  static bool HasRowsFirst(const at::Tensor& q) {
    return q.sym_size(1) > 1 && q.sym_size(2) > 1 && q.sym_stride(1) > 0 &&
           q.sym_stride(1) < q.sym_stride(2);
  }

  // Kernels omit the parts of the scores that all keys of a row share, because these do not change
  // the weights. With a soft cap they would, so such calls are rejected.
  void AddSoftcap(const MappedTokens& tokens) {
    if (!arguments_.score_softcap) return;
    const auto refuse = [&](bool is_shared, const std::string& what) {
      TORCH_CHECK_NOT_IMPLEMENTED(!is_shared, kOperation, ": score_softcap is not supported with ",
                                  what, "; set score_softcap to None");
    };
    refuse(tokens.row_constant != nullptr, entry_.catalogue.name);
    refuse(call_.key_bias_base.has_value(), "a position that sums over keys");
    refuse(arguments_.aggregation == "einstein_midpoint", "aggregation = einstein_midpoint");
    call_.softcap = *arguments_.score_softcap;
  }

  OptionalTensor Sink() const {
    const ResolvedPosition* named = FindOne(positions_, PositionEntry::Role::kSink, "sinks");
    TORCH_CHECK_VALUE(named == nullptr || !arguments_.sink, kOperation,
                      ": sink is given, and position contains a sink; pass only one of them");
    if (named != nullptr) return named->tensors[0];
    if (!arguments_.sink) return std::nullopt;
    return AsParameter(*arguments_.sink, given_q_, "gnomon.attention: sink");
  }

  at::Tensor Gated(at::Tensor o) const {
    for (const ResolvedPosition& position : positions_) {
      if (position.entry->role() != PositionEntry::Role::kGate) continue;
      if (position.of_weights_alone) continue;
      const at::Tensor& gate = position.tensors[0];
      TORCH_CHECK_VALUE(gate.sym_sizes() == o.sym_sizes(), kOperation, ": the tensor of ",
                        position.component->name(), " has shape ", gate.sym_sizes(),
                        "; expected (B, H, Lq, Dv) = ", o.sym_sizes());
      o = o * gate;
    }
    return o;
  }

  at::Tensor Tempered(const at::Tensor& scores) const {
    return call_.temperature ? scores * *call_.temperature : scores;
  }

  at::Tensor Visible(const at::Tensor& of_keys) const {
    return WithoutHidden(of_keys, call_.key_starts, call_.key_lengths);
  }

  bool IsCausal() const {
    return arguments_.causal || (arguments_.right && *arguments_.right == 0);
  }

  const Pages* pages_;
  const at::Tensor& given_q_;
  const at::Tensor& v_;
  const ResolvedSimilarity& similarity_;
  const SimilarityEntry& entry_;
  const std::vector<ResolvedPosition>& positions_;
  const CallArguments& arguments_;
  at::ScalarType computing_;
  at::Tensor q_;  // after the norms, like k
  at::Tensor k_;
  at::Tensor factor_;
  double scale_ = 1;
  const ResolvedPosition* content_ = nullptr;
  const ResolvedPosition* rotation_ = nullptr;
  PendingRotation q_rotation_;
  PendingRotation k_rotation_;
  OffsetRange range_;
  std::optional<CallPositions> call_positions_;
  std::optional<Coordinates> coordinates_;
  std::optional<TokenGrid> grid_;
  std::optional<KeyOrder> order_;
  KeyBiasCall of_keys_;
  PackedBiases packed_;
  bool weighs_values_ = false;
  OptionalTensor shared_by_rows_;  // pair biases shared by all rows: (1 or B, 1 or H, Lk)
  OptionalTensor row_bias_;        // pair biases shared by all keys: (1 or B, 1 or H, 1 or Lq)
  OperatorArguments call_;
  // Storage for the views in call_.
  std::string relative_layout_;
  std::vector<c10::SymInt> chunks_;
  std::vector<c10::SymInt> axes_;
};

// Whether no tensor of a call requires a derivative. False if the call is transformed, because
// transforms record their own graphs. With `plain`, also false if the call is traced.
bool RecordsNothing(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const ResolvedSimilarity& similarity,
                    const std::vector<ResolvedPosition>& positions, const CallArguments& arguments,
                    bool plain) {
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    return false;
  }
  const bool records = at::GradMode::is_enabled();
  const auto is_plain = [records, plain](const at::Tensor& tensor) {
    return !tensor.defined() ||
           ((HasNumbers(tensor) || !plain) && !(records && tensor.requires_grad()) &&
            !tensor._fw_grad(/*level=*/0).defined());
  };
  const auto are_plain = [&](const std::vector<at::Tensor>& tensors) {
    return std::all_of(tensors.begin(), tensors.end(), is_plain);
  };
  bool all = is_plain(q) && is_plain(k) && is_plain(v) && is_plain(similarity.head_parameter) &&
             are_plain(similarity.others);
  for (const ResolvedPosition& position : positions) {
    all = all && are_plain(position.tensors);
  }
  FusedOperator<CallArguments>::ForEachTensor(arguments,
                                              [&](size_t /*n*/, const OptionalTensor& tensor) {
                                                all = all && (!tensor || is_plain(*tensor));
                                              });
  return all;
}

// Whether only kernels read keys and values.
bool OnlyKernelsReadKeys(const ResolvedSimilarity& similarity,
                         const std::vector<ResolvedPosition>& positions,
                         const CallArguments& arguments) {
  using Role = PositionEntry::Role;
  const auto reads_keys = [](const ResolvedPosition& position) {
    const Role role = position.entry->role();
    return role == Role::kNorm || role == Role::kRotation || role == Role::kContent;
  };
  return similarity.entry->keeps_tokens && arguments.aggregation == "mean" &&
         std::none_of(positions.begin(), positions.end(), reads_keys);
}

}  // namespace

at::Tensor HeadFactor(const char* operation, const ResolvedSimilarity& similarity,
                      const at::Tensor& q, std::optional<double> scale) {
  const SimilarityEntry& entry = *similarity.entry;
  const int64_t head_dim = Concrete(q.sym_size(3));
  entry.CheckColumns(*similarity.component, head_dim, operation, ": head_dim of q is ");
  if (scale) CheckScale(operation, *scale);
  TORCH_CHECK_VALUE(!scale || entry.catalogue.takes_scale, operation,
                    ": scale applies to similarities such as dot, not to ", entry.catalogue.name);
  if (entry.head_parameter() != nullptr) return similarity.head_parameter;
  const double root = std::sqrt(static_cast<double>(head_dim));
  return HeadNumber(q, entry.catalogue.takes_scale ? scale.value_or(1.0 / root) : 1.0);
}

namespace {

Outputs RunComposition(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const ResolvedSimilarity& similarity,
                       const std::vector<ResolvedPosition>& positions,
                       const CallArguments& arguments, const Pages* pages, bool returns_lse) {
  // Skips autograd for the whole call; otherwise, each operator below would repeat this check.
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
  if (RecordsNothing(q, k, v, similarity, positions, arguments, /*plain=*/true)) {
    below_autograd.emplace();
  }
  return Composition(q, k, v, similarity, positions, arguments, pages).Run(returns_lse);
}

}  // namespace

Outputs Compose(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const ResolvedSimilarity& similarity,
                const std::vector<ResolvedPosition>& positions, const CallArguments& arguments,
                bool returns_lse) {
  return RunComposition(q, k, v, similarity, positions, arguments, /*pages=*/nullptr, returns_lse);
}

Outputs ComposePages(const at::Tensor& q, const Pages& pages, const ResolvedSimilarity& similarity,
                     const std::vector<ResolvedPosition>& positions, const CallArguments& arguments,
                     bool returns_lse) {
  const auto& [keys, values, table] = pages;
  if (pages.AreReadable() && OnlyKernelsReadKeys(similarity, positions, arguments) &&
      RecordsNothing(q, keys, values, similarity, positions, arguments, /*plain=*/false)) {
    return RunComposition(q, ShapeOfGathered(keys, table), ShapeOfGathered(values, table),
                          similarity, positions, arguments, &pages, returns_lse);
  }
  CallArguments without_pages = arguments;
  without_pages.page_table = std::nullopt;
  return Compose(q, GatherPages(keys, table), GatherPages(values, table), similarity, positions,
                 without_pages, returns_lse);
}

}  // namespace gnomon
