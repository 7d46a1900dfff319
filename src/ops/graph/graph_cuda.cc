// graph_forward and graph_backward on GPUs, based on the dense attention kernels. Each edge becomes
// one key: the keys are the nodes in `indices`, in edge order, and each query node attends to the
// keys of its own edges. A tile of pairs is computed if at least one of its pairs is an edge. Calls
// in float64, and forward-mode and second derivatives, run on the CPU.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>
#include <string_view>
#include <vector>

#include "cuda/attention.h"
#include "ops/graph/graph_checks.h"
#include "ops/operators/cuda_stream.h"
#include "ops/operators/graph_operators.h"
#include "ops/operators/kernel_arguments.h"
#include "ops/operators/on_cpu.h"

namespace gnomon {
namespace {

// The token rows of a tensor (nodes or edges, heads, columns).
Tokens NodeRows(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), {0, tensor.stride(1), tensor.stride(0)}};
}

cuda::Tensor MutableNodeRows(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return {};
  return {tensor.mutable_data_ptr(), {0, tensor.stride(1), tensor.stride(0)}};
}

// The operator's arguments, with one copy of the key and the value for each edge.
class EdgeAttention {
 public:
  explicit EdgeAttention(const GraphArguments& a) : indices_(a.indices) {
    function_ = &CheckedGraph(a, lengths_);
    x_ = WithRows(a.x);
    y_ = WithRows(a.y.index_select(0, indices_));
    v_ = WithRows(a.v.index_select(0, indices_));
    row_scalars_ = Contiguous(a.row_scalars);
    if (a.column_scalars) {
      column_scalars_ = a.column_scalars->index_select(2, indices_).contiguous();
    }
    head_scalars_ = Contiguous(a.head_scalars);
    factor_ = a.factor.contiguous();
    if (a.edge_bias) edge_bias_ = a.edge_bias->t().contiguous();
    indptr_ = a.indptr.contiguous();

    TORCH_CHECK_NOT_IMPLEMENTED(a.x.scalar_type() == at::kFloat, kGraphAttention, ": ",
                                "q has dtype ", a.x.scalar_type(), " on a GPU; expected float32");
    constexpr int64_t kMostEdges = std::numeric_limits<int>::max();
    TORCH_CHECK_NOT_IMPLEMENTED(*lengths_['E'] <= kMostEdges, kGraphAttention, ": indices has ",
                                *lengths_['E'], " edges; expected at most ", kMostEdges,
                                " on a GPU");
    input_.shape.batch = 1;
    input_.shape.heads = *lengths_['H'];
    input_.shape.key_heads = *lengths_['G'];
    input_.shape.queries = *lengths_['N'];
    input_.shape.keys = *lengths_['E'];
    input_.shape.dim = *lengths_['D'];
    input_.shape.value_dim = *lengths_['V'];
    input_.x = NodeRows(x_);
    input_.y = NodeRows(y_);
    input_.v = NodeRows(v_);
    input_.row_scalars = Data<float>(row_scalars_);
    input_.column_scalars = Data<float>(column_scalars_);
    input_.head_scalars = Data<float>(head_scalars_);
    input_.factor = Data<float>(factor_);
    // Each edge has a separate key here, so the edge bias is a key bias, and dropout uses the index
    // of the edge as the column.
    input_.key_bias = Data<float>(edge_bias_);
    input_.dropout = DropoutOf(a);
    input_.key_rows = indptr_.const_data_ptr<int64_t>();
    const std::string problem = cuda::Unsupported(*function_, input_);
    TORCH_CHECK_NOT_IMPLEMENTED(problem.empty(), kGraphAttention, ": ", problem);
  }

  const PairFunction& function() const { return *function_; }
  const cuda::Input& input() const { return input_; }
  AxisLengths<int64_t>& lengths() { return lengths_; }
  bool empty() const {
    const AttentionShape& n = input_.shape;
    return n.heads == 0 || n.queries == 0 || n.keys == 0;
  }

  // Sums the per-edge gradients of keys and values into their nodes. The order of the sum is fixed,
  // because index_put_ on a GPU sorts repeated indices instead of using atomic additions.
  void AddToNodes(const at::Tensor& of_edges, at::Tensor& of_nodes) const {
    if (of_edges.defined()) of_nodes.zero_().index_put_({indices_}, of_edges, /*accumulate=*/true);
  }

 private:
  at::Tensor x_, y_, v_, row_scalars_, column_scalars_, head_scalars_, factor_, edge_bias_, indptr_,
      indices_;
  const PairFunction* function_ = nullptr;
  AxisLengths<int64_t> lengths_;
  cuda::Input input_;
};

