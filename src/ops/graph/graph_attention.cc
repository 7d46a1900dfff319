// Attention over a graph as a composition of operators: the similarity maps the tokens, and
// graph_forward computes the attention.
#include "ops/graph/graph_attention.h"

#include <ATen/ATen.h>
#include <gnomon/torch/graph_attention.h>

#include "ops/attention/attention.h"
#include "ops/attention/call_checks.h"
#include "ops/attention/compose.h"
#include "ops/attention/options.h"
#include "ops/operators/graph_operators.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

void CheckNodes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  for (const auto& [name, tensor] : {std::pair("q", &q), std::pair("k", &k), std::pair("v", &v)}) {
    CheckTokenType(kGraphAttention, name, *tensor, q);
    TORCH_CHECK_VALUE(tensor->dim() == 3, kGraphAttention, ": ", name, " has shape ",
                      tensor->sym_sizes(), "; expected three axes, (nodes, heads, head_dim)");
    TORCH_CHECK_VALUE(tensor->sym_size(2) >= 1, kGraphAttention, ": ", name, " has shape ",
                      tensor->sym_sizes(), "; expected head_dim >= 1");
  }
  TORCH_CHECK_VALUE(k.sym_size(2) == q.sym_size(2), kGraphAttention, ": k has shape ",
                    k.sym_sizes(), "; expected (Nk, Hkv, D) with D = ", q.sym_size(2), " as in q ",
                    q.sym_sizes());
  TORCH_CHECK_VALUE(v.sym_size(0) == k.sym_size(0) && v.sym_size(1) == k.sym_size(1),
                    kGraphAttention, ": v has shape ", v.sym_sizes(),
                    "; expected (Nk, Hkv, Dv) as in k ", k.sym_sizes());
  TORCH_CHECK_VALUE(
      k.sym_size(1) >= 1 && q.sym_size(1) % k.sym_size(1) == 0, kGraphAttention, ": q has ",
      q.sym_size(1), " heads and k has ", k.sym_size(1),
      "; expected the number of heads of q to be a multiple of the number of heads of k");
}

// Converts (nodes, heads, columns) to (1, heads, nodes, columns), and back.
at::Tensor AsBatch(const at::Tensor& nodes) { return nodes.transpose(0, 1).unsqueeze(0); }
at::Tensor AsNodes(const at::Tensor& batch) { return batch.squeeze(0).transpose(0, 1); }

// Expands (E,) or (E, H) to (E, H), in the compute dtype.
at::Tensor OfEdgesAndHeads(const at::Tensor& edge_bias, const at::Tensor& q,
                           const at::Tensor& indices) {
  const c10::SymInt edges = indices.sym_size(0);
  const c10::SymInt heads = q.sym_size(1);
  const bool of_all_heads = edge_bias.dim() == 1;
  TORCH_CHECK_VALUE((of_all_heads || (edge_bias.dim() == 2 && edge_bias.sym_size(1) == heads)) &&
                        edge_bias.sym_size(0) == edges,
                    kGraphAttention, ": edge_bias has shape ", edge_bias.sym_sizes(),
                    "; expected (E,) or (E, H) = (", edges, ", ", heads, ")");
  const at::Tensor bias = AsParameter(edge_bias, q, "gnomon.graph_attention: edge_bias");
  return (of_all_heads ? bias.unsqueeze(1) : bias).expand_symint({edges, heads});
}

// Removes the batch axis of (S, 1, heads, nodes).
OptionalTensor WithoutBatch(const at::Tensor& scalars) {
  if (!scalars.defined()) return std::nullopt;
  return scalars.squeeze(1);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> GraphAttentionOfSpecs(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& indptr,
    const at::Tensor& indices, const std::string& similarity, at::TensorList similarity_tensors,
    std::optional<double> scale, const OptionalTensor& edge_bias, double dropout,
    const OptionalTensor& seed) {
  const WithoutAutocast guard;
  CheckNodes(q, k, v);
  CheckIntegerType(kGraphAttention, "indptr", indptr, q);
  CheckIntegerType(kGraphAttention, "indices", indices, q);
  TORCH_CHECK_VALUE(indptr.dim() == 1 && indptr.sym_size(0) == q.sym_size(0) + 1, kGraphAttention,
                    ": indptr has shape ", indptr.sym_sizes(), "; expected (N + 1,) = (",
                    q.sym_size(0) + 1, ",)");
  TORCH_CHECK_VALUE(indices.dim() == 1, kGraphAttention, ": indices has shape ",
                    indices.sym_sizes(), "; expected one axis, (E,)");
  CheckDropout(kGraphAttention, dropout, seed);
  // Low-precision tokens are processed in float32; only the outputs are rounded.
  const at::ScalarType computing = ComputingType(q);
  const at::Tensor batch = AsBatch(q.to(computing));
  const ResolvedSimilarity resolved =
      ResolveSimilarity(kGraphAttention, similarity, similarity_tensors, batch);
  const Component& component = *resolved.component;
  const at::Tensor query = resolved.entry->WithHeightLast(component, batch);
  const at::Tensor key = resolved.entry->WithHeightLast(component, AsBatch(k.to(computing)));
  const at::Tensor factor = HeadFactor(kGraphAttention, resolved, query, scale);
  const MappedTokens tokens =
      resolved.entry->Mapped(component, query, key, {factor, resolved.others});
  GraphArguments call;
  call.x = AsNodes(tokens.x);
  call.y = AsNodes(tokens.y);
  call.v = v.to(computing);
  // If the query heads of a group map their shared keys differently, y has a separate key head for
  // each, and v must match.
  if (SizeOf(call.y, 1) != SizeOf(v, 1)) {
    call.v = call.v.repeat_interleave(SizeOf(call.y, 1) / SizeOf(v, 1), 1);
  }
  call.row_scalars = WithoutBatch(tokens.row_scalars);
  call.column_scalars = WithoutBatch(tokens.column_scalars);
  call.head_scalars = AsOptional(tokens.head_scalars);
  call.factor = tokens.factor;
  if (edge_bias) call.edge_bias = OfEdgesAndHeads(*edge_bias, q, indices);
  if (dropout > 0) {
    call.dropout = dropout;
    call.seed = SeedOrDrawn(seed);
  }
  call.indptr = indptr.to(at::kLong);
  call.indices = indices.to(at::kLong);
  call.function = tokens.function;
  auto [o, lse, statistics] = GraphOperator::CallForward(call);
  if (tokens.row_constant) {
    lse = (lse.t().unsqueeze(0) + tokens.row_constant()).squeeze(0).t();
  }
  return {o.to(q.scalar_type()), lse};
}

std::tuple<torch::Tensor, torch::Tensor> graph_attention_with_lse(
    const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
    const torch::Tensor& indptr, const torch::Tensor& indices,
    const GraphAttentionOptions& options) {
  return GraphAttentionOfSpecs(q, k, v, indptr, indices, options.similarity().spec,
                               options.similarity().tensors, options.scale(), options.edge_bias(),
                               options.dropout(), ToArgument<OptionalTensor>(options.seed()));
}

torch::Tensor graph_attention(const torch::Tensor& q, const torch::Tensor& k,
                              const torch::Tensor& v, const torch::Tensor& indptr,
                              const torch::Tensor& indices, const GraphAttentionOptions& options) {
  return std::get<0>(graph_attention_with_lse(q, k, v, indptr, indices, options));
}

}  // namespace gnomon
