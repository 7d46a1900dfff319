// The plan of a call: selects kernels, chooses their constants and grids, orders their launches and
// allocates their memory.
#ifndef GNOMON_SRC_CUDA_PLAN_H_
#define GNOMON_SRC_CUDA_PLAN_H_

#include <cstdint>
#include <string>

#include "cuda/attention.h"
#include "cuda/backend.h"
#include "cuda/launch_context.h"
#include "cuda/parameters.h"
#include "cuda/relative_tables.h"
#include "gnomon/attention.h"

namespace gnomon::cuda {

class Plan {
 public:
  // The input must be supported (see Unsupported()).
  Plan(const PairFunction& function, const Input& in, Backend& backend);
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Computes norms, key intervals, hashes and, for the forward pass, flags of non-finite values.
  void PrepareRows(bool is_forward);
  void Forward(const Output& out);
  void Backward(const Saved& saved, const Gradient& gradient);
  // See LaunchContext.
  const std::string& kernels() const { return context_.kernels(); }

 protected:
  // Computes the places of tokens and, from call positions, bounds of the keys that each query
  // attends to. `c`: the constants of row-wise kernels.
  void PreparePositions(const Constants& c);
  // Whether intervals of keys are narrowed to those with weights above the tolerance.
  bool Narrows() const;
  void NarrowIntervals(Constants c);
  // Widens `count` arrays of intervals until both ends ascend.
  void AscendIntervals(Constants c, int64_t count);
  // Sets the parameters that passes with gradients read and write, and allocates the gradients of
  // factors and head scalars per row. Returns whether these are needed.
  bool SetGradients(const Saved& saved, const Gradient& gradient);
  // Whether the forward pass is that for compute capability 9.0.
  bool RunsOnHopper() const;
  void ForwardOnHopper(bool splits);
  int Scalars() const;
  // The number of inputs per pair in addition to tokens, scalars and the offset bias.
  int64_t Terms() const;
  // Whether the backward pass can, or does, evaluate each pair only once.
  bool FitsOnePass() const;
  bool RunsInOnePass(const Saved& saved, const Gradient& gradient) const;
  // Whether one pass needs the outputs of a precise forward pass.
  bool NeedsPrecision() const;
  void PassOverPairs(Constants c, const Gradient& gradient);
  void PrepareDelta(int64_t count, bool one_pass);
  // `scores`: the number of arrays of pair values that a tile needs.
  int SharedOfBackward(const Constants& c, int words, int64_t scores) const;
  // Computes gradients of queries and factors, and the balanced deltas that the other passes use.
  void PassOverKeys(const Constants& c, int64_t count);
  // The number of blocks that add to a head's bias gradients; each has its own partial sum.
  int64_t PartsOfKeys(const Constants& c, const Gradient& gradient) const;
  // Whether any gradient is computed by the pass over queries.
  static bool WantsKeys(const Gradient& gradient);
  // Prepares the sums of the pass over queries, for all slices.
  void PrepareSums(const Constants& c, const Gradient& gradient);
  // Computes gradients of keys, values and biases for `count` query heads starting at `first`.
  void PassOverQueries(const Constants& c, const Gradient& gradient, int64_t first, int64_t count);
  // Sums the per-row gradients of factors and head scalars over the rows of each head, in all batch
  // elements.
  void SumHeads(const Gradient& gradient);
  void SumBiases(const Bias<float>& to);

  LaunchContext context_;
  RelativeTables relative_;
  const PairFunction& function_;
  const AttentionShape& n_;
  const Constants& features_;
  Parameters& p_;
  bool distance_;
};

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_PLAN_H_
