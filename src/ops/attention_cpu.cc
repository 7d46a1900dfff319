// The CPU and Meta kernels of attention_forward and attention_backward.
#include <ATen/ATen.h>
#include <gnomon/attention.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "core/grid_layout.h"
#include "ops/executor.h"
#include "ops/kernel_arguments.h"
#include "ops/operators.h"

namespace gnomon {
namespace {

void Expect(const char* name, const OptionalTensor& tensor, at::IntArrayRef sizes,
            at::ScalarType dtype) {
  ExpectTensor("gnomon.attention", name, tensor, sizes, dtype);
}

// The operator's arguments with the last axis of each made contiguous, which keeps the tensors
// alive that the views of Input() point into.
struct Arguments {
  Arguments(const at::Tensor& x_in, const at::Tensor& y_in, const at::Tensor& v_in,
            const OptionalTensor& row_scalars_in, const OptionalTensor& column_scalars_in,
            const OptionalTensor& head_scalars_in, const at::Tensor& factor_in,
            const OptionalTensor& bias_in, const OptionalTensor& key_starts_in,
            const OptionalTensor& key_lengths_in, const OptionalTensor& query_offsets_in,
            const OptionalTensor& query_segments_in, const OptionalTensor& key_segments_in,
            std::string_view function_name, c10::SymInt query_offset_in, OptionalSymInt left,
            OptionalSymInt right, at::OptionalSymIntArrayRef grid)
      : query_offset(query_offset_in.guard_int(__FILE__, __LINE__)) {
    Translate([&] { function = &FindPairFunction(function_name); });
    TORCH_CHECK_VALUE(x_in.dim() == 4 && y_in.dim() == 4 && v_in.dim() == 4,
                      "gnomon.attention: x has shape ", x_in.sizes(), ", y ", y_in.sizes(),
                      " and v ", v_in.sizes(), "; expected four axes each");
    shape = {x_in.size(0), x_in.size(1), y_in.size(1), x_in.size(2),
             y_in.size(2), x_in.size(3), v_in.size(3)};
    const AttentionShape& n = shape;
    const at::ScalarType dtype = x_in.scalar_type();
    Expect("y", y_in, {n.batch, n.key_heads, n.keys, n.dim}, dtype);
    Expect("v", v_in, {n.batch, n.key_heads, n.keys, n.value_dim}, dtype);
    Expect("row_scalars", row_scalars_in, {function->row_scalars, n.batch, n.heads, n.queries},
           dtype);
    Expect("column_scalars", column_scalars_in,
           {function->column_scalars, n.batch, n.key_heads, n.keys}, dtype);
    Expect("head_scalars", head_scalars_in, {function->head_scalars, n.heads}, dtype);
    Expect("factor", factor_in, {n.heads}, dtype);
    const bool per_batch = bias_in && bias_in->dim() == 3 && bias_in->size(0) != 1;
    if (grid) Translate([&] { layout.emplace(Concrete(*grid), n.queries, n.keys); });
    const int64_t entries =
        layout ? layout->table_size() : std::max<int64_t>(n.queries + n.keys - 1, 0);
    Expect("bias", bias_in, {per_batch ? n.batch : 1, n.heads, entries}, dtype);
    Expect("key_starts", key_starts_in, {n.batch}, at::kLong);
    Expect("key_lengths", key_lengths_in, {n.batch}, at::kLong);
    Expect("query_offset", query_offsets_in, {n.batch}, at::kLong);
    Expect("query_segments", query_segments_in, {n.batch, n.queries}, at::kLong);
    Expect("key_segments", key_segments_in, {n.batch, n.keys}, at::kLong);

    x = WithRows(x_in);
    y = WithRows(y_in);
    v = WithRows(v_in);
    row_scalars = Contiguous(row_scalars_in);
    column_scalars = Contiguous(column_scalars_in);
    head_scalars = Contiguous(head_scalars_in);
    factor = factor_in.contiguous();
    bias = Contiguous(bias_in);
    key_starts = KeyBounds("key_starts", key_starts_in);
    key_lengths = KeyBounds("key_lengths", key_lengths_in);
    query_offsets = Contiguous(query_offsets_in);
    query_segments = SegmentIds("query_segments", query_segments_in);
    key_segments = SegmentIds("key_segments", key_segments_in);
    if (query_segments.defined()) mask.query_segments = query_segments.const_data_ptr<int32_t>();
    if (key_segments.defined()) mask.key_segments = key_segments.const_data_ptr<int32_t>();
    if (left) mask.left = left->guard_int(__FILE__, __LINE__);
    if (right) mask.right = right->guard_int(__FILE__, __LINE__);
    if (key_starts.defined()) mask.key_starts = key_starts.const_data_ptr<int64_t>();
    if (key_lengths.defined()) mask.key_lengths = key_lengths.const_data_ptr<int64_t>();
  }

