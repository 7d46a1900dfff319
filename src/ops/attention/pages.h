// Keys and values in pages, as the caches of many sequences store them: key j of batch element b is
// row j % size of page table[b, j / size].
#ifndef GNOMON_OPS_ATTENTION_PAGES_H_
#define GNOMON_OPS_ATTENTION_PAGES_H_

#include <ATen/core/Tensor.h>

#include "ops/attention/call.h"
#include "ops/operators/attention_operators.h"

namespace gnomon {

struct Pages {
  at::Tensor keys;    // (N, Hkv, size, D)
  at::Tensor values;  // (N, Hkv, size, Dv)
  at::Tensor table;   // (B, T), int64

  // The pages of a call. Checks the call's tokens and its table, including the entries of visible
  // keys on the CPU.
  static Pages Of(const char* operation, const at::Tensor& q, const at::Tensor& k,
                  const at::Tensor& v, const CallArguments& arguments);

  // Whether kernels can read the pages, whose rows must be contiguous.
  bool AreReadable() const;
};

// Checks that an operator's pages belong together and to its other arguments.
void CheckPages(const OperatorArguments& arguments);

// Copies the tokens of all batch elements, (B, Hkv, T size, columns), from their pages (N, Hkv,
// size, columns). Entries outside [0, N) are clamped.
at::Tensor GatherPages(const at::Tensor& pages, const at::Tensor& table);

// The same on the CPU, for a call without derivatives. Pages that key_lengths hides are not copied,
// so their keys are arbitrary.
at::Tensor GatherSeenPages(const at::Tensor& pages, const at::Tensor& table,
                           const OptionalTensor& key_lengths);

// A view with the shape of the gathered tokens, but with other values.
at::Tensor ShapeOfGathered(const at::Tensor& pages, const at::Tensor& table);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_PAGES_H_
