// The CPU and Meta kernels of graph_forward and graph_backward.
#include <ATen/ATen.h>
#include <gnomon/graph.h>
#include <torch/library.h>

#include <vector>

#include "ops/attention/executor.h"
#include "ops/attention/kernel_arguments.h"
#include "ops/graph/graph_operators.h"

namespace gnomon {
namespace {

void Expect(const char* name, const OptionalTensor& tensor, at::IntArrayRef sizes,
            at::ScalarType dtype) {
  ExpectTensor("gnomon.graph_attention", name, tensor, sizes, dtype);
}

// The heads and nodes of (nodes, heads, columns).
template <class T>
View<const T> Nodes(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), {0, tensor.stride(1), tensor.stride(0)}};
}

template <class T>
View<T> MutableNodes(at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {tensor.data_ptr<T>(), {0, tensor.stride(1), tensor.stride(0)}};
}

// The operator's arguments with the last axis of each made contiguous, which keeps the tensors
// alive that the views of Input() point into.
struct Arguments {
  Arguments(const at::Tensor& x_in, const at::Tensor& y_in, const at::Tensor& v_in,
            const OptionalTensor& row_scalars_in, const OptionalTensor& column_scalars_in,
            const OptionalTensor& head_scalars_in, const at::Tensor& factor_in,
            const at::Tensor& indptr_in, const at::Tensor& indices_in,
            std::string_view function_name) {
    Translate([&] { function = &FindPairFunction(function_name); });
    TORCH_CHECK_VALUE(x_in.dim() == 3 && y_in.dim() == 3 && v_in.dim() == 3,
                      "gnomon.graph_attention: x has shape ", x_in.sizes(), ", y ", y_in.sizes(),
                      " and v ", v_in.sizes(), "; expected three axes each");
    TORCH_CHECK_VALUE(indices_in.dim() == 1, "gnomon.graph_attention: indices has shape ",
                      indices_in.sizes(), "; expected one axis");
    shape.heads = x_in.size(1);
    shape.key_heads = y_in.size(1);
    shape.queries = x_in.size(0);
    shape.keys = y_in.size(0);
    shape.edges = indices_in.size(0);
    shape.dim = x_in.size(2);
    shape.value_dim = v_in.size(2);
    const GraphShape& n = shape;
    const at::ScalarType dtype = x_in.scalar_type();
    TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble,
                     "gnomon.graph_attention: x has dtype ", dtype,
                     "; expected float32 or float64");
    Expect("y", y_in, {n.keys, n.key_heads, n.dim}, dtype);
    Expect("v", v_in, {n.keys, n.key_heads, n.value_dim}, dtype);
    Expect("row_scalars", row_scalars_in, {function->row_scalars, n.heads, n.queries}, dtype);
    Expect("column_scalars", column_scalars_in, {function->column_scalars, n.key_heads, n.keys},
           dtype);
    Expect("head_scalars", head_scalars_in, {function->head_scalars, n.heads}, dtype);
    Expect("factor", factor_in, {n.heads}, dtype);
    Expect("indptr", indptr_in, {n.queries + 1}, at::kLong);
    Expect("indices", indices_in, {n.edges}, at::kLong);

    x = WithRows(x_in);
    y = WithRows(y_in);
    v = WithRows(v_in);
    row_scalars = Contiguous(row_scalars_in);
    column_scalars = Contiguous(column_scalars_in);
    head_scalars = Contiguous(head_scalars_in);
    factor = factor_in.contiguous();
    indptr = indptr_in.contiguous();
    indices = indices_in.contiguous();
  }

  template <class T>
  GraphInput<T> Input() const {
    GraphInput<T> input;
    input.shape = shape;
    input.indptr = indptr.const_data_ptr<int64_t>();
    input.indices = indices.const_data_ptr<int64_t>();
    input.x = Nodes<T>(x);
    input.y = Nodes<T>(y);
    input.v = Nodes<T>(v);
    input.row_scalars = Data<T>(row_scalars);
    input.column_scalars = Data<T>(column_scalars);
    input.head_scalars = Data<T>(head_scalars);
    input.factor = Data<T>(factor);
    return input;
  }

  at::Tensor x, y, v, row_scalars, column_scalars, head_scalars, factor, indptr, indices;
  const PairFunction* function;
  GraphShape shape;
};

template <class T>
void RunForward(const Arguments& arguments, at::Tensor& o, at::Tensor& lse,
                at::Tensor& statistics) {
  Translate([&] {
    GraphForward(*arguments.function, arguments.Input<T>(),
                 {MutableNodes<T>(o), MutableData<T>(lse), MutableData<T>(statistics)},
                 TorchExecutor());
  });
}

Outputs ForwardCpu(const at::Tensor& x, const at::Tensor& y, const at::Tensor& v,
                   const OptionalTensor& row_scalars, const OptionalTensor& column_scalars,
                   const OptionalTensor& head_scalars, const at::Tensor& factor,
                   const at::Tensor& indptr, const at::Tensor& indices, std::string_view function) {
  const Arguments arguments(x, y, v, row_scalars, column_scalars, head_scalars, factor, indptr,
                            indices, function);
  const GraphShape& n = arguments.shape;
  at::Tensor o = at::empty({n.queries, n.heads, n.value_dim}, x.options());
  at::Tensor lse = at::empty({n.queries, n.heads}, x.options());
  at::Tensor statistics = at::empty({3, n.queries, n.heads}, x.options());
  if (x.scalar_type() == at::kDouble) {
    RunForward<double>(arguments, o, lse, statistics);
  } else {
    RunForward<float>(arguments, o, lse, statistics);
  }
  return {o, lse, statistics};
}

