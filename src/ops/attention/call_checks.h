// Argument checks of the operators. Invalid arguments throw c10::ValueError, c10::TypeError or
// c10::NotImplementedError, with messages that begin with `operation`.
#ifndef GNOMON_OPS_ATTENTION_CALL_CHECKS_H_
#define GNOMON_OPS_ATTENTION_CALL_CHECKS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <optional>
#include <vector>

#include "ops/attention/call.h"
#include "ops/operators/tensors.h"

namespace gnomon {

// Checks a dropout probability.
void CheckDropoutRate(const char* operation, double rate);
// Checks the rate and the seed.
void CheckDropout(const char* operation, double rate, const OptionalTensor& seed);
// The seed as a 0-dimensional tensor, drawn from PyTorch's generator if absent.
at::Tensor SeedOrDrawn(const OptionalTensor& seed);
void CheckTolerance(const char* operation, double tolerance);

// Checks dropout, seed, tolerance, score_softcap, chunks and the window.
void CheckOptions(const CallArguments& arguments);

// Checks q, k and v of attention.
void CheckTokens(const char* operation, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& v);

// Checks a token tensor of any operator: its dtype must be floating-point, its device must be
// supported, and both must equal those of q.
void CheckTokenType(const char* operation, const char* name, const at::Tensor& tensor,
                    const at::Tensor& q);

// Checks that a tensor contains integers and is on the device of q.
void CheckIntegerType(const char* operation, const char* name, const at::Tensor& tensor,
                      const at::Tensor& q);

// Checks an integer tensor for the batch of q, (B,) or (B, length), and returns it as int64. A
// tensor without a batch axis applies to the whole batch.
OptionalTensor CheckIntegers(const char* operation, const char* name, const OptionalTensor& tensor,
                             const at::Tensor& q, const OptionalSymInt& length = std::nullopt);

// Broadcasts a tensor to the given sizes without copying it. If it has no batch or head axis, or
// size 1 along that axis, all batches or heads share its values.
at::Tensor Broadcast(const char* name, const char* expected, const at::Tensor& tensor,
                     std::vector<c10::SymInt> sizes);

// Like Broadcast, for an array over query-key pairs; returns (1 or B, 1 or H, Lq, Lk).
at::Tensor BroadcastPairs(const char* name, const at::Tensor& pairs, const at::Tensor& q,
                          const at::Tensor& k);

// Returns k (B, Hkv, Lk, D) with hidden keys set to 0, because NaN in a hidden key would propagate
// to the gradient of a token map.
at::Tensor WithoutHidden(const at::Tensor& k, const OptionalTensor& key_starts,
                         const OptionalTensor& key_lengths);

// Converts a parameter to the computing type. Throws c10::TypeError, with a message that begins
// with `what`, unless its dtype is the computing type or that of q.
template <class... Parts>
at::Tensor AsParameter(const at::Tensor& tensor, const at::Tensor& q, const Parts&... what) {
  const at::ScalarType computing = ComputingType(q);
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == computing || dtype == q.scalar_type(), what..., " has dtype ", dtype,
                   ", but q has ", q.scalar_type(), "; expected ", computing,
                   computing == q.scalar_type() ? "" : " or the dtype of q");
  return InType(tensor, computing);
}

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_CALL_CHECKS_H_
