// Written by `make facades` from the catalogue, that is the files of the terms.
#include <gnomon/torch/encodings.h>

#include "ops/catalogue/term_builder.h"

namespace gnomon::nn {

TokenEncoding CAPE(int64_t dim, const CAPEOptions& options) {
  return TokenEncoding(TermBuilder("cape")
                           .With("global_shift", options.global_shift())
                           .With("local_shift", options.local_shift())
                           .With("global_scale", options.global_scale())
                           .With("normalize", options.normalize())
                           .With("shape", options.shape())
                           .With("prefix", options.prefix())
                           .Build<Term>()
                           .spec,
                       dim);
}

TokenEncoding Convolutional(int64_t dim, int64_t kernel, int64_t groups, bool causal) {
  return TokenEncoding(
      TokenEncodingOptions(
          TermBuilder("conv").With("kernel", kernel).With("groups", groups).Build<Term>().spec, dim)
          .causal(causal));
}

TokenEncoding LearnedAbsolute(int64_t max_length, int64_t dim) {
  return TokenEncoding(TermBuilder("learned").With("length", max_length).Build<Term>().spec, dim);
}

TokenEncoding Sinusoidal(int64_t dim, const std::string& layout, const std::vector<int64_t>& shape,
                         int64_t prefix) {
  return TokenEncoding(TermBuilder("sinusoidal")
                           .With("layout", layout)
                           .With("shape", shape)
                           .With("prefix", prefix)
                           .Build<Term>()
                           .spec,
                       dim);
}

}  // namespace gnomon::nn
