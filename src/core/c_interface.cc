// Implements the C interface on top of the C++ interface.
#include <exception>
#include <string>

#include "gnomon/attention.h"
#include "gnomon/gnomon.h"

namespace gnomon {
namespace {

thread_local std::string last_error;

template <class T>
View<T> Contiguous(T* data, int64_t heads, int64_t rows, int64_t columns) {
  return {data, {heads * rows * columns, rows * columns, columns}};
}

template <class T>
View<T> Queries(const gnomon_attention& c, T* data, int64_t columns) {
  return Contiguous(data, c.heads, c.queries, columns);
}

template <class T>
View<T> Keys(const gnomon_attention& c, T* data, int64_t columns) {
  return Contiguous(data, c.key_heads, c.keys, columns);
}

AttentionInput<float> Input(const gnomon_attention& c) {
  AttentionInput<float> in;
  in.shape = {.batch = c.batch,
              .heads = c.heads,
              .key_heads = c.key_heads,
              .queries = c.queries,
              .keys = c.keys,
              .dim = c.dim,
              .value_dim = c.value_dim};
  in.x = Queries(c, c.x, c.dim);
  in.y = Keys(c, c.y, c.dim);
  in.v = Keys(c, c.v, c.value_dim);
  in.row_scalars = c.row_scalars;
  in.column_scalars = c.column_scalars;
  in.head_scalars = c.head_scalars;
  in.factor = c.factor;
  in.bias.table = c.bias;
  if (c.causal != 0) in.mask.right = 0;
  in.query_offset = c.query_offset;
  in.tolerance = c.tolerance;
  return in;
}

const PairFunction& Function(const gnomon_attention& c) {
  if (c.function == nullptr) throw Error("attention: function is null");
  return FindPairFunction(c.function);
}

// Runs body and converts exceptions to a return value and a message, because no exception may
// propagate into C code.
template <class Body>
int Guard(const Body& body) {
  try {
    last_error.clear();
    body();
    return GNOMON_OK;
  } catch (const Error& error) {
    last_error = error.what();
    return GNOMON_INVALID_ARGUMENT;
  } catch (const std::exception& error) {
    last_error = error.what();
    return GNOMON_FAILURE;
  }
}

}  // namespace
}  // namespace gnomon

int gnomon_attention_forward(const gnomon_attention* input, float* o, float* lse) {
  return gnomon::Guard([&] {
    if (input == nullptr) throw gnomon::Error("attention: input is null");
    const gnomon::AttentionOutput<float> output = {
        .o = gnomon::Queries(*input, o, input->value_dim),
        .lse = lse,
        .statistics = input->statistics};
    gnomon::AttentionForward(gnomon::Function(*input), gnomon::Input(*input), output,
                             gnomon::ThreadExecutor(input->threads));
  });
}

int gnomon_attention_backward(const gnomon_attention* input, const float* o, const float* lse,
                              const float* d_o, const gnomon_attention_gradient* gradient) {
  return gnomon::Guard([&] {
    if (input == nullptr) throw gnomon::Error("attention: input is null");
    if (gradient == nullptr) throw gnomon::Error("attention: gradient is null");
    const gnomon::AttentionBackwardInput<float> saved = {
        .o = gnomon::Queries(*input, o, input->value_dim),
        .lse = lse,
        .d_o = gnomon::Queries(*input, d_o, input->value_dim),
        .statistics = input->statistics};
    gnomon::AttentionGradient<float> grad;
    grad.x = gnomon::Queries(*input, gradient->x, input->dim);
    grad.y = gnomon::Keys(*input, gradient->y, input->dim);
    grad.v = gnomon::Keys(*input, gradient->v, input->value_dim);
    grad.row_scalars = gradient->row_scalars;
    grad.column_scalars = gradient->column_scalars;
    grad.head_scalars = gradient->head_scalars;
    grad.factor = gradient->factor;
    grad.bias.table = gradient->bias;
    gnomon::AttentionBackward(gnomon::Function(*input), gnomon::Input(*input), saved, grad,
                              gnomon::ThreadExecutor(input->threads));
  });
}

const char* gnomon_last_error() { return gnomon::last_error.c_str(); }
