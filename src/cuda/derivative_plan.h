// The plan of the forward-mode derivatives of a call (derivatives.cuh).
#ifndef GNOMON_SRC_CUDA_DERIVATIVE_PLAN_H_
#define GNOMON_SRC_CUDA_DERIVATIVE_PLAN_H_

#include <cstdint>

#include "cuda/attention.h"
#include "cuda/backend.h"
#include "cuda/plan.h"
#include "gnomon/attention.h"

namespace gnomon::cuda {

class DerivativePlan : public Plan {
 public:
  // Both inputs must be supported (see Unsupported()) and outlive the plan.
  DerivativePlan(const PairFunction& function, const Input& in, const Input& tangent,
                 Backend& backend);

  // PrepareRows() must have been called.
  void Forward(const Saved& saved, const OutputTangents& out);
  void Backward(const Saved& saved, const CotangentTangents& cotangent, const Gradient& gradient);

 private:
  // Computes the tangents of squared norms.
  void PrepareNorms();
  void PrepareNorms(const Array& rows, const Array& tangents, int64_t heads, int64_t count,
                    float* to);
  // Finds non-finite tangents of values.
  void PrepareValues();
  // Chooses the tiles of a pass. `words` and `scores`: as in LayoutOfDuals.
  void Fit(Constants& c, bool is_backward, int words, int64_t scores) const;
  int SharedBytes(const Constants& c, bool is_backward, int words, int64_t scores) const;
  // The number of columns that a block of queries accumulates at most.
  int64_t MostColumns() const;
  int WordsOfKeys() const;
  int WordsOfQueries() const;
  // The number of arrays of pair values that the pass over queries needs.
  static int64_t ScoresOfKeys(const Constants& c);
  void PassOverQueries(const Constants& c, int words, const Gradient& gradient, int64_t first,
                       int64_t count);

  const Input& tangent_;
};

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_DERIVATIVE_PLAN_H_
