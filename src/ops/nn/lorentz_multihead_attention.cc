#include <gnomon/torch/nn.h>

#include <cmath>
#include <tuple>
#include <utility>

#include "ops/attention/attention.h"
#include "ops/attention/call_checks.h"
#include "ops/nn/module_call.h"

namespace gnomon::nn {

LorentzMultiheadAttentionImpl::LorentzMultiheadAttentionImpl(
    const LorentzMultiheadAttentionOptions& options_)
    : options(options_) {
  constexpr const char* kName = "gnomon.nn.LorentzMultiheadAttention: ";
  TORCH_CHECK_VALUE(options.in_channels() >= 1 && options.num_heads() >= 1, kName,
                    "in_channels is ", options.in_channels(), " and num_heads is ",
                    options.num_heads(), "; expected at least 1 for both");
  TORCH_CHECK_VALUE(options.out_channels() >= 2, kName, "out_channels is ", options.out_channels(),
                    "; expected at least 2");
  TORCH_CHECK_VALUE(options.use_weight() || options.in_channels() == options.out_channels(), kName,
                    "use_weight is false, but in_channels is ", options.in_channels(),
                    " and out_channels is ", options.out_channels(),
                    "; expected in_channels to equal out_channels");
  TORCH_CHECK_VALUE(options.c() > 0, kName, "c is ", options.c(), "; expected a positive number");
  CheckDropoutRate("gnomon.nn.LorentzMultiheadAttention", options.dropout());
  reset();
}

void LorentzMultiheadAttentionImpl::reset() {
  const int64_t tokens = options.num_heads() * options.in_channels();
  const int64_t space = options.num_heads() * (options.out_channels() - 1);
  const int64_t columns = options.num_heads() * options.out_channels();
  Wk = register_module("Wk", torch::nn::Linear(tokens, space));
  Wq = register_module("Wq", torch::nn::Linear(tokens, space));
  if (options.use_weight()) Wv = register_module("Wv", torch::nn::Linear(tokens, space));
  scale = register_parameter("scale", torch::full({1}, std::sqrt(static_cast<double>(columns)),
                                                  torch::get_default_dtype()));
  bias = register_parameter("bias", torch::zeros({}));
  if (options.trans_heads_concat()) {
    final_linear = register_module("final_linear", torch::nn::Linear(columns, columns - 1));
  }
  if (options.learned_c()) {
    c = register_parameter("c", torch::scalar_tensor(options.c(), torch::get_default_dtype()));
  }
}

torch::Tensor LorentzMultiheadAttentionImpl::forward(const torch::Tensor& query,
                                                     const torch::Tensor& source_or_none,
                                                     const AttentionCall& call) {
  const torch::Tensor& source = source_or_none.defined() ? source_or_none : query;
  const int64_t tokens = options.num_heads() * options.in_channels();
  CheckEmbeddings("LorentzMultiheadAttention", query, tokens);
  CheckEmbeddings("LorentzMultiheadAttention", source, tokens);
  const HeadValue curvature = options.learned_c() ? HeadValue(c) : HeadValue(options.c());
  torch::Tensor q = Heads(Wq(query), options.num_heads());
  torch::Tensor k = Heads(Wk(source), options.num_heads());
  if (options.normalize()) {
    q = q / q.norm(2, {-1}, /*keepdim=*/true);
    k = k / k.norm(2, {-1}, /*keepdim=*/true);
  }
  torch::Tensor v = options.use_weight()
                        ? lorentz::lift(Heads(Wv(source), options.num_heads()), curvature)
                        : Heads(source, options.num_heads());
  KVCache joined;
  CallArguments arguments =
      JoinCache("LorentzMultiheadAttention", call, query, source, /*of_keys=*/{}, k, v, joined);
  arguments.aggregation = "lorentz_centroid";
  if (is_training()) arguments.dropout = options.dropout();
  const Outputs outputs =
      AttentionOfTerms(q, k, v, similarity::Lorentz(1 / scale.reshape({}), curvature, bias),
                       options.position(), arguments, /*returns_lse=*/false);
  const torch::Tensor o = std::get<0>(outputs).transpose(1, 2);
  if (call.cache) *call.cache = std::move(joined);
  if (!options.trans_heads_concat()) return lorentz::centroid(o, curvature);
  return lorentz::lift(final_linear(o.flatten(2)), curvature);
}

}  // namespace gnomon::nn