GraphGradients AsTuple(const std::vector<at::Tensor>& g) {
  return {g[0], g[1], g[2], g[3], g[4], g[5], g[6]};
}

template <class T>
void RunBackward(const Arguments& arguments, const at::Tensor& d_o, const at::Tensor& d_lse,
                 const at::Tensor& o, const at::Tensor& lse, const at::Tensor& statistics,
                 std::vector<at::Tensor>& gradients) {
  const GraphBackwardInput<T> saved{Nodes<T>(o), lse.const_data_ptr<T>(), Nodes<T>(d_o),
                                    Data<T>(d_lse), statistics.const_data_ptr<T>()};
  GraphGradient<T> gradient;
  gradient.x = MutableNodes<T>(gradients[0]);
  gradient.y = MutableNodes<T>(gradients[1]);
  gradient.v = MutableNodes<T>(gradients[2]);
  gradient.row_scalars = MutableData<T>(gradients[3]);
  gradient.column_scalars = MutableData<T>(gradients[4]);
  gradient.head_scalars = MutableData<T>(gradients[5]);
  gradient.factor = MutableData<T>(gradients[6]);
  Translate([&] {
    GraphBackward(*arguments.function, arguments.Input<T>(), saved, gradient, TorchExecutor());
  });
}

GraphGradients BackwardCpu(const at::Tensor& d_o, const OptionalTensor& d_lse, const at::Tensor& o,
                           const at::Tensor& lse, const at::Tensor& statistics, const at::Tensor& x,
                           const at::Tensor& y, const at::Tensor& v,
                           const OptionalTensor& row_scalars, const OptionalTensor& column_scalars,
                           const OptionalTensor& head_scalars, const at::Tensor& factor,
                           const at::Tensor& indptr, const at::Tensor& indices,
                           std::string_view function, std::array<bool, kGraphGradients> needed) {
  const Arguments arguments(x, y, v, row_scalars, column_scalars, head_scalars, factor, indptr,
                            indices, function);
  const GraphShape& n = arguments.shape;
  for (const auto& [name, tensor] : {std::pair("d_o", &d_o), std::pair("o", &o)}) {
    Expect(name, *tensor, {n.queries, n.heads, n.value_dim}, x.scalar_type());
  }
  Expect("d_lse", d_lse, {n.queries, n.heads}, x.scalar_type());
  Expect("lse", lse, {n.queries, n.heads}, x.scalar_type());
  Expect("statistics", statistics, {3, n.queries, n.heads}, x.scalar_type());
  std::vector<at::Tensor> gradients = MakeGradients<kGraphGradients>(
      {x, y, v, row_scalars, column_scalars, head_scalars, factor}, needed,
      [](const at::Tensor& of) { return at::empty(of.sizes(), of.options()); });
  const at::Tensor d_o_rows = WithRows(d_o);
  const at::Tensor o_rows = WithRows(o);
  const at::Tensor d_lse_rows = Contiguous(d_lse);
  const at::Tensor lse_rows = lse.contiguous();
  const at::Tensor statistics_rows = statistics.contiguous();
  if (x.scalar_type() == at::kDouble) {
    RunBackward<double>(arguments, d_o_rows, d_lse_rows, o_rows, lse_rows, statistics_rows,
                        gradients);
  } else {
    RunBackward<float>(arguments, d_o_rows, d_lse_rows, o_rows, lse_rows, statistics_rows,
                       gradients);
  }
  return AsTuple(gradients);
}

Outputs ForwardMeta(const at::Tensor& x, const at::Tensor& /*y*/, const at::Tensor& v,
                    const OptionalTensor& /*row_scalars*/, const OptionalTensor& /*column_scalars*/,
                    const OptionalTensor& /*head_scalars*/, const at::Tensor& /*factor*/,
                    const at::Tensor& /*indptr*/, const at::Tensor& /*indices*/,
                    std::string_view /*function*/) {
  return {at::empty_symint({x.sym_size(0), x.sym_size(1), v.sym_size(2)}, x.options()),
          at::empty_symint({x.sym_size(0), x.sym_size(1)}, x.options()),
          at::empty_symint({3, x.sym_size(0), x.sym_size(1)}, x.options())};
}

GraphGradients BackwardMeta(const at::Tensor& /*d_o*/, const OptionalTensor& /*d_lse*/,
                            const at::Tensor& /*o*/, const at::Tensor& /*lse*/,
                            const at::Tensor& /*statistics*/, const at::Tensor& x,
                            const at::Tensor& y, const at::Tensor& v,
                            const OptionalTensor& row_scalars, const OptionalTensor& column_scalars,
                            const OptionalTensor& head_scalars, const at::Tensor& factor,
                            const at::Tensor& /*indptr*/, const at::Tensor& /*indices*/,
                            std::string_view /*function*/,
                            std::array<bool, kGraphGradients> needed) {
  return AsTuple(MakeGradients<kGraphGradients>(
      {x, y, v, row_scalars, column_scalars, head_scalars, factor}, needed,
      [](const at::Tensor& of) { return at::empty_symint(of.sym_sizes(), of.options()); }));
}

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, CPU, m) {
  m.impl("graph_forward", ForwardCpu);
  m.impl("graph_backward", BackwardCpu);
}

TORCH_LIBRARY_IMPL(gnomon, Meta, m) {
  m.impl("graph_forward", ForwardMeta);
  m.impl("graph_backward", BackwardMeta);
}

}  // namespace gnomon