  static std::vector<int64_t> Concrete(c10::SymIntArrayRef sizes) {
    std::vector<int64_t> concrete;
    for (const c10::SymInt& size : sizes) concrete.push_back(size.guard_int(__FILE__, __LINE__));
    return concrete;
  }

  at::Tensor KeyBounds(const char* name, const OptionalTensor& bounds) const {
    if (!bounds) return {};
    const at::Tensor contiguous = bounds->contiguous();
    const int64_t* values = contiguous.const_data_ptr<int64_t>();
    for (int64_t b = 0; b < contiguous.numel(); ++b) {
      TORCH_CHECK_VALUE(values[b] >= 0 && values[b] <= y.size(2), "gnomon.attention: ", name, "[",
                        b, "] is ", values[b], "; expected 0 to Lk = ", y.size(2));
    }
    return contiguous;
  }

  static at::Tensor SegmentIds(const char* name, const OptionalTensor& segments) {
    if (!segments) return {};
    at::Tensor ids = segments->to(at::kInt).contiguous();
    TORCH_CHECK_VALUE(ids.to(at::kLong).equal(*segments), "gnomon.attention: ", name,
                      " has numbers beyond int32");
    return ids;
  }

  template <class T>
  static View<const T> Rows(const at::Tensor& tensor) {
    return {tensor.const_data_ptr<T>(), {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
  }

  template <class T>
  AttentionInput<T> Input() const {
    AttentionInput<T> input;
    input.shape = shape;
    input.x = Rows<T>(x);
    input.y = Rows<T>(y);
    input.v = Rows<T>(v);
    input.row_scalars = Data<T>(row_scalars);
    input.column_scalars = Data<T>(column_scalars);
    input.head_scalars = Data<T>(head_scalars);
    input.factor = Data<T>(factor);
    input.bias.table = Data<T>(bias);
    input.bias.batch_stride = BiasBatchStride();
    input.bias.layout = layout ? &*layout : nullptr;
    input.mask = mask;
    input.query_offset = query_offset;
    input.query_offsets = Data<int64_t>(query_offsets);
    return input;
  }

  int64_t BiasBatchStride() const {
    return bias.defined() && bias.size(0) > 1 ? bias.size(1) * bias.size(2) : 0;
  }

  // No pair of a query and a key.
  bool empty() const { return shape.batch * shape.heads * shape.queries * shape.keys == 0; }

  at::Tensor x, y, v, row_scalars, column_scalars, head_scalars, factor, bias, key_starts,
      key_lengths, query_offsets, query_segments, key_segments;
  const PairFunction* function;
  AttentionShape shape;
  Mask mask;
  int64_t query_offset;
  std::optional<GridLayout> layout;
};

template <class T>
View<T> MutableRows(at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {tensor.data_ptr<T>(), {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
}

template <class T>
void RunForward(const Arguments& arguments, at::Tensor& o, at::Tensor& lse) {
  const AttentionOutput<T> output{MutableRows<T>(o), MutableData<T>(lse)};
  Translate([&] {
    AttentionForward(*arguments.function, arguments.Input<T>(), output, TorchExecutor());
  });
}

std::tuple<at::Tensor, at::Tensor> ForwardCpu(
    const at::Tensor& x, const at::Tensor& y, const at::Tensor& v,
    const OptionalTensor& row_scalars, const OptionalTensor& column_scalars,
    const OptionalTensor& head_scalars, const at::Tensor& factor, const OptionalTensor& bias,
    const OptionalTensor& key_starts, const OptionalTensor& key_lengths,
    const OptionalTensor& query_offsets, const OptionalTensor& query_segments,
    const OptionalTensor& key_segments, std::string_view function, c10::SymInt query_offset,
    OptionalSymInt left, OptionalSymInt right, at::OptionalSymIntArrayRef grid) {
  const Arguments arguments(x, y, v, row_scalars, column_scalars, head_scalars, factor, bias,
                            key_starts, key_lengths, query_offsets, query_segments, key_segments,
                            function, std::move(query_offset), std::move(left), std::move(right),
                            grid);
  const AttentionShape& n = arguments.shape;
  at::Tensor o = at::empty({n.batch, n.heads, n.queries, n.value_dim}, x.options());
  at::Tensor lse = at::empty({n.batch, n.heads, n.queries}, x.options());
  if (arguments.empty()) {
    o.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
  } else if (x.scalar_type() == at::kDouble) {
    RunForward<double>(arguments, o, lse);
  } else {
    RunForward<float>(arguments, o, lse);
  }
  return {o, lse};
}

Gradients AsTuple(const std::vector<at::Tensor>& g) {
  return {g[0], g[1], g[2], g[3], g[4], g[5], g[6], g[7]};
}

template <class T>
void RunBackward(const Arguments& arguments, const at::Tensor& d_o, const at::Tensor& d_lse,
                 const at::Tensor& o, const at::Tensor& lse, std::vector<at::Tensor>& gradients) {
  const AttentionBackwardInput<T> saved{Arguments::Rows<T>(o), lse.const_data_ptr<T>(),
                                        Arguments::Rows<T>(d_o), Data<T>(d_lse)};
  AttentionGradient<T> gradient;
  gradient.x = MutableRows<T>(gradients[0]);
  gradient.y = MutableRows<T>(gradients[1]);
  gradient.v = MutableRows<T>(gradients[2]);
  gradient.row_scalars = MutableData<T>(gradients[3]);
  gradient.column_scalars = MutableData<T>(gradients[4]);
  gradient.head_scalars = MutableData<T>(gradients[5]);
  gradient.factor = MutableData<T>(gradients[6]);
  gradient.bias.table = MutableData<T>(gradients[7]);
  gradient.bias.batch_stride = arguments.BiasBatchStride();
  gradient.bias.layout = arguments.layout ? &*arguments.layout : nullptr;
  Translate([&] {
    AttentionBackward(*arguments.function, arguments.Input<T>(), saved, gradient, TorchExecutor());
  });
}

Gradients BackwardCpu(const at::Tensor& d_o, const OptionalTensor& d_lse, const at::Tensor& o,
                      const at::Tensor& lse, const at::Tensor& x, const at::Tensor& y,
                      const at::Tensor& v, const OptionalTensor& row_scalars,
                      const OptionalTensor& column_scalars, const OptionalTensor& head_scalars,
                      const at::Tensor& factor, const OptionalTensor& bias,
                      const OptionalTensor& key_starts, const OptionalTensor& key_lengths,
                      const OptionalTensor& query_offsets, const OptionalTensor& query_segments,
                      const OptionalTensor& key_segments, std::string_view function,
                      c10::SymInt query_offset, OptionalSymInt left, OptionalSymInt right,
                      at::OptionalSymIntArrayRef grid, std::array<bool, kGradients> needed) {
  const Arguments arguments(x, y, v, row_scalars, column_scalars, head_scalars, factor, bias,
                            key_starts, key_lengths, query_offsets, query_segments, key_segments,
                            function, std::move(query_offset), std::move(left), std::move(right),
                            grid);
  const AttentionShape& n = arguments.shape;
  for (const auto& [name, tensor] : {std::pair("d_o", &d_o), std::pair("o", &o)}) {
    Expect(name, *tensor, {n.batch, n.heads, n.queries, n.value_dim}, x.scalar_type());
  }
  Expect("d_lse", d_lse, {n.batch, n.heads, n.queries}, x.scalar_type());
  Expect("lse", lse, {n.batch, n.heads, n.queries}, x.scalar_type());
  const bool empty = arguments.empty();
  std::vector<at::Tensor> gradients = MakeGradients<kGradients>(
      {x, y, v, row_scalars, column_scalars, head_scalars, factor, bias}, needed,
      [&](const at::Tensor& of) {
        return empty ? at::zeros(of.sizes(), of.options()) : at::empty(of.sizes(), of.options());
      });
  if (!empty) {
    const at::Tensor d_o_rows = WithRows(d_o);
    const at::Tensor d_lse_rows = Contiguous(d_lse);
    if (x.scalar_type() == at::kDouble) {
      RunBackward<double>(arguments, d_o_rows, d_lse_rows, WithRows(o), lse.contiguous(),
                          gradients);
    } else {
      RunBackward<float>(arguments, d_o_rows, d_lse_rows, WithRows(o), lse.contiguous(), gradients);
    }
  }
  return AsTuple(gradients);
}

std::tuple<at::Tensor, at::Tensor> ForwardMeta(
    const at::Tensor& x, const at::Tensor& /*y*/, const at::Tensor& v,
    const OptionalTensor& /*row_scalars*/, const OptionalTensor& /*column_scalars*/,
    const OptionalTensor& /*head_scalars*/, const at::Tensor& /*factor*/,
    const OptionalTensor& /*bias*/, const OptionalTensor& /*key_starts*/,
    const OptionalTensor& /*key_lengths*/, const OptionalTensor& /*query_offsets*/,
    const OptionalTensor& /*query_segments*/, const OptionalTensor& /*key_segments*/,
    std::string_view /*function*/, c10::SymInt /*query_offset*/, OptionalSymInt /*left*/,
    OptionalSymInt /*right*/, at::OptionalSymIntArrayRef /*grid*/) {
  return {
      at::empty_symint({x.sym_size(0), x.sym_size(1), x.sym_size(2), v.sym_size(3)}, x.options()),
      at::empty_symint({x.sym_size(0), x.sym_size(1), x.sym_size(2)}, x.options())};
}

Gradients BackwardMeta(const at::Tensor& /*d_o*/, const OptionalTensor& /*d_lse*/,
                       const at::Tensor& /*o*/, const at::Tensor& /*lse*/, const at::Tensor& x,
                       const at::Tensor& y, const at::Tensor& v, const OptionalTensor& row_scalars,
                       const OptionalTensor& column_scalars, const OptionalTensor& head_scalars,
                       const at::Tensor& factor, const OptionalTensor& bias,
                       const OptionalTensor& /*key_starts*/, const OptionalTensor& /*key_lengths*/,
                       const OptionalTensor& /*query_offsets*/,
                       const OptionalTensor& /*query_segments*/,
                       const OptionalTensor& /*key_segments*/, std::string_view /*function*/,
                       c10::SymInt /*query_offset*/, OptionalSymInt /*left*/,
                       OptionalSymInt /*right*/, at::OptionalSymIntArrayRef /*grid*/,
                       std::array<bool, kGradients> needed) {
  return AsTuple(MakeGradients<kGradients>(
      {x, y, v, row_scalars, column_scalars, head_scalars, factor, bias}, needed,
      [](const at::Tensor& of) { return at::empty_symint(of.sym_sizes(), of.options()); }));
}

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, CPU, m) {
  m.impl("attention_forward", ForwardCpu);
  m.impl("attention_backward", BackwardCpu);
}

TORCH_LIBRARY_IMPL(gnomon, Meta, m) {
  m.impl("attention_forward", ForwardMeta);
  m.impl("attention_backward", BackwardMeta);
}

}  // namespace gnomon