Outputs ForwardOn(const GraphArguments& a, cuda::Backend& backend) {
  const EdgeAttention edges(a);
  Outputs outputs = EmptyOutputs(a);
  auto& [o, lse, statistics] = outputs;
  if (edges.empty()) {
    o.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
    statistics.zero_();
    return outputs;
  }
  const at::Tensor lse_of_heads = at::empty_like(lse.t(), at::MemoryFormat::Contiguous);
  const at::Tensor statistics_of_heads =
      at::empty_like(statistics.transpose(1, 2), at::MemoryFormat::Contiguous);
  cuda::Output output;
  output.o = MutableNodeRows(o);
  output.lse = lse_of_heads.mutable_data_ptr<float>();
  output.statistics = statistics_of_heads.mutable_data_ptr<float>();
  cuda::Forward(edges.function(), edges.input(), output, backend);
  lse.copy_(lse_of_heads.t());
  statistics.copy_(statistics_of_heads.transpose(1, 2));
  return outputs;
}

std::vector<at::Tensor> BackwardOn(const SavedOutputs& outputs, const GraphArguments& a,
                                   const GraphOperator::Needed& needed, cuda::Backend& backend) {
  EdgeAttention edges(a);
  CheckSaved(outputs, a, edges.lengths());
  std::vector<at::Tensor> gradients = EmptyGradients(outputs, a, needed);
  if (edges.empty()) {
    for (at::Tensor& gradient : gradients) gradient.zero_();
    return gradients;
  }
  const at::Tensor o = WithRows(outputs.o);
  const at::Tensor d_o = WithRows(outputs.d_o);
  const at::Tensor d_lse = outputs.d_lse ? outputs.d_lse->t().contiguous() : at::Tensor();
  const at::Tensor statistics = outputs.statistics.transpose(1, 2).contiguous();
  NamedGradients<GraphArguments> of(gradients);
  // A tensor for the per-edge gradient of the named argument; undefined if this gradient is not
  // needed.
  const auto of_edges = [&](std::string_view name, at::IntArrayRef sizes) {
    return of(name).numel() == 0 ? at::Tensor() : at::empty(sizes, a.x.options());
  };
  const AttentionShape& n = edges.input().shape;
  const at::Tensor d_y = of_edges("y", {n.keys, n.key_heads, n.dim});
  const at::Tensor d_v = of_edges("v", {n.keys, n.key_heads, n.value_dim});
  const at::Tensor d_column =
      of_edges("column_scalars", {edges.function().column_scalars, n.key_heads, n.keys});
  const cuda::Saved saved{NodeRows(o), nullptr, NodeRows(d_o), Data<float>(d_lse),
                          statistics.const_data_ptr<float>()};
  cuda::Gradient gradient;
  gradient.x = MutableNodeRows(of("x"));
  gradient.y = MutableNodeRows(d_y);
  gradient.v = MutableNodeRows(d_v);
  gradient.row_scalars = MutableData<float>(of("row_scalars"));
  if (d_column.defined()) gradient.column_scalars = d_column.mutable_data_ptr<float>();
  gradient.head_scalars = MutableData<float>(of("head_scalars"));
  gradient.factor = MutableData<float>(of("factor"));
  const at::Tensor d_edge_bias = of_edges("edge_bias", {n.heads, n.keys});
  if (d_edge_bias.defined()) gradient.key_bias = d_edge_bias.mutable_data_ptr<float>();
  of.Done();
  cuda::Backward(edges.function(), edges.input(), saved, gradient, backend);
  edges.AddToNodes(d_y, of("y"));
  edges.AddToNodes(d_v, of("v"));
  if (d_edge_bias.defined()) of("edge_bias").copy_(d_edge_bias.t());
  if (d_column.defined()) {
    at::Tensor by_node = of("column_scalars").permute({2, 0, 1});
    edges.AddToNodes(d_column.permute({2, 0, 1}), by_node);
  }
  return gradients;
}

Outputs ForwardCuda(const GraphArguments& a) {
  if (a.x.scalar_type() == at::kDouble) return OnCpu<GraphArguments>::Forward(a);
  return OnCudaStream(kGraphAttention, a.x,
                      [&](cuda::Backend& backend) { return ForwardOn(a, backend); });
}

std::vector<at::Tensor> BackwardCuda(const SavedOutputs& saved, const GraphArguments& a,
                                     const GraphOperator::Needed& needed) {
  if (a.x.scalar_type() == at::kDouble) return OnCpu<GraphArguments>::Backward(saved, a, needed);
  return OnCudaStream(kGraphAttention, a.x, [&](cuda::Backend& backend) {
    return BackwardOn(saved, a, needed, backend);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, CUDA, m) {
  m.impl("graph_forward", &GraphOperator::RunForward<ForwardCuda>);
  m.impl("graph_backward", &GraphOperator::RunBackward<BackwardCuda>);
  m.impl("graph_jvp", &GraphOperator::RunJvp<OnCpu<GraphArguments>::Jvp>);
  m.impl("graph_backward_jvp", &GraphOperator::RunBackwardJvp<OnCpu<GraphArguments>::BackwardJvp>);
}

}  // namespace gnomon
