// The arguments, gradients and views of graph attention's CPU kernels.
#ifndef GNOMON_OPS_GRAPH_GRAPH_CALL_H_
#define GNOMON_OPS_GRAPH_GRAPH_CALL_H_

#include <ATen/ATen.h>
#include <gnomon/graph.h>

#include "ops/graph/graph_checks.h"
#include "ops/operators/graph_operators.h"
#include "ops/operators/kernel_arguments.h"

namespace gnomon {

// Views (nodes, heads, columns) as (1, heads, nodes, columns).
template <class T>
View<const T> Nodes(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), {0, tensor.stride(1), tensor.stride(0)}};
}

template <class T>
View<T> MutableNodes(at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {tensor.data_ptr<T>(), {0, tensor.stride(1), tensor.stride(0)}};
}

// The operator's arguments, with contiguous last axes. Owns the tensors to which the views in
// Input() point.
struct GraphCall {
  explicit GraphCall(const GraphArguments& a) {
    function = &CheckedGraph(a, lengths);
    shape.heads = *lengths['H'];
    shape.key_heads = *lengths['G'];
    shape.queries = *lengths['N'];
    shape.keys = *lengths['M'];
    shape.edges = *lengths['E'];
    shape.dim = *lengths['D'];
    shape.value_dim = *lengths['V'];
    const at::ScalarType dtype = a.x.scalar_type();
    TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble, GraphArguments::kOperation,
                     ": x has dtype ", dtype, "; expected float32 or float64");
    x = WithRows(a.x);
    y = WithRows(a.y);
    v = WithRows(a.v);
    row_scalars = Contiguous(a.row_scalars);
    column_scalars = Contiguous(a.column_scalars);
    head_scalars = Contiguous(a.head_scalars);
    factor = a.factor.contiguous();
    edge_bias = Contiguous(a.edge_bias);
    dropout = DropoutOf(a);
    indptr = a.indptr.contiguous();
    indices = a.indices.contiguous();
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
    input.edge_bias = Data<T>(edge_bias);
    input.dropout = dropout;
    return input;
  }

  at::Tensor x, y, v, row_scalars, column_scalars, head_scalars, factor, edge_bias, indptr, indices;
  const PairFunction* function;
  AxisLengths<int64_t> lengths;
  GraphShape shape;
  Dropout dropout;
};

// Views of all gradients.
template <class T, class Gradients>
GraphGradient<T> GradientViews(Gradients& of) {
  GraphGradient<T> gradient;
  gradient.x = MutableNodes<T>(of("x"));
  gradient.y = MutableNodes<T>(of("y"));
  gradient.v = MutableNodes<T>(of("v"));
  gradient.row_scalars = MutableData<T>(of("row_scalars"));
  gradient.column_scalars = MutableData<T>(of("column_scalars"));
  gradient.head_scalars = MutableData<T>(of("head_scalars"));
  gradient.factor = MutableData<T>(of("factor"));
  gradient.edge_bias = MutableData<T>(of("edge_bias"));
  if constexpr (requires { of.Done(); }) of.Done();
  return gradient;
}

}  // namespace gnomon

#endif  // GNOMON_OPS_GRAPH_GRAPH_CALL_H_
