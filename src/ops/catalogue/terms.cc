// Written by `make facades` from the catalogue, that is the files of the terms.
#include <gnomon/torch/terms.h>

#include <utility>

#include "ops/catalogue/term_builder.h"

namespace gnomon {

namespace similarity {

Similarity Dot(std::optional<double> softcap) {
  return TermBuilder("dot").With("softcap", softcap).Build<Similarity>();
}

Similarity Additive(double slope) {
  return TermBuilder("additive").With("slope", slope).Build<Similarity>();
}

Similarity Cosine(HeadValue scale) {
  return TermBuilder("cosine").With("scale", scale).Build<Similarity>();
}

Similarity Entailment(HeadValue gamma, double K, const std::string& map) {
  return TermBuilder("entailment")
      .With("gamma", gamma)
      .With("K", K)
      .With("map", map)
      .Build<Similarity>();
}

Similarity Gaussian(HeadValue gamma) {
  return TermBuilder("gaussian").With("gamma", gamma).Build<Similarity>();
}

Similarity Hyperbolic(HeadValue beta, const std::string& model,
                      const std::optional<std::string>& map) {
  return TermBuilder("hyperbolic")
      .With("beta", beta)
      .With("model", model)
      .With("map", map)
      .Build<Similarity>();
}

Similarity Laplacian(HeadValue gamma) {
  return TermBuilder("laplacian").With("gamma", gamma).Build<Similarity>();
}

Similarity Lorentz(HeadValue scale, HeadValue c, HeadValue bias, const std::string& map) {
  return TermBuilder("lorentz")
      .With("scale", scale)
      .With("c", c)
      .With("bias", bias)
      .With("map", map)
      .Build<Similarity>();
}

Similarity Penumbral(HeadValue gamma, double r, const std::string& map, const std::string& score) {
  return TermBuilder("penumbral")
      .With("gamma", gamma)
      .With("r", r)
      .With("map", map)
      .With("score", score)
      .Build<Similarity>();
}

Similarity Umbral(HeadValue gamma, double r, const std::string& map, const std::string& score) {
  return TermBuilder("umbral")
      .With("gamma", gamma)
      .With("r", r)
      .With("map", map)
      .With("score", score)
      .Build<Similarity>();
}

}  // namespace similarity

namespace position {

Position RoPE(double base, const std::string& layout, std::optional<int64_t> dims,
              const std::vector<int64_t>& shape, int64_t prefix,
              const std::optional<std::string>& scaling, bool xpos,
              const std::vector<int64_t>& sections, const std::string& section_order,
              std::optional<torch::Tensor> angles, std::optional<torch::Tensor> key_angles) {
  return TermBuilder("rope")
      .With("base", base)
      .With("layout", layout)
      .With("dims", dims)
      .With("shape", shape)
      .With("prefix", prefix)
      .WithDetails("scaling", scaling)
      .With("xpos", xpos)
      .With("sections", sections)
      .With("section_order", section_order)
      .With("angles", std::move(angles))
      .With("key_angles", std::move(key_angles))
      .Build<Position>();
}

Position RoPEMixed(torch::Tensor frequencies, const std::string& layout,
                   const std::vector<int64_t>& shape, int64_t prefix) {
  return TermBuilder("rope_mixed")
      .With("frequencies", std::move(frequencies))
      .With("layout", layout)
      .With("shape", shape)
      .With("prefix", prefix)
      .Build<Position>();
}

Position ALiBi(HeadValue slopes) {
  return TermBuilder("alibi").With("slopes", slopes).Build<Position>();
}

Position HyPE(HeadValue tau, HeadValue mu, const std::string& mode) {
  return TermBuilder("hype").With("tau", tau).With("mu", mu).With("mode", mode).Build<Position>();
}

Position Kerple(HeadValue r1, HeadValue r2, const std::string& kind) {
  return TermBuilder("kerple").With("r1", r1).With("r2", r2).With("kind", kind).Build<Position>();
}

Position OffsetBias(torch::Tensor table) {
  return TermBuilder("offset_bias").With("table", std::move(table)).Build<Position>();
}

Position Sandwich(HeadValue factor, int64_t dims, double base) {
  return TermBuilder("sandwich")
      .With("factor", factor)
      .With("dims", dims)
      .With("base", base)
      .Build<Position>();
}

Position T5(torch::Tensor table, bool bidirectional, int64_t max_distance) {
  return TermBuilder("t5")
      .With("table", std::move(table))
      .With("bidirectional", bidirectional)
      .With("max_distance", max_distance)
      .Build<Position>();
}

Position GridBias(torch::Tensor table, int64_t prefix) {
  return TermBuilder("grid_bias")
      .With("table", std::move(table))
      .With("prefix", prefix)
      .Build<Position>();
}

Position Forget(torch::Tensor log_forget) {
  return TermBuilder("forget").With("log_forget", std::move(log_forget)).Build<Position>();
}

Position KeyBias(torch::Tensor bias) {
  return TermBuilder("key_bias").With("bias", std::move(bias)).Build<Position>();
}

Position PairBias(torch::Tensor bias) {
  return TermBuilder("pair_bias").With("bias", std::move(bias)).Build<Position>();
}

Position AbsoluteKeys(torch::Tensor table) {
  return TermBuilder("absolute_keys").With("table", std::move(table)).Build<Position>();
}

Position ContentBias(torch::Tensor query, torch::Tensor table, int64_t extent) {
  return TermBuilder("content_bias")
      .With("query", std::move(query))
      .With("table", std::move(table))
      .With("extent", extent)
      .Build<Position>();
}

Position Disentangled(torch::Tensor keys, torch::Tensor queries, int64_t max_distance) {
  return TermBuilder("disentangled")
      .With("keys", std::move(keys))
      .With("queries", std::move(queries))
      .With("max_distance", max_distance)
      .Build<Position>();
}

Position Relative(torch::Tensor table, int64_t max_offset, const std::string& far,
                  std::optional<torch::Tensor> values, std::optional<torch::Tensor> query) {
  return TermBuilder("relative")
      .With("table", std::move(table))
      .With("max_offset", max_offset)
      .With("far", far)
      .With("values", std::move(values))
      .With("query", std::move(query))
      .Build<Position>();
}

Position Relative2D(torch::Tensor rows, torch::Tensor columns, int64_t height, int64_t width,
                    int64_t prefix) {
  return TermBuilder("relative2d")
      .With("rows", std::move(rows))
      .With("columns", std::move(columns))
      .With("prefix", prefix)
      .With("shape", std::vector<int64_t>{height, width})
      .Build<Position>();
}

Position TransformerXL(torch::Tensor u, torch::Tensor v, torch::Tensor r, bool bidirectional) {
  return TermBuilder("transformer_xl")
      .With("u", std::move(u))
      .With("v", std::move(v))
      .With("r", std::move(r))
      .With("bidirectional", bidirectional)
      .Build<Position>();
}

Position QKNorm(torch::Tensor q_weight, torch::Tensor k_weight, double epsilon) {
  return TermBuilder("qk_norm")
      .With("q_weight", std::move(q_weight))
      .With("k_weight", std::move(k_weight))
      .With("epsilon", epsilon)
      .Build<Position>();
}

Position LogTemperature(double scale, double length, const std::string& kind) {
  return TermBuilder("log_temperature")
      .With("scale", scale)
      .With("length", length)
      .With("kind", kind)
      .Build<Position>();
}

Position ScalableSoftmax(HeadValue s) {
  return TermBuilder("scalable_softmax").With("s", s).Build<Position>();
}

Position Sink(torch::Tensor score) {
  return TermBuilder("sink").With("score", std::move(score)).Build<Position>();
}

Position Gate(torch::Tensor values) {
  return TermBuilder("gate").With("values", std::move(values)).Build<Position>();
}

}  // namespace position

}  // namespace gnomon
